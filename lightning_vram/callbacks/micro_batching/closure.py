"""The closure of automatic optimization, in micro-batches: forward and backward of each part.

Lightning's closure runs forward, zeroing and backward once each, in this order, and so does the first part here. Hooks
of the user see one step: those of zeroing and ``on_before_backward`` come before the first backward,
``on_after_backward`` after the last, when the gradients are those of the batch. A step that runs again calls the first
again, since what they wrote into the module was taken back.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.utilities.memory import recursive_detach
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.callbacks.micro_batching.runner import MicroBatch, MicroBatchRunner
from lightning_vram.core.batches.micro_batches import OutputCombineError, combine_outputs
from lightning_vram.core.gradients import expect_buffer_sync, reduce_gradients, sync_buffers
from lightning_vram.core.module_state import iterate_members
from lightning_vram.core.patching import MethodPatch, replace_by
from lightning_vram.private_names.lightning import (
    AutomaticOptimization,
    blocked_sync,
    call_hook,
    is_accumulating,
    make_backward,
    make_step,
    make_zero_grad,
)
from lightning_vram.private_names.torch import own_parameters


@contextmanager
def quiet_hooks(trainer: pl.Trainer, names: Collection[str], notifying: Callable[[Callback], bool]) -> Iterator[None]:
    """Within the context, call hooks ``names`` only on callbacks for which ``notifying`` is true, not on the module."""
    module = trainer.lightning_module
    quiet: list[tuple[Any, str]] = [(module, name) for name in names if _overrides(module, name, pl.LightningModule)]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        heard = [name for name in names if _overrides(callback, name, Callback)]
        if heard and not notifying(callback):
            quiet += [(callback, name) for name in heard]
    with ExitStack() as stack:
        for owner, name in quiet:
            stack.callback(MethodPatch(owner, name, replace_by(lambda *_, **__: None)).remove)
        yield


def _overrides(owner: Any, name: str, base: type) -> bool:
    return name in vars(owner) or getattr(type(owner), name, None) is not getattr(base, name)


_warnings = WarningCache()
_BEFORE, _AFTER = "on_before_backward", "on_after_backward"


class MicroBatchClosure(Closure):
    """Runs one batch: forward, zeroing and backward."""

    def __init__(
        self,
        loop: AutomaticOptimization,
        kwargs: OrderedDict[str, Any],
        optimizer: Optimizer,
        batch_idx: int,
        runner: MicroBatchRunner,
    ) -> None:
        super().__init__(step_fn=make_step(loop, kwargs))
        self._loop = loop
        self._trainer = loop.trainer
        self._kwargs = kwargs
        self._optimizer = optimizer
        self._runner = runner
        self._backward = make_backward(loop, optimizer)
        self._zero_grad = make_zero_grad(loop, batch_idx, optimizer)
        self._has_run_backward = False

    @override
    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        batch = next(iter(self._kwargs.values()))
        model = self._trainer.strategy.model
        # under DDP, if its reducer must not run in a backward
        is_by_hand = self._runner.reduces_by_hand and self._backward is not None
        by_hand = model if is_by_hand and isinstance(model, DistributedDataParallel) else None
        if by_hand is not None:
            sync_buffers(by_hand)  # not inside of an attempt, which must not wait for other ranks
        with blocked_sync(self._trainer.strategy, block=by_hand is not None):
            outputs = self._runner.run(batch, self._step, self._parameters, zeroes=self._zero_grad is not None)
        if by_hand is not None and not is_accumulating(self._trainer.fit_loop.epoch_loop):
            reduce_gradients(by_hand)
            expect_buffer_sync(by_hand)
        if self._has_run_backward:
            call_hook(self._trainer, _AFTER)  # once, for those who have not heard it of each part
        return self._combine(outputs)

    def _step(self, part: MicroBatch) -> ClosureResult:
        if part.is_first:
            self._has_run_backward = False  # of an attempt that failed
        kwargs = OrderedDict(self._kwargs)
        kwargs[next(iter(kwargs))] = part.batch
        with nullcontext() if part.is_last else blocked_sync(self._trainer.strategy, block=True):
            result = make_step(self._loop, kwargs)()
            if result.closure_loss is None:
                self.warning_cache.warn(
                    "`training_step` returned `None`. If this was on purpose, ignore this warning..."
                )
            if part.is_first:
                if self._zero_grad is not None:
                    self._zero_grad()
                self._runner.remember_gradients()
            if result.closure_loss is not None and self._backward is not None:
                self._run_backward(self._backward, _weighted(result.closure_loss, part.factor), part)
        if part.is_first and part.is_last:
            return result
        detached = ClosureResult(None, extra=recursive_detach(result.extra))  # without the graph, which is large
        if result.loss is not None:
            detached.loss = _weighted(result.loss, part.factor)
        return detached

    def _run_backward(self, backward: Callable[[Tensor], None], loss: Tensor, part: MicroBatch) -> None:
        if part.factor == 0 and not self._runner.has_equal_counts:  # else others wait in their backward
            return  # 0 * (0 / 0), of a mean over no tokens, is not 0
        names = {_AFTER} if part.is_first else {_BEFORE, _AFTER}
        with quiet_hooks(self._trainer, names, lambda callback: getattr(callback, "hears_micro_batches", False)):
            backward(loss)
        self._has_run_backward = True

    def _parameters(self) -> Iterator[Tensor]:
        """Whatever may get a gradient: also what the step itself unfreezes, and what the module does not know."""
        for member in iterate_members(self._trainer.lightning_module):  # parameters() is slow
            yield from (parameter for parameter in own_parameters(member).values() if parameter is not None)
        for group in self._optimizer.param_groups:
            yield from group["params"]

    def _combine(self, outputs: list[tuple[MicroBatch, ClosureResult]]) -> ClosureResult:
        if len(outputs) == 1:
            return outputs[0][1]
        ran = [(part, result) for part, result in outputs if result.loss is not None]
        combined = ClosureResult(None)
        if not ran:
            return combined
        losses = [result.loss for part, result in ran if result.loss is not None and part.factor]
        combined.loss = torch.stack(losses or [result.loss for _, result in ran if result.loss is not None]).sum()
        if any(result.extra for _, result in ran):
            combined.extra = _combine_extras(
                self._trainer.lightning_module, [result.asdict() for _, result in ran], [part for part, _ in ran]
            )
        return combined


def _weighted(loss: Tensor, factor: float) -> Tensor:
    return loss if factor == 1 else loss * factor


def combine_step_outputs(module: pl.LightningModule, outputs: Sequence[Any], parts: Sequence[MicroBatch]) -> Any:
    """Combine by the module's ``combine_outputs(outputs, sizes)``, else by the rule of the package."""
    sizes = [part.size for part in parts]
    own = getattr(module, "combine_outputs", None)
    if callable(own):
        return own(list(outputs), sizes)
    return combine_outputs(outputs, sizes, [part.share for part in parts], parts[0].batch_dim)


