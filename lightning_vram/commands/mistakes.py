"""Tell mistakes of the user, for which a line is enough, from bugs, whose traceback is wanted."""

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
_OWN_KINDS = (CheckpointError, FileNotFoundError, ModuleNotFoundError, ValueError, UnpicklingError)
_OWN, _LIGHTNING = (str(Path(folder).parent) for folder in (Path(__file__).parent, str(lightning.__file__)))


def says_all(error: Exception) -> bool:
    """Whether this package or Lightning wrote the message for the user."""
    return isinstance(error, _CONFIGURATION) or (_is_raised_in(error, _OWN) and isinstance(error, _OWN_KINDS))


def is_mistake_of_user(error: Exception, *, is_running: bool) -> bool:
    """Whether a line is enough.

    Args:
        error: That ended the command.
        is_running: Whether it came from the run, in which the user's code may fail, and not from its configuration.
    """
    if says_all(error):
        return True
    if is_running:
        return _is_raised_in(error, _LIGHTNING) and isinstance(error, FileNotFoundError)  # a checkpoint that is missing
    return isinstance(error, (*_OWN_KINDS, RecursionError, TypeError))


def one_line(error: Exception) -> str:
    """Return the line."""
    if isinstance(error, RecursionError):
        return "the configuration is nested too deeply."
    is_of_user = not (says_all(error) or _is_raised_in(error, _LIGHTNING))
    return explain(str(error)) + (f" ({DEBUG_VARIABLE}=1 shows where)" if is_of_user else "")


def _is_raised_in(error: Exception, folder: str) -> bool:
    stack = traceback.extract_tb(error.__traceback__)
    return bool(stack) and stack[-1].filename.startswith(folder)
