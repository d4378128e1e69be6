"""Run every batch in parts that fit, inside one step: smaller ones when memory runs out, with the same result."""

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.memory import recursive_detach
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import WarningCache
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.argument_checks import check_number, check_positive_int
from lightning_vram.callbacks import hook_points
from lightning_vram.callbacks.micro_batching.runner import MicroBatch, MicroBatchRunner, why_counts_must_be_equal
from lightning_vram.core.batches.micro_batches import (
    BatchWeight,
    OutputCombineError,
    WeightName,
    combine_outputs,
    make_batch_weight,
)
from lightning_vram.core.batches.splitting import check_shared_keys
from lightning_vram.core.gradients import expect_buffer_sync, reduce_gradients, sync_buffers, why_reducer_is_needed
from lightning_vram.core.patching import MethodPatch, replace_by
from lightning_vram.core.ranks import RankAgreement
from lightning_vram.core.rollback import iterate_members
from lightning_vram.core.tensors.properties import is_sharded
from lightning_vram.private_names import lightning as private_lightning
from lightning_vram.private_names.torch import has_accumulation_hooks, own_parameters
from lightning_vram.techniques.micro_batching import AgreedSizes, BatchCutter, MicroBatchSizes, find_time_first
from lightning_vram.techniques.sharding import can_recover


def _check_trainer(trainer: pl.Trainer, *, is_training: bool) -> None:
    """Refuse what cannot work, in the ``setup`` hooks, before anything has changed."""
    hook_points.refuse_moved_parameters("MicroBatching", trainer, "a second forward in one step would find elsewhere")
    module = trainer.lightning_module
    for step in ["training_step"] if is_training else ["validation_step", "test_step", "predict_step"]:
        if is_param_in_hook_signature(getattr(module, step), "dataloader_iter", explicit=True):
            raise MisconfigurationException(
                f"MicroBatching does not work with {step}(self, dataloader_iter): the step fetches its batches "
                f"itself. Use {step}(self, batch, batch_idx)."
            )
    if is_training and not module.automatic_optimization:
        raise MisconfigurationException(
            "MicroBatching does not work with manual optimization: training_step runs forward and backward itself. Set "
            "automatic_optimization=True, or split the batch in training_step."
        )


def _check_gradients(trainer: pl.Trainer, *, retries: bool) -> None:
    """Refuse other ways to reduce and use gradients, which show only once the strategy has wrapped the module."""
    stepping = [name for name, p in trainer.lightning_module.named_parameters() if has_accumulation_hooks(p)]
    for optimizer in trainer.optimizers:  # has the shards of what is gathered
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        stepping += [type(optimizer).__name__ for p in parameters if has_accumulation_hooks(p)]
    if stepping:
        raise MisconfigurationException(
            "MicroBatching does not work with post-accumulate-grad hooks, which optimizers in the backward use: "
            f"they would run once per micro-batch. Remove the hook of {stepping[0]}."
        )
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return
    if model.static_graph:
        raise MisconfigurationException(
            "MicroBatching does not work with DDPStrategy(static_graph=True): its first backward must be "
            "synchronized, and that of a first micro-batch is not. Remove static_graph."
        )
    if retries and (reason := why_reducer_is_needed(model)) is not None:
        raise MisconfigurationException(
            f"MicroBatching('auto') does not work with {reason}: gradients are averaged after the backward, without "
            "the reducer. Give a fixed size, such as MicroBatching(8)."
        )


def _reduced_by_hand(trainer: pl.Trainer, *, retries: bool, weighs: bool) -> DistributedDataParallel | None:
    """Return the DDP module if gradients are averaged after the backward; its reducer must not run in one."""
    # A rank that runs out of memory in the middle of a reduction leaves the others waiting in it. A parameter that only
    # an earlier micro-batch used is unused for the reducer. And the last micro-batch, after which it reduces, may have
    # weight 0.
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return None
    is_by_hand = retries or ((model.find_unused_parameters or weighs) and why_reducer_is_needed(model) is None)
    return model if is_by_hand else None


@contextmanager
def quiet_hooks(trainer: pl.Trainer, names: Collection[str], notifying: Callable[[Callback], bool]) -> Iterator[None]:
    """Within the context, call hooks ``names`` only on callbacks for which ``notifying`` is true, not on the module."""
    module = trainer.lightning_module
    quiet: list[tuple[Any, str]] = [(module, name) for name in names if is_overridden(name, module)]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        heard = [name for name in names if is_overridden(name, callback, Callback)]
        if heard and not notifying(callback):
            quiet += [(callback, name) for name in heard]
    with ExitStack() as stack:
        for owner, name in quiet:
            stack.callback(MethodPatch(owner, name, replace_by(lambda *_, **__: None)).remove)
        yield


