"""Errors of one rank that all ranks raise, so that none waits for another that has given up."""

import pickle
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_vram.core.host.arena import OffloadError

Result = TypeVar("Result")
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (FileNotFoundError, IsADirectoryError, OffloadError, ValueError)
}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


def on_all_ranks(action: Callable[[], Result], what: str, group: dist.ProcessGroup | None = None) -> Result:
    """Run ``action`` on every rank, and raise the same error on all of them if it failed on any. A collective.

    The action may be a collective too if it fails on all ranks together. ``what`` is for the message: "The checkpoint
    x.ckpt could not be saved". Errors about an argument keep their class, others become a :class:`CheckpointError`.
    """
    failure: tuple[int, str, str] | None = None
    cause: BaseException | None = None
    try:
        result = action()
    except (Exception, CheckpointException) as error:
        failure, cause = _describe(error), error
    failures = [each for each in gather_objects(failure, group) if each is not None]
    if not failures:
        return result
    rank, kind, text = min(failures)
    if kind in _KINDS:
        raise _KINDS[kind](text) from cause
    if kind == "UnpicklingError":  # what weights_only=True does not read: the text says what to do
        raise pickle.UnpicklingError(f"{what}: {text}") from cause
    if kind == CheckpointError.__name__:  # whose text says all
        raise CheckpointError(f"{what}: {text}") from cause
    raise CheckpointError(f"{what}: {kind} on rank {rank}: {text}") from cause


def current_rank() -> int:
    """Return the rank of this process; 0 without ``torch.distributed``."""
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks(group: "dist.ProcessGroup | None" = None) -> int:
    """Return the number of processes, in a group or in all; 1 without ``torch.distributed``."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


def gather_objects(value: Result, group: "dist.ProcessGroup | None" = None) -> list[Result]:
    """Return the values of all ranks, in their order. A collective, unless there is one rank."""
    values = [value] * num_ranks(group)
    if len(values) > 1:
        dist.all_gather_object(values, value, group)
    return values


def _describe(error: BaseException) -> tuple[int, str, str]:
    rank = current_rank()
    if isinstance(error, CheckpointException):  # torch.distributed.checkpoint has collected those of all ranks
        rank, (error, _) = min(error.failures.items(), key=lambda item: item[0])
    # what weights_only=True does not read, by whatever class of ours
    kind = pickle.UnpicklingError if isinstance(error, pickle.UnpicklingError) else type(error)
    return rank, kind.__name__, str(error)
