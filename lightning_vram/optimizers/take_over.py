"""Replace the step of optimizers: attached ones, those created during training, and unknown classes on shards."""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_vram.core.patching import MethodPatch, replace_by
from lightning_vram.optimizers.step_round import (
    as_sharded,
    has_own_step,
    iterate_parameters,
    make_twin,
    unhooked_step,
)
from lightning_vram.private_names.fsdp2 import local_shard
from lightning_vram.private_names.torch import note_step

_living: "WeakKeyDictionary[StepTakeOver, None]" = WeakKeyDictionary()  # in the order of their creation
_hooks: list[RemovableHandle] = []  # one, while there may be any
_owners: "WeakKeyDictionary[Optimizer, ref[StepTakeOver]]" = WeakKeyDictionary()
_stepping: list[Optimizer] = []  # in a replaced step


class StepTakeOver(ABC):
    """Base of classes that replace the step of optimizers, which stay the same objects.

    Optimizers that were never attached are attached at their first step, until :meth:`remove_patches`.
    """

    def __init__(self) -> None:
        self._taken: list[Optimizer] = []  # whose step is :meth:`_step`
        self._patches: list[MethodPatch] = []
        self._handles: list[RemovableHandle] = []  # of hooks of optimizers
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_redirect))
        _living[self] = None

    @abstractmethod
    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Call :meth:`_take_over` for the optimizers that this steps."""

    @abstractmethod
    def _has_ours(self, optimizer: Optimizer) -> bool:
        """Whether it has parameters that only this may step."""

    @abstractmethod
    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        """Step it; its hooks run before and after."""

    def remove_patches(self) -> None:
        """Let all optimizers step and load by themselves again."""
        for patch in reversed(self._patches):
            patch.remove()
        for handle in self._handles:
            handle.remove()
        self._patches, self._handles = [], []
        _living.pop(self, None)
        while _hooks and not _living:
            _hooks.pop().remove()

    @staticmethod
    def _run_closure(optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Begin a step: note it for schedulers, and return the loss."""
        note_step(optimizer)
        with torch.enable_grad():
            return None if closure is None else closure()

    def _take_over(self, optimizer: Optimizer) -> None:
        self._taken.append(optimizer)
        _owners[optimizer] = ref(self)
        self._patch_step(optimizer, self._step)

    def _patch_step(self, optimizer: Optimizer, step: Callable[..., Any]) -> None:
        # Hooks run once per step, and see the optimizer unchanged.
        call = partial(self._call, Optimizer.profile_hook_step(step), optimizer)
        self._patches.append(MethodPatch(optimizer, "step", replace_by(call)))

    def _call(self, hooked_step: Callable[..., Any], optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> Any:
        _stepping.append(optimizer)
        try:
            return hooked_step(optimizer, *args, **kwargs)
        finally:
            _stepping.pop()

    def _takes_in(self, optimizer: Optimizer) -> bool:
        """Attach a stepping optimizer that has our parameters; return whether its step is to be replaced now."""
        if (_stepping and optimizer is _stepping[-1]) or not self._has_ours(optimizer):
            return False
        self.attach([optimizer])  # a no-op if it is attached: a step that was bound before bypasses the patch
        return self._is_taken(optimizer)

    def _is_taken(self, optimizer: Optimizer) -> bool:
        return any(optimizer is one for one in self._taken)


def owner_of(optimizer: Optimizer) -> StepTakeOver | None:
    """Return the last object that took over the step of ``optimizer``, if it still has it."""
    owner = _owners.get(optimizer, lambda: None)()
    return owner if owner is not None and owner._is_taken(optimizer) else None


def _redirect(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Replace a step that begins, between its hooks; errors of the other step end it."""
    given = closure = args[1] if len(args) > 1 else kwargs.get("closure")
    for owner in list(_living):
        if owner._takes_in(optimizer):
            closure = partial(owner._step, optimizer, closure)
    if closure is given:
        return None
    # The running step cannot be stopped, but it begins with its closure.
    return (make_twin(type(optimizer), vars(optimizer), [], {}), closure), {}


def can_step_wholes(optimizer: Optimizer) -> bool:
    """Whether its step is its own: an optimizer within it would have the parameters, too."""
    others = (value for key, value in vars(optimizer).items() if key != "step")
    return has_own_step(optimizer) and not any(isinstance(value, Optimizer) for value in others)


class WholeSteps:
    """Steps one optimizer that may look at shapes: on whole parameters over the same memory.

    Outside its own code, groups and state hold sharded tensors.

    ``written`` is called before a closure runs the model: parameters may have been written by then.
    """

    def __init__(self, optimizer: Optimizer, written: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._written = written
        self._proxies: dict[nn.Parameter, nn.Parameter] = {}  # reused: optimizers may hold more by parameter
        self._given: dict[nn.Parameter, Tensor | None] = {}  # gradients of proxies, when they were set

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the step as its class has it, without hooks. Its closure sees shards."""

        def call_closure() -> Any:
            assert closure is not None
            self._put_back()
            try:
                self._written()
                with torch.enable_grad():
                    return closure()
            finally:
                self._put_proxies()

        self._put_proxies()
        try:
            step = unhooked_step(type(self._optimizer))
            return step(self._optimizer) if closure is None else step(self._optimizer, call_closure)
        finally:
            self._put_back()

    def _put_proxies(self) -> None:
        state = self._optimizer.state
        sharded = [p for p in iterate_parameters(self._optimizer) if isinstance(p, DTensor)]
        for parameter in sharded:
            proxy = self._proxies.setdefault(parameter, nn.Parameter(local_shard(parameter)))
            proxy.data = local_shard(parameter)
            proxy.requires_grad_(parameter.requires_grad)
            proxy.grad = self._given[parameter] = local_shard(parameter.grad)
            if parameter in state:
                state[proxy] = {key: local_shard(value) for key, value in state.pop(parameter).items()}
        self._exchange(self._proxies)

    def _put_back(self) -> None:
        state = self._optimizer.state
        for parameter, given in self._given.items():
            proxy = self._proxies[parameter]
            if proxy.grad is not given:
                parameter.grad = as_sharded(proxy.grad, parameter, proxy.shape)
            proxy.grad = None
            if proxy in state:
                local = state.pop(proxy).items()
                state[parameter] = {key: as_sharded(value, parameter, proxy.shape) for key, value in local}
        self._given = {}
        self._exchange({proxy: parameter for parameter, proxy in self._proxies.items()})

    def _exchange(self, others: dict[nn.Parameter, nn.Parameter]) -> None:
        for group in self._optimizer.param_groups:
            group["params"] = [others.get(parameter, parameter) for parameter in group["params"]]


def _is_of_sharded_tensors(error: Exception) -> bool:
    """Whether code of sharded tensors raised ``error``. Its frames are not kept: they hold tensors."""
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    # An error raised in C++ has no such frame, but names the class.
    return "DTensor" in str(error) or any(module.startswith(DTensor.__module__) for module in modules)


def explain_failures(inner: Callable[..., Any], optimizer: Optimizer, *, is_split: bool) -> Callable[..., Any]:
    """Return a step for ``inner`` that explains errors of sharded tensors."""
    advice = "such as AdamW, or a single device" if is_split else "such as AdamW"
    message = (
        f"{type(optimizer).__name__} cannot step on shards: it does with a parameter what a sharded one cannot do. Use "
        f"an optimizer of torch.optim that steps each element by itself, {advice}."
    )

    def step(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        of_model: list[Exception] = []

        def call_closure() -> Any:
            assert closure is not None
            try:
                return closure()
            except Exception as error:
                of_model.append(error)
                raise

        try:
            return inner(*args, **kwargs) if closure is None else inner(call_closure, *args, **kwargs)
        except Exception as error:
            if error in of_model or not _is_of_sharded_tensors(error):
                raise
            raise ValueError(message) from error

    return step
