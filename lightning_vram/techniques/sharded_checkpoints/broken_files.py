"""What is wrong with a file that could not be read, in one line."""

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException

from lightning_vram.core.processes.rank_errors import CheckpointError
from lightning_vram.techniques.sharded_checkpoints.checksums import is_archive

Result = TypeVar("Result")
_CLASS = re.compile(r"GLOBAL ([\w.]+)")  # in the message of torch.load(weights_only=True)
_REASON = re.compile(r"WeightsUnpickler error:\s*(.*)")
_MAX_REASON = 200


class ForbiddenClassError(pickle.UnpicklingError):
    """A file holds more than ``weights_only=True`` reads."""


# a class that is not there, and the disk, say it themselves; Ctrl-C is no damage
_CLEAR = (AttributeError, CheckpointError, ForbiddenClassError, ImportError, KeyboardInterrupt, MemoryError, OSError)


def read_values(path: Path, *, weights_only: bool | None) -> Any:
    """Read a file of ``torch.save`` on the host, mapped into memory where it can be.

    Args:
        path: The file.
        weights_only: See ``torch.load``.

    Returns:
        What is in it.

    Raises:
        ForbiddenClassError: If it holds what ``weights_only`` does not allow.
        CheckpointError: If it is damaged, or something else.
        OSError: If it cannot be read.
    """
    return explained(
        lambda: torch.load(path, map_location="cpu", mmap=is_archive(path), weights_only=weights_only), path.name
    )


def explained(read: Callable[[], Result], name: str) -> Result:
    """Read something; say what is wrong with ``name`` if that fails, as :func:`read_values` does."""
    try:
        return read()
    except (Exception, CheckpointException) as error:
        # torch.distributed.checkpoint has collected those of all ranks
        first = error.failures[min(error.failures)][0] if isinstance(error, CheckpointException) else error
        if isinstance(first, _CLEAR):
            raise first from error
        raise _describe(first, name) from error


def _describe(error: BaseException, name: str) -> Exception:
    text = str(error)
    found = _CLASS.search(text)
    if isinstance(error, pickle.UnpicklingError) and found:
        return ForbiddenClassError(
            f"{name} contains {found[1]}, and weights_only=True, the default, loads only tensors and basic types. "
            "If you trust its source: trainer.fit(..., weights_only=False), or allow the class with "
            "torch.serialization.add_safe_globals."
        )
    reason = (_REASON.search(text) or re.match(r"(.*)", text))[1].strip()[:_MAX_REASON]  # type: ignore[index]
    return CheckpointError(f"{name} is damaged or not a checkpoint ({type(error).__name__}: {reason})")
