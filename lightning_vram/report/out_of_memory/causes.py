"""Why there was not enough memory, by what is known; what that means, and what helps."""

from collections.abc import Callable
from dataclasses import dataclass

from lightning_vram.memory.device.allocator_settings import SETTING, VARIABLES
from lightning_vram.memory.device.out_of_memory import OutOfMemorySource
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.out_of_memory.facts import OutOfMemory, Work
from lightning_vram.report.out_of_memory.signs import grown_bytes_per_batch, is_in_loss, is_mostly_loss

TRAINING = "train"
_LARGE_SHARE = 0.1  # of a device: a desktop has less


@dataclass(frozen=True)
class Cause:
    """A cause of an out-of-memory error."""

    title: str
    holds: Callable[[OutOfMemory], bool]
    hints: tuple[str, ...]  # the best first
    meaning: Callable[[OutOfMemory], str] = lambda found: ""
    needs_leaner_step: bool = True  # a step that needs less cures it, not only delays it


def find_cause(found: OutOfMemory) -> Cause:
    """Return the first of the causes below that holds."""
    return next(cause for cause in CAUSES if cause.holds(found))


def _is_training(found: OutOfMemory) -> bool:
    return found.stage.startswith(TRAINING)


def _is_others_fault(found: OutOfMemory) -> bool:
    """Whether others have a large part, without which the request would have been granted."""
    request = found.request
    other_bytes = request.other_bytes
    if request.limit_bytes is not None and (request.asked_bytes or 0) <= (request.free_bytes or 0):
        return False  # enough was free: it was this process's own limit
    is_large = other_bytes > 0 and other_bytes >= _LARGE_SHARE * (request.total_bytes or 0)
    return is_large and (request.asked_bytes or 0) <= (request.free_bytes or 0) + other_bytes


def _is_fragmented(found: OutOfMemory) -> bool:
    asked_bytes = found.request.asked_bytes or 0
    return 0 < asked_bytes <= (found.request.cached_bytes or 0)


def _say_fragments(found: OutOfMemory) -> str:
    cached, asked = format_bytes(found.request.cached_bytes or 0), format_bytes(found.request.asked_bytes or 0)
    return f"{cached} were reserved but not allocated, in blocks that were each too small for {asked}."


def _say_others(found: OutOfMemory) -> str:
    others = format_bytes(found.request.other_bytes)
    return f"Other processes used {others} of the device. Without them the memory would have been enough."


def _say_growth(found: OutOfMemory) -> str:
    return f"Each of the last batches left {format_bytes(grown_bytes_per_batch(found) or 0)} more than the one before."


