"""Distinguish mistakes of the user, for which a line is enough, from bugs, whose traceback is wanted."""

import os
import re
import sysconfig
import traceback
from pathlib import Path
from pickle import UnpicklingError

import lightning
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException

from lightning_vram.commands.hints import explain
from lightning_vram.commands.program import DEBUG_VARIABLE
from lightning_vram.core.processes.rank_errors import CheckpointError

_CONFIGURATION = (MisconfigurationException, OmegaConfBaseException)
_OWN_KINDS = (CheckpointError, FileNotFoundError, IsADirectoryError, ModuleNotFoundError, ValueError, UnpicklingError)
_OWN, _LIGHTNING = (f"{Path(file).parent}{os.sep}" for file in (Path(__file__).parent, str(lightning.__file__)))
_ARGUMENTS = f"{_LIGHTNING}pytorch/trainer/connectors/"  # which check the arguments of a Trainer
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def says_all(error: Exception) -> bool:
    """Whether this package or Lightning wrote the message for the user."""
    if isinstance(error, _CONFIGURATION):
        return True
    place = _raised_in(error)
    return (place.startswith(_OWN) and isinstance(error, _OWN_KINDS)) or (
        place.startswith(_ARGUMENTS) and isinstance(error, ValueError)
    )


def is_mistake_of_user(error: Exception, *, is_running: bool) -> bool:
    """Whether one line is enough for an error; ``is_running``: the user's code ran, in which bugs may be."""
    if says_all(error):
        return True
    if is_running:  # a checkpoint that is missing
        return _raised_in(error).startswith(_LIGHTNING) and isinstance(error, FileNotFoundError)
    return isinstance(error, (*_OWN_KINDS, RecursionError, TypeError))


def one_line(error: Exception) -> str:
    """Return the line."""
    if isinstance(error, RecursionError):
        return "the configuration is nested too deeply."
    if isinstance(error, UnicodeDecodeError):
        return "a file of the configuration is not text."
    is_of_user = not (says_all(error) or _raised_in(error).startswith(_LIGHTNING))
    line = explain(str(error)) + (where(error) if is_of_user else "")
    return re.sub(r"\b(?:estimate_memory|plan_memory)\((\w+)\)|\b(plot)\(path\)", r"--\1\2", line)


def where(error: BaseException | None) -> str:
    """Return, for the end of a line, how to see where an error comes from, and the line of the user's code."""
    return f" ({' '.join(filter(None, (place_of(error), f'{DEBUG_VARIABLE}=1 shows where')))})"


def place_of(error: BaseException | None) -> str:
    """Return "file, line;" of the user's code where an error began; empty if it has not passed there."""
    place = ""
    while error is not None:
        for frame in traceback.extract_tb(error.__traceback__):
            if not frame.filename.startswith((*_LIBRARIES, _OWN, "<")):
                place = f"{Path(frame.filename).name}, line {frame.lineno};"
        error = error.__cause__ or error.__context__
    return place


def _raised_in(error: Exception) -> str:
    stack = traceback.extract_tb(error.__traceback__)
    return stack[-1].filename if stack else ""
