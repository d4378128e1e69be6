"""Names, exit codes and errors of the command; its options as data, for help and completion without PyTorch."""

import difflib
import os
import sys
from collections.abc import Callable, Iterable
from typing import NoReturn

PROGRAM = "lightning-vram"
DEBUG_VARIABLE = "LIGHTNING_VRAM_DEBUG"
WRONG_USAGE, DOES_NOT_FIT = 2, 3  # exit codes; 1 is that of a Python program that raises
INTERRUPTED, BROKEN_PIPE = 130, 141  # what shells use
_SIMILARITY = 0.7


def fail(message: str, exit_code: int = WRONG_USAGE) -> NoReturn:
    """Write one line to stderr, and exit."""
    sys.stderr.write(f"{PROGRAM}: error: {message}\n")
    sys.exit(exit_code)


def is_debugging() -> bool:
    """Whether the user wants tracebacks."""
    return bool(os.environ.get(DEBUG_VARIABLE))


def describe(error: Exception) -> str:
    """Write the message of an error in one line, without the number that the system has for it."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


def did_you_mean(word: str, known: Iterable[str], write: Callable[[str], str] = str) -> str:
    """Return " Did you mean ...?" with the name that ``word`` is closest to; empty if none is close.

    Example:
        >>> did_you_mean("estimte", ["estimate", "fit"])
        ' Did you mean estimate?'
    """
    names = {name.lower(): name for name in known}
    close = difflib.get_close_matches(word.lower(), names, n=1, cutoff=_SIMILARITY)
    close = close or [name for name in names if word and name.startswith(word.lower())]
    return f" Did you mean {write(names[close[0]])}?" if close else ""
