"""Where our callbacks act in Lightning's run, and what they ask of it. May import: optimizers, core, memory.

``before_strategy_setup`` changes a module before it is wrapped, ``AroundStep`` enters a context around each step,
``FitTechnique`` is a callback that does both and undoes it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from functools import partial
from typing import Any, ClassVar

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_vram.core.patching import MethodPatch
from lightning_vram.memory.device.accelerators import shares_host_memory
from lightning_vram.optimizers.library_moments import Library, why_not_installed
from lightning_vram.optimizers.low_precision import LowPrecisionMoments
from lightning_vram.optimizers.moment_forms import FORMS, HostState, StateForm, UpdateCheck, describe_unsupported
from lightning_vram.private_names.lightning import is_loops_closure, read_timeout


class _BeforeStrategySetup(MethodPatch):
    """Replaces ``strategy.setup`` for one call: removes itself, runs the actions in order, then calls it.

    ``Callback.setup`` runs before ``LightningModule.configure_model``: layers made there do not exist yet, and
    Lightning has no hook between the two. ``Strategy.setup`` comes right after, before precision conversion, device
    moves, DDP or FSDP wrapping and ``configure_optimizers``.
    """

    def __init__(self, strategy: pl.strategies.Strategy) -> None:
        self.actions: list[Callable[[], None]] = []
        super().__init__(strategy, "setup", partial(partial, self._run))

    def _run(self, setup: Callable[[pl.Trainer], None], trainer: pl.Trainer) -> None:
        actions = self.actions
        self.withdraw()
        for action in actions:
            action()
        setup(trainer)

    def withdraw(self) -> None:
        self.actions = []
        self.remove()


def before_strategy_setup(trainer: pl.Trainer, action: Callable[[], None]) -> None:
    """Run ``action`` right before the next ``trainer.strategy.setup``, once, in order of registration."""
    patch = vars(trainer.strategy).get("setup")
    if not isinstance(patch, _BeforeStrategySetup) or not patch.actions:  # one without only passes calls on
        patch = _BeforeStrategySetup(trainer.strategy)
    patch.actions.append(action)


def withdraw_from_strategy_setup(trainer: pl.Trainer) -> None:
    """Forget all actions: for a run that ended before its strategy was set up."""
    patch = vars(trainer.strategy).get("setup")
    if isinstance(patch, _BeforeStrategySetup):
        patch.withdraw()


def check_trainer(name: str, trainer: object) -> None:
    """Refuse a Trainer of ``pytorch_lightning``, whose classes differ: checks by class would not apply."""
    if not isinstance(trainer, pl.Trainer):
        package = type(trainer).__module__.partition(".")[0]
        raise MisconfigurationException(
            f"{name} works with lightning.pytorch, got a Trainer of {package}. "
            "Replace 'import pytorch_lightning as pl' by 'import lightning.pytorch as pl'."
        )


def refuse_several(trainer: pl.Trainer, kind: type[Callback], message: str) -> None:
    """Refuse a second callback of a kind in one Trainer."""
    if sum(isinstance(one, kind) for one in trainer.callbacks) > 1:  # type: ignore[attr-defined]
        raise MisconfigurationException(message)


def refuse_moved_parameters(name: str, trainer: pl.Trainer, use: str) -> None:
    """Refuse FSDP1 and DeepSpeed, which free and move parameters. ``use``: what the callback does with them."""
    if isinstance(trainer.strategy, FSDPStrategy | DeepSpeedStrategy):
        raise MisconfigurationException(
            f"{name} does not work with {type(trainer.strategy).__name__}: it frees and moves parameters that {use}. "
            "Use ModelParallelStrategy (FSDP2), 'ddp' or a single device."
        )


class FitTechnique(Callback, ABC):
    """Applies right before the strategy is set up, to a complete, unwrapped module; undoes it however the fit ends."""

    _stages: ClassVar[tuple[str, ...]] = ("fit",)  # in which it applies

    @abstractmethod
    def _apply(self, trainer: pl.Trainer) -> None:
        """Apply the technique to ``trainer.lightning_module``. If it raises, the run ends there."""

    @abstractmethod
    def _undo(self) -> None:
        """Undo what was applied, if it was. Called more than once."""

    def _check(self, trainer: pl.Trainer) -> None:
        """Refuse what the technique cannot work with, before anything else of the fit happens."""

    def start_late(self, trainer: pl.Trainer) -> None:
        """Apply between two steps of a running fit, to a module that is wrapped, on its device and has optimizers."""
        check_trainer(type(self).__name__, trainer)
        self._check(trainer)
        self._apply(trainer)

    def give_up(self) -> None:
        """Undo it at the end of a run: nothing is moved back to a device that may be full."""
        self._undo()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_trainer(type(self).__name__, trainer)
        self._undo()  # another callback's error may have cut the end of the last run short
        if stage in self._stages:
            self._check(trainer)
            before_strategy_setup(trainer, lambda: self._apply(trainer))

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._undo()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        withdraw_from_strategy_setup(trainer)
        self._undo()


def offload_is_useless(device: torch.device, result: str, way_out: str) -> bool:
    """Warn, and return ``True``, if ``device`` shares the host's memory; ``result`` says what happens instead."""
    is_shared = shares_host_memory(device)
    if is_shared:
        rank_zero_warn(f"{result}: {device} shares memory with the CPU, so offload frees nothing. {way_out}")
    return is_shared