_warnings = WarningCache()
_BEFORE, _AFTER = "on_before_backward", "on_after_backward"


class MicroBatchClosure(Closure):
    """Runs one batch in micro-batches: forward, zeroing and backward.

    Lightning's closure runs forward, zeroing and backward once each, in this order, and so does the first part here.
    Hooks of the user see one step: those of zeroing and ``on_before_backward`` come before the first backward,
    ``on_after_backward`` after the last, when the gradients are those of the batch. A step that runs again calls the
    first again, since what they wrote into the module was taken back.
    """

    def __init__(
        self,
        loop: private_lightning.AutomaticOptimization,
        kwargs: OrderedDict[str, Any],
        optimizer: Optimizer,
        batch_idx: int,
        runner: MicroBatchRunner,
        reduced_by_hand: DistributedDataParallel | None,
    ) -> None:
        super().__init__(step_fn=private_lightning.make_step(loop, kwargs))
        self._loop = loop
        self._trainer = loop.trainer
        self._kwargs = kwargs
        self._optimizer = optimizer
        self._runner = runner
        self._backward: Callable[[Tensor], None] | None = getattr(loop, private_lightning.MAKE_BACKWARD)(optimizer)
        self._zero_grad: Callable[[], None] | None = getattr(loop, private_lightning.MAKE_ZERO_GRAD)(
            batch_idx, optimizer
        )
        self._reduced_by_hand = reduced_by_hand if self._backward is not None else None
        self._has_run_backward = False

    @override
    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        batch, by_hand = next(iter(self._kwargs.values())), self._reduced_by_hand
        if by_hand is not None:
            sync_buffers(by_hand)  # not inside of an attempt, which must not wait for other ranks
        with private_lightning.blocked_sync(self._trainer.strategy, block=by_hand is not None):
            outputs = self._runner.run(batch, self._step, self._parameters, zeroes=self._zero_grad is not None)
        if by_hand is not None and not private_lightning.is_accumulating(self._trainer.fit_loop.epoch_loop):
            reduce_gradients(by_hand)
            expect_buffer_sync(by_hand)
        if self._has_run_backward:
            private_lightning.call_hook(self._trainer, _AFTER)  # once, for those who have not heard it of each part
        return self._combine(outputs)

    def _step(self, part: MicroBatch) -> ClosureResult:
        if part.is_first:
            self._has_run_backward = False  # of an attempt that failed
        kwargs = OrderedDict(self._kwargs)
        kwargs[next(iter(kwargs))] = part.batch
        with nullcontext() if part.is_last else private_lightning.blocked_sync(self._trainer.strategy, block=True):
            result = private_lightning.make_step(self._loop, kwargs)()
            if result.closure_loss is None:
                self.warning_cache.warn(
                    "`training_step` returned `None`. If this was on purpose, ignore this warning..."
                )
            if part.is_first:
                if self._zero_grad is not None:
                    self._zero_grad()
                self._runner.take_gradients()
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
        ran = [(part, result, result.loss) for part, result in outputs if result.loss is not None]
        combined = ClosureResult(None)
        if not ran:
            return combined
        losses = [loss for part, _, loss in ran if part.factor] or [loss for _, _, loss in ran]
        combined.loss = torch.stack(losses).sum()
        if any(result.extra for _, result, _ in ran):
            module, parts = self._trainer.lightning_module, [part for part, _, _ in ran]
            whole = _combine_outputs(module, [result.asdict() for _, result, _ in ran], parts, lists=True)
            combined.extra = {key: value for key, value in whole.items() if key != "loss"}
        return combined


def _weighted(loss: Tensor, factor: float) -> Tensor:
    return loss if factor == 1 else loss * factor


