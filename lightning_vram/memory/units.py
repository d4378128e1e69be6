"""Byte units. Inside the package every size is an ``int`` number of bytes; it is text only at the edges."""

import re

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
TIB = 1024 * GIB

_NAMES = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_SUFFIXES = {
    "b": 1,
    # A bare letter means what it means to SLURM's --mem and to nvidia-smi: powers of 1024.
    **{suffix: unit for unit, name in _NAMES for suffix in (name[0].lower(), name.lower())},
    **{"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
}
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d*)?|\.\d+)\s*(?P<suffix>[a-zA-Z]*)\s*")


def format_bytes(num_bytes: int) -> str:
    """Write a size the way ``nvidia-smi`` and the PyTorch OOM message do, in powers of 1024.

    Example:
        >>> format_bytes(5 * GIB + 512 * MIB)
        '5.50 GiB'
        >>> format_bytes(-300)
        '-300 B'
    """
    for unit, name in _NAMES:
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes} B"


def format_argument(num_bytes: int, *, round_up: bool = False) -> str:
    """Write a size as an argument: read again, it is no more than ``num_bytes``, or no less with ``round_up``.

    Example:
        >>> format_argument(GIB - 1), format_argument(GIB + 1, round_up=True), format_argument(300)
        ('1023.99MiB', '1.01GiB', '300B')
    """
    for unit, name in _NAMES:
        if num_bytes >= unit:
            hundredths = (100 * num_bytes + (unit - 1 if round_up else 0)) // unit
            return f"{hundredths // 100}.{hundredths % 100:02}{name}"
    return f"{num_bytes}B"


def parse_bytes(size: int | str, name: str = "size") -> int:
    """Read a size as people and configuration files write it: an ``int`` of bytes, or a number with a unit in any case.

    Example:
        >>> parse_bytes("24GiB") == 24 * GIB
        True
        >>> parse_bytes("1.5 MB")
        1500000
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        kind = type(size).__name__
        raise TypeError(f"{name} must be bytes as an int or text such as '24GiB', got {size!r} of type {kind}.")
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"{name} must not be negative, got {size}.")
        return size
    match = _SIZE.fullmatch(size)
    if match is not None and not match["suffix"]:
        if float(match["number"]):
            raise _has_no_unit(name, size)
        return 0
    if match is None or match["suffix"].lower() not in _SUFFIXES:
        raise ValueError(f"{name} must be a number and one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB, got {size!r}.")
    whole, _, fraction = match["number"].partition(".")
    # In integers: a float would round sizes above 2**53 bytes, and 0.1 + 0.2 style digits below.
    scaled = int((whole or "0") + fraction) * _SUFFIXES[match["suffix"].lower()]
    return scaled // int(10 ** len(fraction))


def parse_limit(size: int | str, name: str) -> int:
    """Read a size that limits a whole run. An ``int`` below 1 MiB is refused: it was written without its unit."""
    num_bytes = parse_bytes(size, name)
    if num_bytes == 0:
        raise ValueError(f"{name} must be above 0, got {size!r}.")
    if isinstance(size, int) and size < MIB:
        raise _has_no_unit(name, size)
    return num_bytes


def _has_no_unit(name: str, size: int | str) -> ValueError:
    number = str(size).strip()
    unit = "GiB" if float(number) < KIB else "MiB" if float(number) < MIB else "B"
    return ValueError(f"{name} has no unit, got {size!r}: write '{number}{unit}'.")
