"""Free gradients before the next forward instead of after it, and find other memory that a module wastes.

Lightning's closure runs the forward, then zeroes, then runs the backward: the gradients of the last step are alive
through the next forward, where activations pile up. Here zeroing comes first.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.callbacks.hook_points import FitTechnique, refuse_several
from lightning_vram.core.patching import MethodPatch
from lightning_vram.memory.leaks.holders import iterate_attributes
from lightning_vram.memory.units import format_bytes
from lightning_vram.private_names.lightning import MAKE_ZERO_GRAD
from lightning_vram.techniques.early_release import (
    HeldGraph,
    PacedCollection,
    find_held_graph,
    gradient_bytes,
    unstepped_gradients,
)


class Findings:
    """Warns of each mistake once per run, with the bytes and the way out."""

    def __init__(self) -> None:
        self.looks_at_gradients = True
        self._reported: set[str] = set()
        self._stepped: list[Optimizer] = []  # since the last batch of manual optimization

    def look_at_outputs(self, hook: str, outputs: Any, module: pl.LightningModule) -> None:
        """Find an autograd graph behind the outputs of an evaluation step."""
        graph = find_held_graph(outputs, module) if hook not in self._reported else None
        if graph is not None:
            self._warn(
                hook,
                f"{type(module).__name__}.{hook} returns a tensor with its autograd graph, which holds "
                f"{_size_of(graph, module)}. Return tensor.detach(), or remove torch.enable_grad().",
            )

    def look_at_attributes(self, module: pl.LightningModule) -> None:
        """Find autograd graphs behind attributes of the module when an evaluation or epoch is over."""
        for path, value in _attributes(module):
            graph = None
            with suppress(RecursionError):  # a list that contains itself
                graph = find_held_graph(value, module) if path not in self._reported else None
            if graph is not None:
                self._warn(
                    path,
                    f"`{path}` stores an autograd graph that no backward has used, which holds "
                    f"{_size_of(graph, module)}. Store tensor.detach(), or compute it under torch.no_grad(); "
                    "module.eval() does not disable gradients.",
                )

    def note_step(self, trainer: pl.Trainer, optimizer: Optimizer) -> None:
        """Find gradients that no optimizer steps with, at the first step of the run."""
        self._stepped.append(optimizer)
        if not self.looks_at_gradients or "step" in self._reported:
            return
        self._reported.add("step")
        unstepped = unstepped_gradients(trainer.lightning_module, trainer.optimizers)
        if unstepped:
            layer = next(iter(unstepped)).rpartition(".")[0]
            self._warn(
                "unstepped",
                f"{format_bytes(gradient_bytes(unstepped.values()))} of gradients are never freed: no optimizer "
                f"has their parameters, from {_quoted(layer, trainer.lightning_module)} on. Call "
                "requires_grad_(False) on frozen parameters, or run them under torch.no_grad(), which also "
                "avoids storing their graph.",
            )

    def look_at_manual_zeroing(self) -> None:
        """Find gradients of a step of manual optimization that are alive when the next ``training_step`` begins."""
        stepped, self._stepped = self._stepped, []
        if not self.looks_at_gradients or "manual" in self._reported:
            return
        groups = (group for optimizer in stepped for group in optimizer.param_groups)
        num_bytes = gradient_bytes(parameter for group in groups for parameter in group["params"])
        if num_bytes:
            self._warn(
                "manual",
                f"{format_bytes(num_bytes)} of gradients are still in memory when training_step begins, although "
                "the optimizer has already stepped. In manual optimization, call optimizer.zero_grad() right "
                "after optimizer.step().",
            )

    def _warn(self, finding: str, sentence: str) -> None:
        self._reported.add(finding)
        rank_zero_warn(f"EarlyRelease: {sentence}")


def _attributes(module: pl.LightningModule) -> Iterator[tuple[str, Any]]:
    for name, part in module.named_modules():
        yield from iterate_attributes(f"self.{name}" if name else "self", part)


def _size_of(graph: HeldGraph, module: pl.LightningModule) -> str:
    """Name the bytes that a graph holds, and its first layer."""
    where = "" if graph.first_layer is None else f", from {_quoted(graph.first_layer, module)} on"
    return f"{format_bytes(graph.num_bytes)}{where}"


def _quoted(layer: str, module: pl.LightningModule) -> str:
    return repr(layer) if layer else type(module).__name__


def why_not_first(trainer: pl.Trainer) -> str | None:
    """Return why zeroing stays where it is; ``None`` if it may come first."""
    strategy = trainer.strategy
    name = type(strategy).__name__
    if strategy.handles_gradient_accumulation:
        return f"{name} manages and zeroes them itself."
    offload = getattr(getattr(strategy, "arguments", None), "offload", "none")  # of fsdp_offload
    if offload != "none":  # zeroing would wait for steps that run alongside the forward
        return f"{name}(offload={offload!r}) stores them on the host."
    hook = _own_hook(trainer)
    if hook is not None:
        return f"{hook} would run before training_step, which may read what it changes. Use on_train_batch_end instead."
    return None


def _own_hook(trainer: pl.Trainer) -> str | None:
    """Name the first hook of zeroing in the user's code."""
    module, name = trainer.lightning_module, "on_before_zero_grad"
    owners = [(type(module).__name__, hook) for hook in (name, "optimizer_zero_grad") if is_overridden(hook, module)]
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    owners += [(type(one).__name__, name) for one in callbacks if is_overridden(name, one, pl.Callback)]
    return ".".join(owners[0]) if owners else None


