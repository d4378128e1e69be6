"""Errors of a command: one line with a hint for a mistake of the user, a traceback for a bug."""

import inspect
import os
import re
import traceback
from pathlib import Path
from pickle import UnpicklingError
from typing import NoReturn

import lightning
import lightning.pytorch as pl
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import override

from lightning_vram.commands import options
from lightning_vram.core.ranks import CheckpointError

_KEY = re.compile(r'Parser key "([^"]+)"|Problem with given class_path \'([^\']+)\'')
_TYPE = re.compile(r"(?:a )?<class '(?:\w+\.)*(\w+)'>")
# What jsonargparse writes around the reason: the alternatives of a type that did not fit either.
_NOISE = re.compile(
    r"(Does not validate against any of the Union subtypes|Subtypes:|Errors:|Given value type:|Not a valid subclass of|"
    r"Subclass types expect one of:|a class path \(str\)|a dict with(out)? |Expected a <class 'NoneType'>|"
    r"Expected a path but .* not accessible|in \"<unicode string>\"|Given value: (\[|Namespace|NestedArg))"
)
_MAX_VALUE = 80
_MAX_LINE = 1000
_REQUIRED = re.compile(r"the following arguments are required: (?:\w+\.)?(?P<name>\w+)$")
_UNKNOWN = re.compile(r"(?:unrecognized arguments: |Subcommand '\w+' does not accept option ')(?P<name>[^\s=']+)")


def condense_error(message: str) -> str:
    r"""Write where, what is wrong and the value, in one line.

    Example:
        >>> condense_error('Parser key "trainer.max_steps":\n  Expected a <class \'int\'>. Got value: abc')
        'trainer.max_steps: Expected int. Got value: abc'
    """
    lines = (line.strip().removeprefix("- ") for line in message.splitlines())
    text = "; ".join(dict.fromkeys(line for line in lines if line and not _NOISE.match(line)))
    # What follows the innermost value describes outer alternatives.
    text, _, rest = (text or " ".join(message.split())).partition("; Given value: ")
    value = rest.partition("; ")[0][:_MAX_VALUE]
    if value and value not in text:
        text = f"{text}, got {value}"
    text = _TYPE.sub(r"\1", _KEY.sub(r"\1\2", text.replace(":; ", ": ")))
    text = re.sub(r"(; [^;]*:)+$", "", text)  # alternatives of which nothing is left
    return text if len(text) <= _MAX_LINE else text[: _MAX_LINE - 3] + "..."


def explain(message: str) -> str:
    """Write what is wrong in one line, with what was probably meant."""
    line = condense_error(message)
    if line.startswith("Unexpected config:"):
        return "a --config file is empty, or no YAML mapping."
    if found := _REQUIRED.match(line):
        name = found["name"]
        return f"{name} is missing: name it with --{name}, or in a file with --config FILE."
    if found := _UNKNOWN.match(line):
        known = [*options.FIT_OPTIONS, "--ckpt_path", "--compare_with_baseline"]
        known += (f"--{one}" for command in (options.ESTIMATE, options.PLAN) for one in options.options_of(command))
        known += (f"--trainer.{one}" for one in inspect.signature(pl.Trainer).parameters)
        by_last = {_last_word(one): one for one in known}  # a common "--trainer." does not make names alike
        hint = options.did_you_mean(_last_word(found["name"]), by_last, by_last.__getitem__)
        return f"{line}.{hint if found['name'].startswith('-') else hint.replace('--', '')}" if hint else line
    return line


def _last_word(name: str) -> str:
    return name.rpartition(".")[2].removeprefix("--")


_CONFIGURATION = (MisconfigurationException, OmegaConfBaseException)
_OWN_KINDS = (CheckpointError, FileNotFoundError, IsADirectoryError, ModuleNotFoundError, ValueError, UnpicklingError)
_OWN, _LIGHTNING = (f"{Path(file).parent}{os.sep}" for file in (Path(__file__).parent, str(lightning.__file__)))
_ARGUMENTS = f"{_LIGHTNING}pytorch/trainer/connectors/"  # which check the arguments of a Trainer
WHERE = f" ({options.DEBUG_VARIABLE}=1 shows where)"


def is_complete_message(error: Exception) -> bool:
    """Whether this package or Lightning wrote the message for the user."""
    is_checked = _raised_in(error).startswith((_OWN, _ARGUMENTS))
    return isinstance(error, _CONFIGURATION) or (is_checked and isinstance(error, _OWN_KINDS))


def line_for(error: Exception, *, is_running: bool) -> str | None:
    """Return the line that is enough for a mistake of the user; ``None`` for a bug, whose traceback is needed.

    ``is_running``: the user's code ran, in which bugs may be.
    """
    is_complete, is_of_lightning = is_complete_message(error), _raised_in(error).startswith(_LIGHTNING)
    if is_running:
        is_mistake = isinstance(error, FileNotFoundError) and is_of_lightning  # a checkpoint that is missing
    else:
        is_mistake = isinstance(error, (*_OWN_KINDS, RecursionError, TypeError))
    if not (is_complete or is_mistake):
        return None
    if isinstance(error, RecursionError):
        return "the configuration is nested too deeply."
    if isinstance(error, UnicodeDecodeError):
        return "a file of the configuration is not text."
    line = explain(str(error)) + ("" if is_complete or is_of_lightning else WHERE)
    return re.sub(r"\b(?:estimate_memory|plan_memory)\((\w+)\)|\b(plot)\(path\)", r"--\1\2", line)


def _raised_in(error: Exception) -> str:
    stack = traceback.extract_tb(error.__traceback__)
    return stack[-1].filename if stack else ""


PARSER_MODE = "omegaconf+"


class CommandParser(LightningArgumentParser):
    """Reports what is wrong in one line."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error or options.is_debugging():
            super().error(message, ex)
        options.fail(explain(message))
