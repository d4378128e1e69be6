"""Whether a library is there and can be used, found out by trying."""

import importlib
import re
import shlex
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib import metadata, util

import torch

MOST_CHARACTERS = 160
WhyNot = Callable[[torch.device], str | None]


def needs(module: str = "", pip: str = "", devices: Iterable[str] = ("cuda",), why: str = "needs a GPU") -> WhyNot:
    """Return what tells why a way cannot run: the device first, since nothing that is installed mends that.

    Args:
        module: Imported to see whether it can be; empty for what PyTorch and Lightning have themselves.
        pip: What installs it.
        devices: Types of those it runs on; empty for any.
        why: What is said of another device.
    """
    allowed = tuple(devices)

    def why_not(device: torch.device) -> str | None:
        if allowed and device.type not in allowed:
            return why
        return why_not_imported(module, pip) if module else None

    return why_not


def on_host_alone(why: str = "needs a device beside the host") -> WhyNot:
    """The same for what moves memory to the host: any device but the CPU."""
    return lambda device: why if device.type == "cpu" else None


@cache
def why_not_imported(module: str, pip: str) -> str | None:
    """Import a module for real; return in one line why that fails, or ``None``."""
    if util.find_spec(module.partition(".")[0]) is None:
        return f"not installed: pip install {pip}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(module)
    except Exception as error:  # whatever a library does when it is imported
        line = " ".join(str(error).split())
        text = f"does not import with torch {torch.__version__}: {type(error).__name__}: {line}"
        return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}..."
    return None


def read_versions(requirements: Iterable[str]) -> dict[str, str]:
    """Return the installed versions of what ``pip install`` is given, by name."""
    names = {re.split(r"[<>=!\[]", word)[0] for text in requirements for word in shlex.split(text)}
    found = {}
    for name in sorted(name for name in names if name and not name.startswith("-")):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
