"""Subcommands and their own options, as data: help needs neither PyTorch nor Lightning."""

import difflib
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NoReturn

from lightning_vram.memory.estimate.device_spec import known_devices
from lightning_vram.memory.units import format_bytes

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


ESTIMATE, PLAN = "estimate", "plan"
COMMANDS = {
    "fit": "train with any LightningModule; takes the files and arguments of LightningCLI",
    "validate": "run the validation loop",
    "test": "run the test loop",
    "predict": "run the prediction loop",
    ESTIMATE: "estimate whether a run fits a GPU you do not have, and what uses its memory",
    PLAN: "find the features that make a run fit a memory budget, with the least overhead",
    "calibrate": "measure this machine's GPU for estimates",
    "report": "print a recording of VRAMMonitor",
    "consolidate": "convert a sharded checkpoint to one file",
    "presets": "list configuration files that come with the package, or copy them",
}
FIT_OPTIONS = ("--config", "--model", "--data", "--trainer", "--optimizer", "--lr_scheduler", "--seed_everything")


@dataclass(frozen=True)
class Option:
    """An option of ``estimate`` or ``plan``."""

    kind: Any
    default: Any
    help: str
    short: str = ""

    def names(self, name: str) -> list[str]:
        """Return what is typed for it."""
        return [*filter(None, [self.short]), f"--{name}"]


_OF_BOTH = {
    "device": Option(
        str, None, "GPU to compute for, such as rtx4090 or h100, or a file of `calibrate`. `list` lists all."
    ),
    "device_memory": Option(str | int | None, None, "Memory of a GPU that is not in the list, such as 24GiB."),
    "devices": Option(int | None, None, "GPUs per node. Default: trainer.devices if it is a number."),
    "num_nodes": Option(int | None, None, "Number of nodes. Default: trainer.num_nodes."),
    "run_callbacks": Option(
        list[str], [], "Names of your own callbacks that change the module or the step: '[FreezeEncoder]'."
    ),
    "batch.shape": Option(
        Any,
        None,
        "Instead of data: the shape of a tensor, '[8, 3, 224, 224]', or of several: '[[8, 3, 224, 224], [8]]', "
        "'{tokens: [8, 1024]}'.",
    ),
    "batch.dtype": Option(Any, "float32", "Dtype of all tensors of batch.shape, or of each: '[float32, int64]'."),
    "batch.high": Option(
        Any, 2, "Upper limit of integers, such as a vocabulary size: for all tensors of batch.shape, or for each."
    ),
    "json": Option(bool, None, "Print JSON, for scripts."),
}
_OWN = {
    ESTIMATE: {"plot": Option(str | None, None, "File for a picture of the step: .png, .svg, .pdf or .html.")},
    PLAN: {
        "budget": Option(
            str | int | float | None,
            None,
            "GPU memory the run may use, such as 24GiB, or a share of it, such as 0.5. Default: all of it.",
        ),
        "host_memory": Option(
            str | int | None, None, "Host memory of each node, such as 128GiB. Strategies that need more are not used."
        ),
        "allow": Option(
            str, "exact", "Trained weights: exact (bitwise identical), lossless (up to rounding) or any (approximate)."
        ),
        "output": Option(str | None, None, "YAML file for the plan, such as plan.yaml.", short="-o"),
        "plot": Option(str | None, None, "File for a picture of memory against step time: .png, .svg, .pdf or .html."),
    },
}
_EXIT_CODES = {
    ESTIMATE: "exit status: 0 if the run fits, 3 if it does not, 2 if something is wrong",
    PLAN: "exit status: 0 if there is a plan, 3 if nothing fits, 2 if something is wrong",
}


def options_of(command: str) -> dict[str, Option]:
    """Return the options of ``estimate`` or ``plan`` in addition to those of ``fit``, by their names."""
    return {"device": _OF_BOTH["device"], **_OWN[command], **_OF_BOTH}


def main_parser() -> ArgumentParser:
    """Return the parser whose help lists the subcommands."""
    width = max(map(len, COMMANDS)) + 2
    listed = "\n".join(f"  {name:{width}}{text}" for name, text in COMMANDS.items())
    parser = ArgumentParser(
        prog=PROGRAM,
        usage=f"{PROGRAM} COMMAND ...",
        description=f"Train in a fraction of the GPU memory.\n\ncommands:\n{listed}",
        epilog=f"`{PROGRAM} COMMAND --help` shows the options of a command.",
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    return parser


def dry_run_parser(command: str) -> ArgumentParser:
    """Return a parser whose help shows the options of ``estimate`` or ``plan``, and where those of ``fit`` are."""
    parser = ArgumentParser(
        prog=f"{PROGRAM} {command}",
        usage=f"{PROGRAM} {command} --config FILE --device GPU [options]",
        description=f"{COMMANDS[command][0].upper()}{COMMANDS[command][1:]}.",
        epilog=f"options of `fit`, which name the run:\n  {', '.join(FIT_OPTIONS)}, ...\n"
        f"  `{PROGRAM} fit --help` lists them all.\n\n{_EXIT_CODES[command]}",
        formatter_class=RawDescriptionHelpFormatter,
    )
    for name, option in options_of(command).items():
        if option.kind is bool:
            parser.add_argument(*option.names(name), action="store_true", help=option.help)
        else:
            parser.add_argument(*option.names(name), metavar=name.rpartition(".")[2].upper(), help=option.help)
    return parser


def device_list() -> str:
    """Return the names that ``--device`` takes, with the memory of each GPU."""
    devices = known_devices()
    width = max(len(device.name) for device in devices) + 2
    listed = "\n".join(f"{device.name:{width}}{format_bytes(device.memory_bytes):>11}" for device in devices)
    return f"{listed}\n\nCase and spaces do not matter: --device rtx4090. `cpu` is this host."


def preset_names() -> list[str]:
    """Return the names of the configuration files that come with the package."""
    names = (file.name for file in (files("lightning_vram") / "presets").iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))
