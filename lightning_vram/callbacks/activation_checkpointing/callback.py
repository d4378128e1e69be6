"""Recompute layers in the backward instead of saving their activations.

A checkpointed layer saves its inputs only and runs its forward again in the backward: about a third more compute for a
small part of the activation memory.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import zip_longest
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_vram.argument_checks import check_bool, check_choice, check_kind, check_number, check_positive_int
from lightning_vram.callbacks.hook_points import (
    AroundStep,
    Depth,
    FitTechnique,
    offload_is_useless,
    refuse_moved_parameters,
)
from lightning_vram.core.host.memory import OffloadError, hidden_from_modes
from lightning_vram.core.layers import LayerSelection, check_layers, show_names
from lightning_vram.core.operators import BALANCE
from lightning_vram.memory.estimate.workspaces import measure_bus
from lightning_vram.memory.storages import iterate_tensors
from lightning_vram.memory.units import format_bytes, parse_bytes, parse_limit
from lightning_vram.private_names.dispatcher import FakeTensor, modules_in_compiled
from lightning_vram.techniques.activation_checkpointing import (
    BudgetedCheckpointing,
    CheckpointingHandle,
    CheckpointPlan,
    SavePolicy,
    apply_activation_checkpointing,
    parse_save,
    share_largest,
)
from lightning_vram.techniques.activation_offload import ActivationOffloading

MIN_OFFLOAD_BYTES = 1 << 20
_REMEDIES = (("recompute",), ("recompute", "offload"))
_USUAL_BUS, _USUAL_BANDWIDTH = 25e9, 1e12  # bytes per second
_FORWARD_SHARE = 0.25  # of a step that ends with its backward, every layer of it recomputed


def check_remedies(remedies: Sequence[str], offload_bytes: object, budget: object) -> int | Literal["auto"] | None:
    """Return the most bytes to offload; ``None`` if offload is off."""
    name = "ActivationCheckpointing(remedies)"
    check_kind(name, remedies, list | tuple, "a list or tuple of names")
    if tuple(remedies) not in _REMEDIES:
        raise ValueError(f"{name} must be ('recompute',) or ('recompute', 'offload'), got {remedies!r}.")
    has_offload, is_auto = "offload" in remedies, offload_bytes == "auto"
    num_bytes = 0 if is_auto else parse_bytes(offload_bytes, "ActivationCheckpointing(offload_bytes)")  # type: ignore[arg-type]
    if has_offload and budget is None:
        raise ValueError(f"{name} needs a budget to meet, got {remedies!r} without one. Set budget='6GiB'.")
    if not has_offload and not is_auto:
        raise ValueError(
            f"ActivationCheckpointing(offload_bytes={offload_bytes!r}) limits offload, which is off. "
            "Set remedies=('recompute', 'offload')."
        )
    return None if not has_offload else "auto" if is_auto else num_bytes


class BudgetOffload:
    """Offloads in each training step what a plan says, as much as PCIe transfers in time; nothing before the plan."""

    def __init__(self, trainer: pl.Trainer, offload_bytes: int | Literal["auto"]) -> None:
        self._trainer = trainer
        self._offload_bytes = offload_bytes
        self._forward_seconds = 0.0
        module = trainer.lightning_module
        self._is_fake = any(type(parameter.data) is FakeTensor for parameter in module.parameters())
        self.offloading = ActivationOffloading(module, min_offload_bytes=MIN_OFFLOAD_BYTES, most_bytes=0)
        self._context = AroundStep(trainer.strategy, "training_step", Depth.OFFLOAD, lambda *_, **__: self._step())

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the forward inside."""
        device = self._trainer.strategy.root_device
        if self._offload_bytes != "auto" or self._is_fake:
            yield
            return
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        yield
        torch.accelerator.synchronize(device)
        has_backward = not self._trainer.lightning_module.automatic_optimization
        self._forward_seconds = (time.perf_counter() - start) * (_FORWARD_SHARE if has_backward else 1)

    def bus_bytes(self, budgeted: BudgetedCheckpointing) -> int:
        """Return the bytes that PCIe transfers during a forward; what it takes is a guess if its tensors are fake."""
        if self._offload_bytes != "auto":
            return self._offload_bytes
        if self._is_fake:
            cost = max((profile.cost for profile in budgeted.profiles), default=0.0)
            return round(cost * _USUAL_BUS / (BALANCE * _USUAL_BANDWIDTH))
        with hidden_from_modes(next(self._trainer.lightning_module.parameters())):
            return round(self._forward_seconds * measure_bus(self._trainer.strategy.root_device))

    def apply(self, plan: CheckpointPlan) -> None:
        """Apply a plan from the next step on. Tensors are not cut: the last may exceed the planned bytes."""
        self.offloading.most_bytes = plan.offloaded_bytes + plan.largest_bytes if plan.offloaded_bytes else 0

    def remove(self) -> None:
        """Put everything back."""
        self._context.remove()
        self.offloading.close()

    @contextmanager
    def _step(self) -> Iterator[None]:
        try:
            with self.offloading:
                yield
        except OffloadError as error:
            raise MisconfigurationException(f"ActivationCheckpointing(remedies): {error}") from None