class Depth(IntEnum):
    """Which context is entered first: what autograd saves is dropped, else compressed, else offloaded."""

    OFFLOAD = 0
    COMPRESSION = 1
    RECOMPUTATION = 2
    OBSERVATION = 3


class _PatchedStep(MethodPatch):
    """Replaces one method of a strategy as long as there are contexts around it."""

    def __init__(self, strategy: Strategy, name: str) -> None:
        self.contexts: list[AroundStep] = []
        super().__init__(strategy, name, partial(partial, self._run))

    def _run(self, inner: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        contexts = tuple(self.contexts)  # one may be removed inside
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context.around(*args, **kwargs))
            result = inner(*args, **kwargs)
            for context in reversed(contexts):
                if context.look is not None:
                    context.look(result)
        return result


class AroundStep:
    """A context around each call of one step of a strategy, such as ``training_step``, until :meth:`remove`.

    Dispatch modes and saved-tensor hooks are stacks: entered in one callback hook and left in another, they would nest
    with those of other callbacks by the order of the list. Around the call of the step itself, after all hooks before
    it and before all hooks after it, they nest by :class:`Depth`. The backward of automatic optimization is outside.
    """

    def __init__(
        self,
        strategy: Strategy,
        name: str,
        depth: Depth,
        around: Callable[..., AbstractContextManager[object]],  # gets the arguments of the call
        look: Callable[[Any], None] | None = None,  # gets what the call returned, inside the context
    ) -> None:
        self.depth = depth
        self.around = around
        self.look = look
        step = vars(strategy).get(name)
        if not isinstance(step, _PatchedStep) or not step.contexts:  # one without only passes calls on
            step = _PatchedStep(strategy, name)
        step.contexts.append(self)
        step.contexts.sort(key=lambda context: context.depth)
        self._step = step

    def remove(self) -> None:
        """Leave it out from now on. Calling it again does nothing."""
        contexts = self._step.contexts
        if self in contexts:
            contexts.remove(self)
        if not contexts:
            self._step.remove()


_STATE_NAMES: dict[HostState, str] = {"bf16": "bfloat16", "8bit": "8 bit", "4bit": "4 bit"}


