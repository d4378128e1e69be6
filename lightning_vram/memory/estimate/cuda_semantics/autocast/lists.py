"""Which operators CUDA's autocast casts, and how: read from the header that each wheel of torch brings along."""

import re
from enum import StrEnum
from functools import cache
from pathlib import Path

import torch


class Cast(StrEnum):
    """What autocast does to the arguments of an operator. The values are names of lists in the header."""

    LOWER = "LOWER_PRECISION_FP"
    FLOAT32 = "FP32"
    FLOAT32_RESULT = "FP32_SET_OPT_DTYPE"  # unless a dtype is asked for
    FLOAT32_NORM = "DIFFERENT_REDISPATCH_SIGNATURE"
    WIDEST = "PROMOTE"
    REFUSED = "refused"


# What autocast_mode.cpp, which no wheel has, adds to the lists.
_BESIDE_THE_LISTS = {"aten::binary_cross_entropy": Cast.REFUSED}
_HEADER = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"


@cache
def autocast_lists(header: Path = _HEADER) -> dict[str, Cast]:
    """Read how CUDA's autocast casts each operator.

    Returns:
        The way of casting, by the full name of the operator.

    Raises:
        RuntimeError: If the file is not there or is not as it was.
    """
    try:
        lists = {cast: _names(header.read_text(), cast) for cast in Cast if cast is not Cast.REFUSED}
    except OSError:
        lists = {}
    if not lists or not all(lists.values()):
        raise RuntimeError(
            f"what autocast does on CUDA cannot be read from {header.name} of torch {torch.__version__}; "
            "install torch with its headers, or estimate without autocast."
        )
    return {name: cast for cast, names in lists.items() for name in names} | _BESIDE_THE_LISTS


def _names(text: str, cast: Cast) -> list[str]:
    """Names in ``#define AT_FORALL_CAST(_) _(name) _(name, overload) _(..., "name.overload", ...)``."""
    match = re.search(rf"#define AT_FORALL_{cast}\(_\)((?:.*\\\n)*.*)", text)
    if match is None:
        return []
    if cast is Cast.FLOAT32_NORM:
        return [f"aten::{name}" for name in re.findall(r'"([\w.]+)"', match[1])]
    entries = re.findall(r"\b_\((\w+)(?:,\s*(\w+))?\)", match[1])
    return [f"aten::{name}.{overload}" if overload else f"aten::{name}" for name, overload in entries]