def why_buckets_stay(trainer: pl.Trainer) -> str | None:
    """Return why DDP holds the memory of gradients, once the module is wrapped; ``None`` if it does not."""
    model = trainer.strategy.model
    if isinstance(model, DistributedDataParallel) and model.gradient_as_bucket_view:
        return "with gradient_as_bucket_view=True DDP's buckets hold them for the whole run."
    return None


Zero = Callable[[], None]
_STEPS = {
    "validate": "validation_step",
    "sanity_check": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
}


class EarlyRelease(FitTechnique):
    """Zero gradients before the forward instead of after it, and warn about memory that the module wastes. Exact.

    Peak memory of the forward falls by the size of the gradients. ``on_train_batch_end``, loggers and checkpoints still
    see the gradients; ``training_step`` finds ``None`` instead of those of the step before. During gradient
    accumulation gradients stay. If the module or a callback has its own ``on_before_zero_grad`` or
    ``optimizer_zero_grad``, nothing changes, with a warning: the hook would run before ``training_step``. In manual
    optimization your ``training_step`` calls ``zero_grad``; a warning is logged if it does so late. Nothing is stored
    in checkpoints.

    Three mistakes are reported, once each: an evaluation step that returns a tensor with its graph, with the bytes
    that the graph holds and its first layer; an attribute that still holds such a tensor at the end of an evaluation or
    epoch; and parameters without an optimizer that receive gradients, such as a teacher without ``torch.no_grad()``.

    Args:
        collect_every_n_steps: Run Python's garbage collector after every n-th optimizer step, on all ranks together,
            and at no other time in training, so that ranks do not wait for each other's collections. Takes tenths of a
            second in a large program. ``None`` leaves the collector unchanged.

    Raises:
        TypeError: If ``collect_every_n_steps`` is not an integer.
        ValueError: If it is smaller than 1.
        MisconfigurationException: In ``setup``, if the trainer has several.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import EarlyRelease
        >>> trainer = pl.Trainer(callbacks=[EarlyRelease(collect_every_n_steps=500)], logger=False)
    """

    uses_gradients = False  # in its hooks, so that optimizers may step before: see FSDPOffloadStrategy

    def __init__(self, collect_every_n_steps: int | None = None) -> None:
        if collect_every_n_steps is not None:
            check_positive_int("EarlyRelease(collect_every_n_steps)", collect_every_n_steps)
        self.collect_every_n_steps = collect_every_n_steps
        self._findings = Findings()
        self._patch: MethodPatch | None = None
        self._collection: PacedCollection | None = None
        self._has_reported = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        refuse_several(trainer, EarlyRelease, "EarlyRelease can be used once, got several. Remove all but one.")

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if (why := why_buckets_stay(trainer)) is not None:
            rank_zero_warn(f"EarlyRelease does not free gradients: {why}")
        if self.collect_every_n_steps is not None:
            self._collection = PacedCollection(self.collect_every_n_steps, trainer.global_step)

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._findings.look_at_attributes(pl_module)  # after the module's own hook at the end of the last epoch

    on_train_end = on_test_end = on_predict_end = on_train_epoch_start

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.automatic_optimization:
            self._findings.look_at_manual_zeroing()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._findings.note_step(trainer, optimizer)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        if self._collection is not None:
            self._collection.note_step(trainer.global_step)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._collection is not None:
            self._collection.end()  # ranks do not wait for each other there

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._findings.look_at_attributes(pl_module)
        if self._collection is not None:
            self._collection.resume()

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
        assert trainer.state.stage is not None
        self._findings.look_at_outputs(_STEPS[trainer.state.stage.value], outputs, pl_module)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | self._between_runs()

    def _between_runs(self) -> dict[str, Any]:
        return {"_findings": Findings(), "_patch": None, "_collection": None, "_has_reported": False}

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        if (why := why_not_first(trainer)) is not None:
            rank_zero_warn(f"EarlyRelease does not free gradients: {why}")
            self._findings.looks_at_gradients = False
        elif trainer.lightning_module.automatic_optimization:
            loop = trainer.fit_loop.epoch_loop.automatic_optimization
            self._patch = MethodPatch(loop, MAKE_ZERO_GRAD, partial(partial, self._zero_first))

    def _zero_first(
        self, make_zero: Callable[[int, Optimizer], Zero | None], batch_idx: int, optimizer: Optimizer
    ) -> Zero | None:
        """Replace what makes the zeroing of a batch: Lightning calls it with the closure, before the forward."""
        zero = make_zero(batch_idx, optimizer)
        if zero is not None:  # else gradients accumulate
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            freed_bytes = 0 if self._has_reported else gradient_bytes(parameters)
            optimizer.zero_grad()
            if freed_bytes:
                self._report(freed_bytes, gradient_bytes(parameters))
        return zero  # where it was: the loop counts it, and a forward may fill gradients itself

    def _report(self, before_bytes: int, after_bytes: int) -> None:
        self._has_reported = True
        if not after_bytes:
            rank_zero_info(f"EarlyRelease frees {format_bytes(before_bytes)} of gradients before each forward.")
            return
        if self._patch is not None:
            self._patch.remove()
        rank_zero_warn(
            f"EarlyRelease does not free gradients: zero_grad of your optimizer keeps {format_bytes(after_bytes)} "
            "of them."
        )

    @override
    def _undo(self) -> None:
        if self._patch is not None:
            self._patch.remove()
        if self._collection is not None:
            self._collection.end()
        vars(self).update(self._between_runs())