class ActivationCheckpointing(FitTechnique):
    """Save only the inputs of chosen layers, and recompute the rest in the backward.

    Activation checkpointing, also called gradient checkpointing or activation recomputation (Chen et al. 2016,
    https://arxiv.org/abs/1604.06174). Weights, gradients, random numbers and buffers are bitwise identical to the
    baseline: dropout draws the same mask, and BatchNorm updates its running statistics once per step. It works with
    DDP and FSDP2, gradient accumulation and manual optimization. The layers change their class while ``fit`` runs and
    change back afterwards, also if it fails. Checkpoints are unchanged.

    Forward hooks on a layer fire once. Hooks on modules inside it fire again during recomputation, as with
    ``torch.utils.checkpoint``: put hooks that count or collect on the layer itself.

    Args:
        layers: ``"auto"`` finds the repeated blocks: the classes named in ``_no_split_modules`` of a Hugging Face
            model, else the children of the outermost ``ModuleList``, ``ModuleDict`` or ``Sequential`` with two or more
            of one class, else the convolution-norm-activation stages of each ``Sequential``. Or class names
            (``"TransformerEncoderLayer"``), module names, globs over module names (``"net.blocks.*"``; ``*`` matches
            one level, ``**`` any number), or classes; one or a list. Of nested matches the outermost is taken.
        every_n_layers: Checkpoint the first chosen layer and every n-th after it: less recomputation, more memory.
        save: Results that a layer saves in addition to its inputs. ``"inputs"``: none. ``"matmuls"``: results of
            matrix products, convolutions and attention, so that only cheap operators are recomputed; ``"attention"``:
            results of attention; operator names in ``torch.ops`` (``["aten.mm", "aten.addmm.default"]``); or a
            :class:`~lightning_vram.techniques.activation_checkpointing.save_policy.SavePolicy`.
        segments: Split each ``nn.Sequential`` among ``layers`` into this many segments and checkpoint each;
            ``"sqrt"``: the square root of its length. With ``layers="auto"`` the outermost are split.
        skip_last: Do not checkpoint the last layer or segment. The backward would recompute it at once. It costs
            memory if a large loss head is alive at the same time.
        budget: Bytes for activations, such as ``"6GiB"``. The first step checkpoints all ``layers`` and is measured.
            Then the cheapest plan found within the budget, by layer and by operator, is applied and logged as a table.
            Excludes the arguments above except ``layers``. On a single process, a batch that is larger, in bytes or
            along a dimension, is checkpointed and planned again; with several ranks the plan is made once, for the
            first batch on the rank that needs most. Not for compiled layers.
        remedies: Means to meet a ``budget``. ``("recompute",)``: recomputation only. ``("recompute", "offload")``:
            tensors saved first in a forward are offloaded to the host, as much as PCIe bandwidth allows, and only the
            rest is recomputed. On a GPU that shares memory with the CPU it warns and only recomputes.
        offload_bytes: Most bytes to offload per forward, such as ``"4GiB"``. ``"auto"``: the time of the first step's
            forward times the measured copy bandwidth.
        determinism_check: ``"outputs"`` compares shapes in every call, and samples of the tensors that autograd saves
            in calls 1, 2, 4, 8, ... of a layer. ``"operators"`` compares every operator and names the one that
            differs: slow, for debugging. ``"none"`` compares nothing.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a value that is not allowed, or contradicts another.

    Attributes:
        layer_table: Saved bytes and recomputation per layer in the last plan of a ``budget``; empty without one.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import ActivationCheckpointing
        >>> trainer = pl.Trainer(callbacks=[ActivationCheckpointing(layers="net.blocks.*")], logger=False)
    """

    def __init__(  # noqa: PLR0913 - one callback for one technique
        self,
        layers: str | type[nn.Module] | Sequence[str | type[nn.Module]] = "auto",
        every_n_layers: int = 1,
        save: str | Sequence[str] | SavePolicy = "inputs",
        segments: int | Literal["sqrt"] | None = None,
        skip_last: bool = False,  # noqa: FBT001, FBT002
        budget: int | str | None = None,
        determinism_check: Literal["outputs", "operators", "none"] = "outputs",
        remedies: Sequence[Literal["recompute", "offload"]] = ("recompute",),
        offload_bytes: int | str = "auto",
    ) -> None:
        check_layers("ActivationCheckpointing(layers)", layers)
        check_positive_int("ActivationCheckpointing(every_n_layers)", every_n_layers)
        if segments not in (None, "sqrt"):
            check_number("ActivationCheckpointing(segments)", segments, int, "an int, 'sqrt' or None", at_least=2)
        check_bool("ActivationCheckpointing(skip_last)", skip_last)
        check_choice("ActivationCheckpointing(determinism_check)", determinism_check, ("outputs", "operators", "none"))
        self.layers = layers
        self.every_n_layers = every_n_layers
        self.save = save
        self.segments = segments
        self.skip_last = skip_last
        self.budget = budget
        self.determinism_check = determinism_check
        self._policy = parse_save(save, "ActivationCheckpointing(save)")
        self.remedies = remedies
        self.offload_bytes = offload_bytes
        self._budget_bytes = self._check_budget()
        self._offload_bytes = check_remedies(remedies, offload_bytes, budget)
        self._offload: BudgetOffload | None = None
        self._handle: CheckpointingHandle | None = None
        self._is_policy_unproven = False
        self._budgeted: BudgetedCheckpointing | None = None
        self._context: AroundStep | None = None
        self._batch: Any = None  # of the step that is about to be observed
        self._plan: CheckpointPlan | None = None  # made in the step, and not applied yet
        self._planned_sizes: list[int] = []  # the most of each of ``_sizes_of`` a batch that a plan was made for
        self.layer_table = ""

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if self._offload is not None:
            self._offload.offloading.keep_in_place(batch)  # it is alive anyway
        if self._budgeted is None or (self._planned_sizes and trainer.world_size > 1):
            return  # ranks must recompute the same layers: several keep the plan that they have made together
        pairs = zip_longest(_sizes_of(batch), self._planned_sizes, fillvalue=0)
        if not self._planned_sizes or any(size > planned for size, planned in pairs):
            self._batch = batch

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self._plan is not None and self._budgeted is not None:
            # Not before: an outer checkpoint of the user's recomputes the layers in the backward, as they were.
            self._budgeted.apply(self._plan.decisions)
            if self._offload is not None:
                self._offload.apply(self._plan)
            self._plan = None
        if self._is_policy_unproven and self._handle is not None:
            num_saved = self._handle.num_saved_results()
            self._is_policy_unproven = num_saved is None
            if num_saved == 0:
                rank_zero_warn(
                    f"ActivationCheckpointing(save={self.save!r}) saved nothing: no layer ran one of these operators. "
                    "On a CPU, attention with dropout runs as matrix products; compiled layers hide their operators."
                )

    def __getstate__(self) -> dict[str, object]:
        # A copy of the callback has not changed any module.
        run = ("_handle", "_budgeted", "_context", "_batch", "_plan", "_offload")
        return {**vars(self), **dict.fromkeys(run), "_planned_sizes": []}

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        if self._offload_bytes is None:
            return
        refuse_moved_parameters("ActivationCheckpointing(remedies)", trainer, "saved tensors are views of")
        if any(type(other).__name__ == "ActivationOffload" for other in trainer.callbacks):  # type: ignore[attr-defined]
            raise MisconfigurationException(
                "ActivationCheckpointing(remedies=('recompute', 'offload')) does not work with ActivationOffload. "
                "Remove one of them."
            )
        if self._offload_bytes == "auto" and trainer.strategy.root_device.type == "cpu":
            raise MisconfigurationException(
                "ActivationCheckpointing(remedies=('recompute', 'offload')) offloads to host memory, but the model "
                "is on the CPU: nothing is saved. Leave out 'offload', or set offload_bytes."
            )

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        pl_module = trainer.lightning_module
        try:
            self._handle = apply_activation_checkpointing(
                pl_module,
                layers=self.layers,
                every_n_layers=self.every_n_layers,
                segments=self.segments,
                skip_last=self.skip_last,
                save=self._policy,
                determinism_check=self.determinism_check,
            )
        except ValueError as error:
            raise MisconfigurationException(f"ActivationCheckpointing: {error}") from None
        self._is_policy_unproven = self._policy is not None
        if self._budget_bytes is None:
            rank_zero_info(f"ActivationCheckpointing {_describe(self._handle.selection)}")
            return
        in_compiled = modules_in_compiled(pl_module)
        compiled = [layer.name for layer in self._handle.selection.layers if layer.module in in_compiled]
        if compiled:
            raise MisconfigurationException(
                f"ActivationCheckpointing(budget={self.budget!r}) does not work with compiled layers "
                f"({show_names(compiled)}): the compiler chooses what to save. Leave out budget to recompute all of "
                "them, or do not compile them."
            )
        device, result = trainer.strategy.root_device, "ActivationCheckpointing only recomputes"
        if self._offload_bytes is not None and not offload_is_useless(device, result, "Leave out 'offload'."):
            self._offload = BudgetOffload(trainer, self._offload_bytes)
        self._budgeted = BudgetedCheckpointing(
            pl_module,
            self._handle,
            self._budget_bytes,
            self.determinism_check,
            MIN_OFFLOAD_BYTES if self._offload is not None else 0,
        )
        self._context = AroundStep(
            trainer.strategy, "training_step", Depth.OBSERVATION, lambda *_, **__: self._step(trainer)
        )

    @contextmanager
    def _step(self, trainer: pl.Trainer) -> Iterator[None]:
        batch, self._batch = self._batch, None
        if batch is None or self._budgeted is None:
            yield
            return
        with self._budgeted.observing(batch), self._offload.timed() if self._offload is not None else nullcontext():
            yield
        is_first = not self._planned_sizes
        offload_bytes = self._offload.bus_bytes(self._budgeted) if self._offload is not None else 0
        try:
            plan = share_largest(partial(self._budgeted.plan, offload_bytes))
        except ValueError as error:
            if is_first:
                raise MisconfigurationException(f"ActivationCheckpointing: {error}") from None
            rank_zero_warn(f"ActivationCheckpointing recomputes all layers from now on, for a larger batch: {error}")
            plan = CheckpointPlan({}, offloaded_bytes=offload_bytes)
        if plan is None:
            return  # no layer ran: the next step may show more
        self._plan, self.layer_table = plan, plan.table
        sizes = _sizes_of(batch)
        self._planned_sizes = [max(pair) for pair in zip_longest(sizes, self._planned_sizes, fillvalue=0)]
        title = f"ActivationCheckpointing(budget={self.budget!r}) planned"
        if is_first:
            rank_zero_info(f"{title}:\n{plan.table}")
        elif plan.decisions:
            what = f"a batch of {format_bytes(sizes[0])}: {format_bytes(plan.peak_bytes)} of activations"
            rank_zero_info(f"{title} again, for {what}, {plan.recompute_share:.0%} of the forward is recomputed.")

    @override
    def _undo(self) -> None:
        for undone in (self._context, self._handle, self._offload):
            if undone is not None:
                undone.remove()
        self._context = self._handle = self._budgeted = self._batch = self._plan = self._offload = None
        self._planned_sizes = []

    def _check_budget(self) -> int | None:
        if self.budget is None:
            return None
        budget_bytes = parse_limit(self.budget, "ActivationCheckpointing(budget)")
        defaults = {"every_n_layers": 1, "save": "inputs", "segments": None, "skip_last": False}
        values = {name: getattr(self, name) for name in defaults}
        given = [f"{name}={value!r}" for name, value in values.items() if value != defaults[name]]
        if given:
            raise ValueError(
                f"ActivationCheckpointing(budget={self.budget!r}) chooses what to recompute and excludes "
                f"{' and '.join(given)}. Remove one of them."
            )
        return budget_bytes


def _sizes_of(batch: object) -> list[int]:
    """Return the bytes of the tensors in a batch, and the largest size among them along each dimension."""
    tensors = [tensor.values() if tensor.layout is torch.jagged else tensor for tensor in iterate_tensors(batch)]
    sizes = zip_longest(*(tensor.shape for tensor in tensors), fillvalue=0)
    return [sum(tensor.nbytes for tensor in tensors), *map(max, sizes)]


def _describe(selection: LayerSelection) -> str:
    names = [layer.name for layer in selection.layers]
    shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
    text = f"recomputes {len(names)} layer{'s' if len(names) > 1 else ''} in backward: {shown}."
    if selection.nested:
        text += f" {len(selection.nested)} nested matches are skipped, such as {selection.nested[0]}."
    return text
