"""Report memory that grows with the steps: how much, where it was allocated, and which attribute holds it.

Reading the allocators of device and host takes microseconds per step. Only if their bytes grow, one step is traced
operator by operator; references to what is left many steps later are followed back to an attribute, a global or a
closure (``memory/leaks.py``).
"""

import math
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.argument_checks import check_choice, check_number, check_positive_int
from lightning_vram.callbacks.hook_points import AroundStep, Depth, FitTechnique
from lightning_vram.memory.device.accelerators import free_device_bytes
from lightning_vram.memory.host import available_host_bytes
from lightning_vram.memory.leaks import Leak, LeakSearch, LiveBytes, Program
from lightning_vram.memory.units import format_bytes, parse_bytes
from lightning_vram.private_names.dispatcher import is_compiled
from lightning_vram.private_names.torch import ends_of_graph, tensors_in
from lightning_vram.techniques.early_release import gradient_bytes


def _named_objects(trainer: pl.Trainer) -> dict[str, object]:
    """Return what references are followed from: the module is ``self``, a callback is named by its class."""
    others = (*trainer.callbacks, *trainer.loggers, trainer.datamodule)  # type: ignore[attr-defined]
    by_class = {type(one).__name__: one for one in others if one is not None}
    return {"self": trainer.lightning_module} | by_class | {"trainer": trainer}


def _lasting_tensors(trainer: pl.Trainer) -> Iterator[Tensor]:
    """Yield tensors that may be new after any step, and last: parameters, gradients, buffers, optimizer state."""
    parameters = list(trainer.lightning_module.parameters())
    yield from parameters
    yield from (parameter.grad for parameter in parameters if parameter.grad is not None)
    yield from trainer.lightning_module.buffers()
    for optimizer in trainer.optimizers:
        yield from tensors_in(list(optimizer.state.values()))


_LEAST_PATIENCE = 5  # fewer steps grow by chance
_BATCHES_IF_UNKNOWN = 10_000  # to the end of an epoch whose length no loader tells
_STEPS = {"train": "training_step", "validate": "validation_step", "test": "test_step", "predict": "predict_step"}
_LENGTHS = {"validate": "num_val_batches", "test": "num_test_batches", "predict": "num_predict_batches"}


class MemoryLeakError(RuntimeError):
    """Memory grows with the steps of a training or of an evaluation."""


