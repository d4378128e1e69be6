"""Messages of ``MemoryBudget``."""

from collections.abc import Mapping

from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.memory.units import format_bytes

_NAME = "MemoryBudget"
_PER_SAMPLE = (
    "a smaller batch with accumulate_grad_batches, MicroBatching('auto'), ActivationCheckpointing() or "
    "ActivationOffload()"
)
_PER_PARAMETER = "strategy='fsdp_offload' or LeanMixedPrecision('bf16', parameters='bf16+split')"
_WAYS_OUT: Mapping[Category, str] = {
    Category.PARAMETERS: _PER_PARAMETER,
    Category.BUFFERS: _PER_PARAMETER,
    Category.GRADIENTS: _PER_PARAMETER,
    Category.OPTIMIZER_STATE: _PER_PARAMETER,
    Category.INPUTS: _PER_SAMPLE,
    Category.ACTIVATIONS: _PER_SAMPLE,
    Category.TEMPORARIES: _PER_SAMPLE,
}
_NAMES = {Category.OPTIMIZER_STATE: "optimizer state"}


def fit_line(estimate: MemoryEstimate) -> str:
    """Report that a run fits."""
    needed, room = format_bytes(estimate.needed_bytes), format_bytes(estimate.device.memory_bytes)
    return f"{_NAME}: a step needs {needed} of the {room} available on {estimate.device.name}."


def excess_message(estimate: MemoryEstimate) -> str:
    """Report that a run does not fit, the largest category, and what to do."""
    needed, room = estimate.needed_bytes, estimate.device.memory_bytes
    largest = max(estimate.by_category, key=lambda category: estimate.by_category[category])
    sentences = [
        f"{_NAME}: the run does not fit. A step needs {format_bytes(needed)}, but only {format_bytes(room)} are "
        f"available on {estimate.device.name}: {format_bytes(needed - room)} too few.",
        f"Largest category: {_NAMES.get(largest, largest)}, "
        f"{format_bytes(estimate.by_category[largest])}{_place(estimate)}.",
    ]
    if estimate.max_batch_size is not None and estimate.batch_size:
        sentences.append(_batch_sentence(estimate.max_batch_size, estimate.batch_size))
    return " ".join([*sentences, f"What helps: {_WAYS_OUT[largest]}."])


def first_step_line(measured_bytes: int, expected_bytes: int, device: str) -> str:
    """Compare the measured peak of the first step with the predicted one."""
    share = (expected_bytes - measured_bytes) / max(1, measured_bytes)
    return (
        f"{_NAME}: up to the first optimizer step, peak memory on {device} was {format_bytes(measured_bytes)}; "
        f"predicted: {format_bytes(expected_bytes)} ({share:+.1%})."
    )


def unknown_line(error: str) -> str:
    """Report that no estimate was possible."""
    reason = error.partition("\n")[0].rstrip(".")
    return f"{_NAME} cannot estimate whether the run fits: {reason}. Training continues."


def _place(estimate: MemoryEstimate) -> str:
    module, size = next(iter(estimate.by_module.items()), ("", 0))
    return f"; the largest module is {module} with {format_bytes(size)}" if module else ""


def _batch_sentence(largest: int, size: int) -> str:
    if largest == 0:
        return f"The batch has {size} samples, and not even one fits."
    return f"The batch has {size} samples, {largest} would fit."
