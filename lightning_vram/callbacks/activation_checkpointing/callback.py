"""Recompute layers in the backward instead of saving their activations.

A checkpointed layer saves its inputs only and runs its forward again in the backward: about a third more compute for a
small part of the activation memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_vram.argument_checks import check_bool, check_choice, check_number, check_positive_int
from lightning_vram.callbacks.activation_checkpointing.budget import (
    MIN_OFFLOAD_BYTES,
    BudgetOffload,
    CompiledLayersBudget,
    are_compiled,
    check_remedies,
)
from lightning_vram.callbacks.hook_points import AroundStep, Depth, FitTechnique
from lightning_vram.core.layers import LayerSelection, check_layers
from lightning_vram.memory.units import format_bytes, parse_limit
from lightning_vram.private_names.dispatcher import is_compiled
from lightning_vram.private_names.torch import tensors_in
from lightning_vram.techniques.activation_checkpointing import (
    BudgetedCheckpointing,
    CheckpointingHandle,
    CheckpointPlan,
    SavePolicy,
    apply_activation_checkpointing,
    parse_save,
    share_largest,
)


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
            Excludes the arguments above except ``layers``. On a single process, a batch with larger layer inputs is
            checkpointed and planned again; with several ranks the plan is made once, for the first batch on the rank
            that needs most. For compiled layers, the first steps try how much the compiler may save.
        remedies: Means to meet a ``budget``. ``("recompute",)``: recomputation only. ``("recompute", "offload")``:
            tensors saved first in a forward are offloaded to the host, as much as PCIe bandwidth allows, and only the
            rest is recomputed.
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
        if segments is not None and every_n_layers > 1:
            raise ValueError(
                "ActivationCheckpointing(segments) checkpoints whole bodies and excludes every_n_layers, "
                f"got segments={segments!r} and every_n_layers={every_n_layers}. Choose one."
            )
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
        self._compiled: CompiledLayersBudget | None = None
        self._context: AroundStep | None = None
        self._batch: Any = None  # of the step that is about to be observed
        self._plan: CheckpointPlan | None = None  # made in the step, and not applied yet
        self._planned_bytes = -1  # of the largest batch a plan was made for
        self.layer_table = ""

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if self._offload is not None:
            self._offload.keep_in_place(batch)
        if self._budgeted is None or (self._planned_bytes >= 0 and trainer.world_size > 1):
            return  # ranks must recompute the same layers: several keep the plan that they have made together
        if self._budgeted.is_outgrown or _count_bytes(batch) > self._planned_bytes:
            self._batch = batch

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if self._plan is not None and self._budgeted is not None:
            # Not before: an outer checkpoint of the user's recomputes the layers in the backward, as they were.
            self._budgeted.apply(self._plan.decisions, is_guarded=trainer.world_size == 1)
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
        run = ("_handle", "_budgeted", "_compiled", "_context", "_batch", "_plan", "_offload")
        return {**vars(self), **dict.fromkeys(run), "_planned_bytes": -1}

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        if self._offload_bytes is not None:
            BudgetOffload.check(trainer, self._offload_bytes)

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
        if is_compiled(pl_module):
            if are_compiled(pl_module, self._handle.selection.layers):
                self._handle.remove()  # the compiler recomputes
                if self._offload_bytes is not None:
                    raise MisconfigurationException(
                        "ActivationCheckpointing(remedies=('recompute', 'offload')) does not work with compiled "
                        "layers, where the compiler chooses what to save. Leave out 'offload' or torch.compile."
                    )
                self._compiled = CompiledLayersBudget(trainer, str(self.budget), self._budget_bytes)
                return
            self._handle.leave_to_compiler()  # what else is compiled
        if self._offload_bytes is not None:
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
        is_first = self._planned_bytes < 0
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
        self._planned_bytes = max(self._planned_bytes, _count_bytes(batch))
        title = f"ActivationCheckpointing(budget={self.budget!r}) planned"
        if is_first:
            rank_zero_info(f"{title}:\n{plan.table}")
        elif plan.decisions:
            sizes = f"a batch of {format_bytes(_count_bytes(batch))}: {format_bytes(plan.peak_bytes)} of activations"
            rank_zero_info(f"{title} again, for {sizes}, {plan.recompute_share:.0%} of the forward is recomputed.")

    @override
    def _undo(self) -> None:
        for undone in (self._context, self._compiled, self._handle, self._offload):
            if undone is not None:
                undone.remove()
        self._context = self._handle = self._budgeted = self._compiled = self._batch = self._plan = self._offload = None
        self._planned_bytes = -1

    def _check_budget(self) -> int | None:
        if self.budget is None:
            return None
        budget_bytes = parse_limit(self.budget, "ActivationCheckpointing(budget)")
        others = {
            "every_n_layers": (self.every_n_layers, 1),
            "save": (self.save, "inputs"),
            "segments": (self.segments, None),
            "skip_last": (self.skip_last, False),
        }
        given = [f"{name}={value!r}" for name, (value, default) in others.items() if value != default]
        if given:
            raise ValueError(
                f"ActivationCheckpointing(budget={self.budget!r}) chooses what to recompute and excludes "
                f"{' and '.join(given)}. Remove one of them."
            )
        return budget_bytes


def _count_bytes(batch: object) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(batch))


def _describe(selection: LayerSelection) -> str:
    names = [layer.name for layer in selection.layers]
    shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
    text = f"recomputes {len(names)} layer{'s' if len(names) > 1 else ''} in backward: {shown}."
    if selection.nested:
        text += f" {len(selection.nested)} nested matches are skipped, such as {selection.nested[0]}."
    return text