class LeakDetector(FitTechnique):
    """Report memory leaks: bytes per step, the line that allocated them and the attribute that holds them.

    Allocated bytes of device and host are read after each optimizer step, and after each batch of validation, test
    and prediction. If they grow steadily, one step is traced. A leak is a tensor of that step that is still alive
    ``patience`` steps later while memory keeps growing. Autograd graphs are reported at once. Other tensors, such as
    collected outputs or metric lists, are reported only if they outlive the epoch and grow in the next one, or if they
    would cause an out-of-memory error before its end. Each leak is reported once, on every rank that finds it. Training
    does not change, and nothing is stored in checkpoints.

    Three mistakes that waste memory without growth are warned of, once each: an evaluation step that returns a tensor
    with its graph; parameters without an optimizer that receive gradients, such as a teacher without
    ``torch.no_grad()``; and manual optimization that calls ``zero_grad`` late.

    Args:
        patience: Number of steps over which memory must grow before a step is traced, and which its tensors must
            survive.
        on_leak: ``"warn"``, or ``"raise"`` for an error on all ranks together, for tests.
        min_bytes_per_step: Smallest growth that is reported, as an ``int`` or as ``"1MiB"``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``patience`` is smaller than 5, ``on_leak`` is another word, or ``min_bytes_per_step`` is not a
            size above 0.
        MemoryLeakError: During a fit, or at the end of another run, with ``on_leak="raise"``.

    Attributes:
        leaks: Leaks of the last run, each with its stage: ``("train", leak)``, or ``"validate"``, ``"test"``,
            ``"predict"``.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import LeakDetector
        >>> trainer = pl.Trainer(callbacks=[LeakDetector(on_leak="raise")], logger=False)
    """

    takes_no_memory = True  # an estimate leaves it out
    uses_gradients = False  # in its hooks, so that optimizers may step before: see FSDPOffloadStrategy
    _stages: ClassVar[tuple[str, ...]] = ("fit", *_LENGTHS)

    def __init__(
        self, patience: int = 20, on_leak: Literal["warn", "raise"] = "warn", min_bytes_per_step: int | str = "4KiB"
    ) -> None:
        check_number("LeakDetector(patience)", patience, int, "an int", at_least=_LEAST_PATIENCE)
        check_choice("LeakDetector(on_leak)", on_leak, ("warn", "raise"))
        self.patience = patience
        self.on_leak = on_leak
        self.min_bytes_per_step = parse_bytes(min_bytes_per_step, "LeakDetector(min_bytes_per_step)")
        check_positive_int("LeakDetector(min_bytes_per_step)", self.min_bytes_per_step)
        self.leaks: list[tuple[str, Leak]] = []
        self._searches: dict[str, LeakSearch] = {}
        self._around: list[AroundStep] = []
        self._to_raise: str | None = None
        self._last_step = 0
        self._stepped: list[Optimizer] | None = None  # before the second batch; ``None`` if gradients are not looked at
        self._has_graph: set[str] = set()  # evaluations whose outputs have one

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        self.leaks = []
        self._last_step = 0
        strategy = trainer.strategy
        offload = getattr(getattr(strategy, "arguments", None), "offload", "none")  # of fsdp_offload
        self._stepped = [] if offload == "none" and not strategy.handles_gradient_accumulation else None
        counter = LiveBytes(strategy.root_device)
        program = Program(
            count=counter.read,
            held=partial(_lasting_tensors, trainer),
            names=partial(_named_objects, trainer),
            follows_operators=not is_compiled(trainer.lightning_module),
            room=partial(_available_bytes, trainer),
        )
        reported: set[str] = set()
        for stage, step in _STEPS.items():
            search = self._searches[stage] = LeakSearch(program, self.patience, self.min_bytes_per_step, reported)
            self._around.append(AroundStep(strategy, step, Depth.OBSERVATION, search.around_step))
        devices = " and ".join(counter.read())
        rank_zero_info(
            f"LeakDetector reads the allocated memory of {devices} after each step."
            if devices
            else "LeakDetector finds no allocator statistics on this machine: it checks only some of the steps."
        )

    @override
    def _undo(self) -> None:
        for around in self._around:
            around.remove()
        vars(self).update(self._between_runs())

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._stepped and not pl_module.automatic_optimization:
            _warn_of_late_zeroing(self._stepped)
        self._stepped = None if self._stepped else self._stepped  # only the first steps are looked at

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        if self._stepped is None:
            return
        if not self._stepped:
            _warn_of_unstepped_gradients(pl_module, trainer.optimizers)
        self._stepped.append(optimizer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != self._last_step:  # between two optimizer steps gradients may exist or not
            self._last_step = trainer.global_step
            num_left = _batches_left(trainer.num_training_batches, batch_idx)
            self._note("train", self._searches["train"].end_step(num_left), trainer)
        if trainer.world_size == 1 or batch_idx % self.patience == 0:
            self._raise_together(trainer)

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._searches["train"].end_epoch()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._raise_together(trainer)

    @override
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        stage = self._evaluation(trainer)
        if stage is None:
            return
        if stage not in self._has_graph and any(map(ends_of_graph, tensors_in(outputs))):
            self._has_graph.add(stage)
            rank_zero_warn(
                f"LeakDetector: {type(pl_module).__name__}.{_STEPS[stage]} returns a tensor with its autograd graph, "
                "which holds activations. Return tensor.detach(), or remove torch.enable_grad()."
            )
        num_left = _batches_left(getattr(trainer, _LENGTHS[stage])[dataloader_idx], batch_idx)
        self._note(stage, self._searches[stage].end_step(num_left), trainer)

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        stage = self._evaluation(trainer)
        if stage is None:
            return
        self._searches[stage].end_epoch()
        if trainer.state.fn != "fit":  # there all ranks raise together in training
            self._raise_together(trainer)

    on_test_end = on_validation_end
    on_predict_end = on_validation_end

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | self._between_runs()  # a copy is not part of any run

    def _between_runs(self) -> dict[str, Any]:
        return {"_searches": {}, "_around": [], "_to_raise": None, "_stepped": None, "_has_graph": set()}

    def _evaluation(self, trainer: pl.Trainer) -> str | None:
        """Return the stage of an evaluation; ``None`` for a sanity check, and if nothing is searched."""
        stage = trainer.state.stage
        return stage.value if stage is not None and stage.value in self._searches else None

    def _note(self, stage: str, leak: Leak | None, trainer: pl.Trainer) -> None:
        if leak is None:
            return
        self.leaks.append((stage, leak))
        step = _STEPS[stage].removesuffix("_step")
        rank = f" on rank {trainer.global_rank}" if trainer.world_size > 1 else ""
        when = f", at step {trainer.global_step}" if trainer.state.fn == "fit" else ""
        message = f"LeakDetector: memory grows with the {step} steps{rank}{when}. {leak}"
        if self.on_leak == "warn":
            warnings.warn(message, stacklevel=2)
        else:
            self._to_raise = message

    def _raise_together(self, trainer: pl.Trainer) -> None:
        """Raise on all ranks at the same batch, or at the end: other ranks would wait for one that has raised."""
        if self.on_leak != "raise":
            return
        is_any = self._to_raise is not None
        if trainer.world_size > 1:
            is_any = trainer.strategy.reduce_boolean_decision(is_any, all=False)
        if is_any:
            raise MemoryLeakError(self._to_raise or "LeakDetector: memory grows with the steps on another rank.")


def _warn_of_unstepped_gradients(module: pl.LightningModule, optimizers: Iterable[Optimizer]) -> None:
    """Find a teacher in evaluation mode, but not under ``no_grad``: no optimizer zeroes its gradients."""
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    left = {name: p for name, p in module.named_parameters() if p.grad is not None and id(p) not in stepped}
    if left:
        layer = next(iter(left)).rpartition(".")[0] or type(module).__name__
        rank_zero_warn(
            f"LeakDetector: {format_bytes(gradient_bytes(left.values()))} of gradients are never freed: no optimizer "
            f"has their parameters, from {layer!r} on. Call requires_grad_(False) on frozen parameters, or run them "
            "under torch.no_grad(), which also avoids storing their graph."
        )


def _warn_of_late_zeroing(stepped: Iterable[Optimizer]) -> None:
    groups = (group for optimizer in stepped for group in optimizer.param_groups)
    num_bytes = gradient_bytes(parameter for group in groups for parameter in group["params"])
    if num_bytes:
        rank_zero_warn(
            f"LeakDetector: {format_bytes(num_bytes)} of gradients are still in memory when training_step begins, "
            "although the optimizer has already stepped. In manual optimization, call optimizer.zero_grad() right "
            "after optimizer.step()."
        )


def _batches_left(num_batches: float, batch_idx: int) -> float:
    return _BATCHES_IF_UNKNOWN if math.isinf(num_batches) else num_batches - batch_idx - 1


def _available_bytes(trainer: pl.Trainer) -> float:
    device_bytes = free_device_bytes(trainer.strategy.root_device)
    available = available_host_bytes() if device_bytes is None else device_bytes
    return math.inf if available is None else available
