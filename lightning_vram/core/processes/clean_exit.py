"""Destroy the process group before Python ends."""

import atexit
import time

import torch.distributed as dist

# Destroying a group does not join gloo's threads while anybody (a wrapper, a mesh) still refers to it. One that drops
# a tensor and asks for the interpreter's lock when Python is already ending would abort the process; torch has no call
# that waits for them, and a barrier at exit would wait for peers that are gone.
_SETTLE_SECONDS = 0.1


def leave_group_at_exit() -> None:
    """Destroy the process group when Python ends, if there is one then. Calling it again does nothing.

    Otherwise a process that has finished its work may abort ("terminate called without an active exception"), and
    ``torchrun`` or SLURM takes the job for failed. Lightning destroys groups of the backend ``"nccl"`` only, by that
    name.
    """
    atexit.unregister(_leave)
    atexit.register(_leave)


def leave_group() -> None:
    """Destroy the process group and all groups made from it. Does nothing if there is none; no collective."""
    atexit.unregister(_leave)
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _leave() -> None:
    if dist.is_available() and dist.is_initialized():
        leave_group()
        time.sleep(_SETTLE_SECONDS)