def _combine_outputs(
    module: pl.LightningModule, outputs: Sequence[Any], parts: Sequence[MicroBatch], *, lists: bool = False
) -> Any:
    """Combine by the module's ``combine_outputs(outputs, sizes)``, else by the rule of the package.

    ``lists``: entries of a dict that cannot be combined become a list.
    """
    sizes, shares = [part.size for part in parts], [part.share for part in parts]
    own = getattr(module, "combine_outputs", None)
    if callable(own):
        return own(list(outputs), sizes)
    if not lists or any(one.keys() != outputs[0].keys() for one in outputs):
        return combine_outputs(outputs, sizes, shares, parts[0].batch_dim)
    combined: dict[str, Any] = {}
    for key in outputs[0]:
        try:
            combined |= combine_outputs([{key: one[key]} for one in outputs], sizes, shares, parts[0].batch_dim)
        except OutputCombineError as error:
            _warnings.warn(
                f"on_train_batch_end receives outputs[{key!r}] as a list, one entry per micro-batch: {error}"
            )
            combined[key] = [one[key] for one in outputs]
    return combined


def _patch_evaluation_steps(trainer: pl.Trainer, get_runner: Callable[[], MicroBatchRunner]) -> list[MethodPatch]:
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
        return _combine_outputs(trainer.lightning_module, [output for _, output in outputs], parts)

    steps = ("validation_step", "test_step", "predict_step")
    return [MethodPatch(trainer.strategy, name, partial(partial, step)) for name in steps]


Size = int | Literal["auto"]


@dataclass
class _Run:
    """State from setup to teardown."""

    patches: list[MethodPatch] = field(default_factory=list)
    runners: dict[str, MicroBatchRunner] = field(default_factory=dict)  # "training", "evaluation"
    agreement: RankAgreement | None = None
    is_checked: bool = False  # whether gradients are reduced and used in a way that MicroBatching can keep
    logged_size: int | None = None


