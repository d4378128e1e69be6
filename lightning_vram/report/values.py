"""Estimates and plans as values that JSON holds: sizes in bytes, under names that stay."""

from dataclasses import asdict
from typing import Any

import yaml  # type: ignore[import-untyped]

from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.planner.plan import MemoryPlan, PlanError
from lightning_vram.report.plan.choices import choices

_OF_ESTIMATE = (
    *("fits", "needed_bytes", "context_bytes", "reserved_bytes", "allocated_bytes", "peak_bytes", "host_bytes"),
    *("world_size", "batch_size", "max_batch_size", "max_sequence_length"),
)


def estimate_values(estimate: MemoryEstimate) -> dict[str, Any]:
    """Return whether a run fits, its totals, and what uses memory at the peak."""
    return {
        "device": estimate.device.name,
        "memory_bytes": estimate.device.memory_bytes,
        **{name: getattr(estimate, name) for name in _OF_ESTIMATE},
        "peak_operator": estimate.peak_op,
        "by_category": {str(name): size for name, size in estimate.by_category.items()},
        "by_phase": {str(name): size for name, size in estimate.by_phase.items()},
        "by_module": dict(estimate.by_module),
        "notes": list(estimate.notes),
    }


def plan_values(plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan, its configuration, and the other choices of its table."""
    return {
        "fits": True,
        "is_needed": plan.is_needed,
        "device": plan.device.name,
        "budget_bytes": plan.budget_bytes,
        "needed_bytes": plan.peak_bytes,
        "host_bytes": plan.host_bytes,
        "step_time_ratio": plan.step_time_ratio,
        "config": yaml.safe_load(plan.to_yaml()),
        "choices": [asdict(choice) for choice in choices(plan)],
    }


def miss_values(error: PlanError) -> dict[str, Any]:
    """Return the minimum that was found, and the message with alternatives."""
    return {
        "fits": False,
        "minimum_bytes": error.minimum_bytes,
        "minimum": str(error.least.scheme),
        "message": str(error),
    }