_SMALLER = (
    "the fastest configuration that fits: `callbacks=[AutoVRAM()]`",
    "a smaller batch, the same effective batch size: `callbacks=[AccumulationScheduler(target_batch_size=...)]`",
)
_STATES = (
    'weights and optimizer state on the host: `strategy="fsdp_offload"`',
    '16-bit weights and optimizer state: `plugins=[LeanMixedPrecision("bf16", parameters="bf16+kahan")]`',
)
_COLLECTED = (
    "metric lists on the CPU: `callbacks=[MetricOffload()]`",
    "outputs on the CPU: `self.outputs.append(output.detach().cpu())`",
    "predictions written batch by batch, by a `BasePredictionWriter`: `trainer.predict(..., return_predictions=False)`",
)
CAUSES = (
    Cause(
        "the host ran out of memory",
        lambda found: found.source is OutOfMemorySource.CPU and found.device != "cpu",
        (
            "fewer data loader workers, less prefetching: `num_workers`, `prefetch_factor`, `pin_memory`",
            "optimizer state on disk: `strategy=FSDPOffloadStrategy(nvme_path=...)`",
            "checkpoints without a second copy in host memory: `plugins=[StreamedCheckpointIO()]`",
            "more memory for the job: `#SBATCH --mem=...`",
        ),
        lambda found: "Not the device: the memory of the machine or of the job is used up.",
        needs_leaner_step=False,
    ),
    Cause(
        "a memory leak: memory grew with each batch",
        lambda found: _is_training(found) and grown_bytes_per_batch(found) is not None,
        (
            "find the attribute that holds it: `callbacks=[LeakDetector()]`",
            "store numbers, not tensors with their autograd graph: `self.losses.append(loss.detach())`, or "
            "`loss.item()`",
        ),
        _say_growth,
        needs_leaner_step=False,
    ),
    Cause(
        "outputs or metric lists, collected over the batches",
        lambda found: not _is_training(found) and grown_bytes_per_batch(found) is not None,
        _COLLECTED,
        _say_growth,
        needs_leaner_step=False,
    ),
    Cause(
        "another process is on the device",
        _is_others_fault,
        (
            "find the process, and end it if it is yours: `nvidia-smi`",
            "a configuration that fits the rest: `callbacks=[AutoVRAM()]`",
        ),
        _say_others,
        needs_leaner_step=False,
    ),
    Cause(
        "a checkpoint was a second copy of the model",
        lambda found: found.place.work in (Work.RESTORING, Work.SAVING),
        (
            "an empty cache before: `callbacks=[EmptyCache()]`",
            'sharded checkpoints: `strategy=FSDPOffloadStrategy(state_dict_type="sharded")`',
        ),
        lambda found: "Weights and optimizer state were on the device twice while it was read or written.",
    ),
    Cause(
        "fragmentation: enough memory was free, but not in one block",
        _is_fragmented,
        (
            f"expandable segments: `{VARIABLES[1]}={SETTING}` in the environment, or `configure_allocator()` "
            "first in the program",
            "an empty cache at each switch between training and validation: `callbacks=[EmptyCache()]`",
        ),
        _say_fragments,
        needs_leaner_step=False,
    ),
    Cause(
        "other tensors of this process are on the device",
        lambda found: found.foreign_bytes > 0,
        (
            "delete what earlier runs have left: `del model, trainer`, then `gc.collect()` and "
            "`torch.cuda.empty_cache()`; restart the kernel of a notebook",
            "a configuration that fits the rest: `callbacks=[AutoVRAM()]`",
        ),
        lambda found: f"{format_bytes(found.foreign_bytes)} are in tensors that do not belong to this run.",
        needs_leaner_step=False,
    ),
    Cause(
        "the weights alone do not fit",
        lambda found: found.place.work is Work.MOVING,
        _STATES,
        lambda found: "In training, gradients and optimizer state need memory in addition.",
    ),
    Cause(
        "the optimizer state does not fit",
        lambda found: found.place.work is Work.OPTIMIZER_STEP,
        _STATES,
        lambda found: "Adam allocates two moments per weight in its first step.",
    ),
    Cause(
        "the outputs of all batches, concatenated at the end of the epoch",
        lambda found: found.place.work is Work.EPOCH_END,
        _COLLECTED,
        lambda found: "Collected outputs are in memory twice while they are concatenated.",
        needs_leaner_step=False,
    ),
    Cause(
        "a validation, test or prediction batch is too large",
        lambda found: not _is_training(found),
        (
            'smaller batches: `callbacks=[MicroBatching(eval="auto")]`, or a smaller `batch_size` of that data loader',
            "an empty cache before it: `callbacks=[EmptyCache()]`",
            "metric lists on the CPU: `callbacks=[MetricOffload()]`",
        ),
    ),
    Cause(
        "the logits, and the loss over them",
        lambda found: is_in_loss(found) or is_mostly_loss(found.estimated),
        ("smaller micro-batches, and so smaller logits: `callbacks=[MicroBatching(...)]`", *_SMALLER),
        lambda found: "Tensors of samples x positions x classes, some in float32, are a large share of the step.",
    ),
    Cause(
        "the batch is too large: saved activations",
        lambda found: found.place.work in (Work.FORWARD, Work.BACKWARD),
        _SMALLER,
    ),
    Cause("the run needs more memory than available", lambda found: True, _SMALLER),
)