class MomentsTechnique(FitTechnique):
    """Stores moments in a form and steps with the kernels of ``library``; under ``fsdp_offload`` the strategy does."""

    def __init__(self, form: HostState, library: Library = "own") -> None:
        self._form_name: HostState = form
        self.library: Library = library
        self._moments: LowPrecisionMoments | None = None
        self._updates: UpdateCheck | None = None  # counts lost updates, if the user asked for it
        self._strategy: Any = None  # set if it stores them itself

    @property
    def _form(self) -> StateForm:
        form = FORMS.get(self._form_name)
        assert form is not None
        return form

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        name = type(self).__name__
        refuse_moved_parameters(name, trainer, "moments belong to")
        first, *others = (
            type(one).__name__
            for one in trainer.callbacks  # type: ignore[attr-defined]
            if isinstance(one, MomentsTechnique)
        )
        if others:
            named = f"Two {name}" if {first, *others} == {name} else f"{first} and {others[0]}"
            raise MisconfigurationException(f"{named} in one Trainer: leave one out.")
        missing = why_not_installed(self.library)
        if missing is not None:
            raise ModuleNotFoundError(missing)
        strategy: Any = trainer.strategy
        if hasattr(strategy, "moments") and self.library not in ("own", "auto"):
            raise MisconfigurationException(
                f"{name}(library={self.library!r}) does not work with {type(strategy).__name__}, which steps on the "
                "host: use library='own'."
            )
        if hasattr(strategy, "moments") and strategy.arguments.host_state not in ("fp32", self._form_name):
            host_state: HostState = strategy.arguments.host_state
            raise MisconfigurationException(
                f"{self._form.part} does not work with FSDPOffloadStrategy(host_state={host_state!r}), which has "
                f"moments in {_STATE_NAMES[host_state]}: leave one out."
            )

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        if hasattr(trainer.strategy, "moments"):
            self._strategy = trainer.strategy
            self._strategy.moments = self._form_name
        else:
            self._moments = LowPrecisionMoments(trainer.lightning_module, self._form, self.library, self._updates)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        form = self._form
        # A strategy has taken the steps of optimizers over by now.
        if not any(map(form.fits if self._strategy is None else form.is_for, trainer.optimizers)):
            found = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "none"
            raise MisconfigurationException(
                f"{form.part} is for the moments of {form.able}, got {found}: use one of these, as torch.optim has it, "
                f"or leave {form.part} out."
            )
        if self._moments is not None:
            self._moments.attach(trainer.optimizers)
            if self._moments.unheld:
                rank_zero_info(describe_unsupported(form.part, self._moments.unheld, pl_module))

    @override
    def _undo(self) -> None:
        moments, self._moments = self._moments, None
        strategy, self._strategy = self._strategy, None
        self._updates = None
        if moments is not None:
            moments.let_go()
        if strategy is not None:
            strategy.moments = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_moments": None, "_strategy": None, "_updates": None}  # a copy is not part of any run


_HOOKS = ("on_after_backward", "on_before_optimizer_step")
_HOOKS_OF_MODULE = (*_HOOKS, "configure_gradient_clipping", "backward")


def own_gradient_hooks(owner: pl.LightningModule | pl.Callback) -> Iterator[str]:
    """Name the hooks that may use gradients, of a module or of a callback without the attribute ``uses_gradients``."""
    is_module = isinstance(owner, pl.LightningModule)
    if is_module or not hasattr(owner, "uses_gradients"):
        own = (hook for hook in (_HOOKS_OF_MODULE if is_module else _HOOKS) if is_overridden(hook, owner))
        # A LambdaCallback is Lightning's, its hooks are not.
        yield from (hook for hook in own if not getattr(owner, hook).__module__.startswith("lightning."))


def uses_gradients(callback: pl.Callback) -> bool:
    """Whether a callback uses gradients: by its attribute ``uses_gradients``, else by its hooks."""
    return bool(getattr(callback, "uses_gradients", any(own_gradient_hooks(callback))))


def gradient_users(trainer: pl.Trainer) -> Iterator[str]:
    """Name what may use gradients after a backward: hooks of the module, callbacks, and a precision plugin."""
    yield from (f"the module's {hook}" for hook in own_gradient_hooks(trainer.lightning_module))
    yield from (type(one).__name__ for one in trainer.callbacks if uses_gradients(one))  # type: ignore[attr-defined]
    plugin = type(trainer.precision_plugin)
    yield from [] if plugin.__module__.startswith(("lightning.", "lightning_vram.")) else [plugin.__name__]


def why_not_early(trainer: pl.Trainer, closure: Callable[[], Any] | None) -> str | None:
    """Name what may use gradients between the backward in a closure and the step; ``None`` if nothing does.

    ``closure`` is what the optimizer gets; with a ``GradScaler``, what the precision plugin gets, which calls it.
    """
    user = next(gradient_users(trainer), None)
    if user is None and not is_loops_closure(closure, is_bare=is_scaled(trainer)):
        is_modules = is_overridden("optimizer_step", trainer.lightning_module)
        return "the module's optimizer_step" if is_modules else "a wrapper of the optimizer's closure"
    return user


def is_scaled(trainer: pl.Trainer) -> bool:
    """Whether gradients are scaled, so that a step may be skipped."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def rank_timeout(trainer: pl.Trainer) -> timedelta:
    """Return the ``timeout`` of the strategy, else that of ``torch.distributed``: 30 minutes."""
    arguments = getattr(trainer.strategy, "arguments", None)  # of fsdp_offload
    return getattr(arguments, "timeout", read_timeout(trainer.strategy)) or default_pg_timeout


@dataclass(frozen=True)
class OutOfMemoryRelief:
    """Used by the callback that repeats a batch after an OOM."""

    # Makes the step need less, on all ranks alike; ``False`` if it cannot. Called when the first try is gone.
    release_memory: Callable[[], bool]
    may_cut: bool  # whether the batch may then be split
    note: str  # for the error, if neither helps