def _combine_extras(
    module: pl.LightningModule, outputs: Sequence[Mapping[str, Any]], parts: Sequence[MicroBatch]
) -> dict[str, Any]:
    """Combine what training steps returned in addition to their loss; what cannot be combined becomes a list."""
    if callable(getattr(module, "combine_outputs", None)) or any(one.keys() != outputs[0].keys() for one in outputs):
        whole = combine_step_outputs(module, outputs, parts)
        return {key: value for key, value in whole.items() if key != "loss"}
    combined: dict[str, Any] = {}
    for key in outputs[0]:
        values = [one[key] for one in outputs]
        try:
            combined[key] = combine_step_outputs(module, [{key: value} for value in values], parts)[key]
        except OutputCombineError as error:
            _warnings.warn(
                f"on_train_batch_end receives outputs[{key!r}] as a list, one entry per micro-batch: {error}"
            )
            combined[key] = values
    del combined["loss"]
    return combined


def patch_evaluation_steps(trainer: pl.Trainer, get_runner: Callable[[], MicroBatchRunner]) -> list[MethodPatch]:
    """Let ``get_runner()`` run the evaluation steps of the strategy, until the patches are removed."""

    def step(inner: Callable[..., Any], /, batch: Any, *args: Any) -> Any:
        runner = get_runner()
        model = trainer.strategy.model
        if isinstance(model, DistributedDataParallel) and runner.retries:
            sync_buffers(model)  # not inside of an attempt, which must not wait for other ranks
        outputs = runner.run(batch, lambda part: inner(part.batch, *args))
        if len(outputs) == 1:
            return outputs[0][1]
        parts = [part for part, _ in outputs]
        return combine_step_outputs(trainer.lightning_module, [output for _, output in outputs], parts)

    steps = ("validation_step", "test_step", "predict_step")
    return [MethodPatch(trainer.strategy, name, partial(partial, step)) for name in steps]