class MicroBatching(hook_points.FitTechnique):
    """Split each batch into micro-batches inside one optimizer step, by default only after an out-of-memory error.

    ``training_step`` runs once per micro-batch, forward and backward, so only one micro-batch's activations are in
    memory. The loss of a micro-batch counts by its share of the batch. The optimizer, gradient accumulation, the
    gradient scaler, schedulers and hooks see one step of one batch.

    With ``"auto"`` a batch starts whole. After an out-of-memory error in forward or backward, the graph and gradients
    of the attempt are dropped; random generators, buffers, metrics, logged values and module attributes are restored;
    the cache is emptied; and all ranks run the batch again in halves. The size that fits is remembered per batch shape,
    also in checkpoints.

    Lossless (equal to the whole batch up to rounding): gradients of losses that are means over samples, or over the
    units that ``weight`` counts; ``self.log`` with mean, sum, min and max; what metrics compute over an epoch (a step
    shows the mean of a metric's values over the micro-batches). Exact: a run that recovered from out-of-memory errors
    equals one that used these sizes from the start. Different from the whole batch: losses and layers that couple
    samples (contrastive losses with in-batch negatives; BatchNorm normalizes each micro-batch separately, although
    running statistics count one step); dropout masks; and everything that ``training_step`` updates itself (spectral
    norm, EMA teachers, codebooks, ``self.n += 1``), which happens once per micro-batch.

    Values from ``self.log`` appear in ``trainer.callback_metrics`` after the step. The zeroing hooks and
    ``on_before_backward`` run after the forward of the first micro-batch, in each attempt. A micro-batch with weight 0
    has no backward. With ``"auto"``, copies of small buffers, and of the accumulated gradients during gradient
    accumulation, are stored until the step has succeeded.

    Batches are split by :class:`~lightning_vram.core.batches.splitting.BatchSplitter`. An entry with as many rows as
    there are samples is split, unless ``shared_keys`` names it. A ``split_batch(batch, size)`` method of the
    LightningModule replaces these rules: it returns micro-batches of ``size`` samples, the last one with the remainder,
    and can trim padding. With ``"auto"``, a batch that cannot be split runs whole, with one warning. Outputs are joined
    by :func:`~lightning_vram.core.batches.micro_batches.combine_outputs` or by the module's ``combine_outputs(outputs,
    sizes)``; outputs that cannot be joined are an error in evaluation and a list in training.

    Under DDP with ``"auto"``, gradients are reduced after the backward; with a fixed size the reduction overlaps the
    backward as usual. Under FSDP2 and with SyncBatchNorm all ranks run equally many micro-batches; an out-of-memory
    error on some ranks only is raised, because the others wait in a collective.

    Args:
        size: Maximum number of samples per micro-batch, or ``"auto"``. Micro-batches are as few and as equal as
            possible.
        weight: Unit that the loss of a step is averaged over: ``"samples"``; ``"tokens"``, labels other than -100;
            ``"shifted_tokens"``, tokens without the first of each sequence, for Hugging Face causal language models; a
            function of a batch; or ``"sum"``, for losses that are sums over samples. Logged means use the same weights,
            unless ``self.log(batch_size=...)`` gives other numbers than those of samples.
        shared_keys: Names of batch entries that belong to all samples, at any depth.
        split: A function ``split(batch, size)``, like ``split_batch``, for a module without that method.
        batch_dim: Dimension of the samples, such as 1 for ``[T, B, D]``; tensors with fewer dimensions are split along
            their first. ``None``: 0, and an error (with ``"auto"`` a warning) if the batch may be ``[T, B, D]`` because
            the module has a recurrent layer or attention with ``batch_first=False``.
        regrow_after_n_batches: With ``"auto"``, the number of batches of one shape after which the double size is tried
            again; each failure doubles the number. ``None`` never tries.
        eval: ``size`` for validation, test and prediction steps; ``None`` leaves them unchanged.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a size or a number of batches is smaller than 1, or a string is not one of those listed.
        MisconfigurationException: Before the first batch, with manual optimization, DeepSpeed, FSDP1, or a
            ``training_step`` that takes ``dataloader_iter``; with ``"auto"`` also if DDP's reducer is required
            (communication hooks, ``static_graph``), and under FSDP2 before PyTorch 2.13.
        BatchSplitError: In the first batch, if it cannot be split; with ``"auto"`` only if an entry of ``shared_keys``
            is missing.

    Attributes:
        micro_batch_size: Samples per micro-batch in the last training batch, also logged as ``vram/micro_batch_size``
            when it changes; ``None`` if the batch could not be split.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import MicroBatching
        >>> trainer = pl.Trainer(callbacks=[MicroBatching("auto")], logger=False)
    """

    uses_gradients = True  # a backward may run again: see FSDPOffloadStrategy

    def __init__(  # noqa: PLR0913 - by name
        self,
        size: Size = "auto",
        *,
        weight: WeightName | Literal["sum"] | Callable[[Any], Any] = "samples",
        shared_keys: Sequence[str] = (),
        split: Callable[[Any, int], Sequence[Any]] | None = None,
        batch_dim: int | None = None,
        regrow_after_n_batches: int | None = 1000,
        eval: Size | None = None,
    ) -> None:
        _check_size("MicroBatching(size)", size)
        if eval is not None:
            _check_size("MicroBatching(eval)", eval)
        if regrow_after_n_batches is not None:
            check_positive_int("MicroBatching(regrow_after_n_batches)", regrow_after_n_batches)
        check_shared_keys("MicroBatching(shared_keys)", shared_keys)
        if split is not None and not callable(split):
            raise TypeError(f"MicroBatching(split) must be a function split(batch, size), got {split!r}.")
        if batch_dim is not None:
            check_number("MicroBatching(batch_dim)", batch_dim, int, "a dimension such as 1, or None", at_least=0)
        if batch_dim is not None and split is not None:
            raise ValueError(
                "MicroBatching takes batch_dim= or split=, not both: split= alone decides how a batch is split."
            )
        if batch_dim and weight == "shifted_tokens":
            raise ValueError(
                "MicroBatching(weight='shifted_tokens') expects labels as [samples, time]. With batch_dim= give a "
                "function of the batch, such as weight=lambda batch: (batch[1][1:] != -100).sum()."
            )
        _read_weight(weight)  # refuses what is none
        self.weight = weight
        self.size = size
        self.eval = eval
        self._shared_keys = tuple(shared_keys)
        self._split = split
        self.batch_dim = batch_dim
        self._choosers = {
            name: MicroBatchSizes(regrow_after_n_batches, None if chosen == "auto" else chosen)
            for name, chosen in (("training", size), ("evaluation", eval))
            if chosen is not None
        }
        self._run = _Run()
        self._last_size: int | None = None
        self.relief: hook_points.OutOfMemoryRelief | None = None  # is tried before a batch is cut; of AutoVRAM

    def starting_with(self, size: int) -> "MicroBatching":
        """Return a copy whose ``"auto"`` starts with ``size`` samples, as if it had found this size."""
        clone = copy.copy(self)
        clone._choosers = dict(self._choosers)
        for name in [name for name, one in self._choosers.items() if one.retries]:
            clone._choosers[name] = MicroBatchSizes(None, size)
            clone._choosers[name].retries = True  # the state before the step is held, as in such a run
        return clone

    @property
    def micro_batch_size(self) -> int | None:
        """Samples per micro-batch in the last training batch; ``None`` if there was none or it could not be split."""
        runner = self._run.runners.get("training")
        return self._last_size if runner is None else runner.size

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage != "fit" and self.eval is not None:
            _check_trainer(trainer, is_training=False)
            hook_points.before_strategy_setup(trainer, lambda: self._apply_to_evaluation(trainer))

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start(trainer)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._start(trainer)

    on_test_start = on_validation_start
    on_predict_start = on_validation_start

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        size = self.micro_batch_size
        if size is None or size == self._run.logged_size:
            return
        self._run.logged_size = size
        for logger in trainer.loggers:
            logger.log_metrics({"vram/micro_batch_size": float(size)}, step=trainer.global_step)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {name: chooser.state_dict() for name, chooser in self._choosers.items() if chooser.retries}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name, chooser in self._choosers.items():
            if chooser.retries and name in state_dict:
                chooser.load_state_dict(state_dict[name])

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_run": _Run()}  # a copy starts between runs

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        _check_trainer(trainer, is_training=True)

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop.automatic_optimization

        def make_closure(kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
            runner = self._start(trainer)["training"]  # tuners train before on_fit_start
            if not self._run.is_checked:  # in the first batch: hooks come late
                _check_gradients(trainer, retries=runner.retries)
                self._run.is_checked = True
            by_hand = _reduced_by_hand(trainer, retries=runner.retries, weighs=runner.weighs)
            return MicroBatchClosure(loop, kwargs, optimizer, batch_idx, runner, by_hand)

        self._run.patches.append(MethodPatch(loop, private_lightning.MAKE_CLOSURE, replace_by(make_closure)))
        if self.eval is not None:
            self._apply_to_evaluation(trainer)

    def _apply_to_evaluation(self, trainer: pl.Trainer) -> None:
        self._run.patches += _patch_evaluation_steps(trainer, lambda: self._start(trainer)["evaluation"])

    @override
    def _undo(self) -> None:
        for patch in self._run.patches:
            patch.remove()
        if self._run.agreement is not None:
            self._run.agreement.close()
        self._last_size = self.micro_batch_size
        self._run = _Run()

    def _start(self, trainer: pl.Trainer) -> dict[str, MicroBatchRunner]:
        """Once the module is wrapped: whether ranks meet in its forward decides how they agree."""
        if self._run.runners or not self._run.patches:
            return self._run.runners
        if "auto" in (self.size, self.eval) and is_sharded(trainer.lightning_module) and not can_recover():
            raise MisconfigurationException(
                "MicroBatching('auto') needs PyTorch 2.13 or newer under FSDP2: older versions cannot recover from a "
                "failed forward or backward. Give a fixed size, such as MicroBatching(8)."
            )
        if trainer.world_size > 1:
            self._run.agreement = RankAgreement(hook_points.rank_timeout(trainer))
        weight = _read_weight(self.weight)
        module = trainer.lightning_module
        split = self._split or getattr(module, "split_batch", None)
        time_first = find_time_first(module) if self.batch_dim is None else None
        for name, chooser in self._choosers.items():
            is_training = name == "training"
            collective = why_counts_must_be_equal(trainer, is_training=is_training)
            # Nothing else is shared in evaluation, where ranks may have different numbers of batches.
            agreement = self._run.agreement if is_training or collective is not None else None
            sizes = AgreedSizes(chooser, agreement, has_equal_counts=collective is not None)
            cutter = BatchCutter(
                self._shared_keys, split, batch_dim=self.batch_dim or 0, time_first=time_first, has_all_keys=is_training
            )
            self._run.runners[name] = MicroBatchRunner(
                trainer, cutter, sizes, weight, is_training=is_training, relief=self.relief
            )
        return self._run.runners


def _check_size(name: str, size: object) -> None:
    if size != "auto":
        check_number(name, size, int, "a number of samples or 'auto'", at_least=1)


def _read_weight(weight: Any) -> BatchWeight | Literal["sum"] | None:
    if isinstance(weight, str) and weight in ("samples", "sum"):
        return "sum" if weight == "sum" else None
    return make_batch_weight(weight, "MicroBatching(weight)", "sum")
