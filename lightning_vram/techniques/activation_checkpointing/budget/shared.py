"""One checkpointing plan for all ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed

from lightning_vram.memory.units import format_bytes
from lightning_vram.techniques.activation_checkpointing.budget.apply import Decisions, decisions_of
from lightning_vram.techniques.activation_checkpointing.budget.plan import CheckpointPlan
from lightning_vram.techniques.activation_checkpointing.budget.table import format_table


@dataclass(frozen=True)
class SharedPlan:
    """The part of a plan that ranks exchange."""

    decisions: Decisions
    plain_peak_bytes: int  # what the rank would need without a plan
    table: str  # for the user
    summary: str
    offloaded_bytes: int = 0  # of a forward, to be away
    largest_bytes: int = 0  # the largest storage among them: that much more may travel, for what travels is not cut


def share_largest(make_plan: Callable[[], CheckpointPlan | None]) -> SharedPlan | None:
    """Make a plan on every rank, and return that of the rank which needs most; ``None`` if none could be made.

    A collective, where there are several ranks. Layers may communicate while they run (SyncBatchNorm, FSDP), so all
    ranks must recompute the same ones, and all of them must raise an error that one has.
    """
    found = _make(make_plan)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        everybodys: list[SharedPlan | str | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everybodys, found)
    else:
        everybodys = [found]
    errors = [plan for plan in everybodys if isinstance(plan, str)]
    if errors:
        raise ValueError(errors[0])
    plans = [plan for plan in everybodys if isinstance(plan, SharedPlan)]
    return max(plans, key=lambda plan: plan.plain_peak_bytes) if plans else None


def _make(make_plan: Callable[[], CheckpointPlan | None]) -> SharedPlan | str | None:
    try:
        plan = make_plan()
    except ValueError as error:
        return str(error)
    if plan is None:
        return None
    summary = (
        f"{format_bytes(plan.peak_bytes)} of activations, {plan.recompute_share:.0%} of the forward is recomputed."
    )
    return SharedPlan(
        decisions_of(plan),
        plan.plain_peak_bytes,
        format_table(plan),
        summary,
        plan.offloaded_bytes,
        plan.profile.largest_bytes,
    )
