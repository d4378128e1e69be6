"""What happens before PyTorch and Lightning are imported: block SLURM's signals, refuse old versions.

The ``lightning-vram`` command blocks the signals by which SLURM ends a job until a run can save a checkpoint.
Between the start of Python and the moment at which a run can save a checkpoint lie the imports of PyTorch and
Lightning: seconds in which SIGUSR1 would kill the task, and SLURM would take the job for failed. The kernel keeps
signals that are blocked; ``SlurmRequeue`` takes them in when it is set up. Imported first of all, so standard library
only. A script of your own does the same with one line before its imports::

    import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
"""

import os
import re
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

COMMAND = "lightning-vram"
PACKAGE = "lightning_vram"


def hold_back() -> None:
    """Block them in this thread, and so in all that it starts."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _signals())


def let_through() -> None:
    """Unblock them: one that came meanwhile does now what it does."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _signals())


def is_command(arguments: list[str]) -> bool:
    """Whether Python was started as the command, or as ``python -m lightning_vram``: by ``sys.orig_argv``."""
    words = iter(arguments[1:])
    for word in words:
        if word in ("-X", "-W"):
            next(words, None)
        elif word == "-m":
            return next(words, "").partition(".")[0] == PACKAGE
        elif not word.startswith("-"):
            return Path(word).name == COMMAND
    return False


def _signals() -> set[signal.Signals]:
    return {signal.SIGUSR1, signal.SIGTERM}


if "SLURM_PROCID" in os.environ and hasattr(signal, "pthread_sigmask") and is_command(sys.orig_argv):
    hold_back()


OLDEST = {"torch": (2, 11), "lightning": (2, 6, 4)}  # as in pyproject.toml


def refuse_old_versions() -> None:
    """Refuse versions older than :data:`OLDEST` in one line, before an import fails in another way."""
    for name, oldest in OLDEST.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if tuple(map(int, re.findall(r"\d+", installed)[: len(oldest)])) < oldest:
            wanted = ".".join(map(str, oldest))
            raise ImportError(
                f"lightning_vram needs {name} {wanted} or newer, found {installed}: pip install '{name}>={wanted}'"
            )


refuse_old_versions()
