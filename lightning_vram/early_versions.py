"""Refuse versions of torch and Lightning that are too old, in one line, before some import fails in another way.

Imported before all that imports them, so standard library only. Newer versions than the tested ones are not refused.
"""

import re
from importlib.metadata import PackageNotFoundError, version

OLDEST = {"torch": (2, 11), "lightning": (2, 6, 4)}  # as in pyproject.toml


def refuse_old_versions() -> None:
    """Compare what is installed with :data:`OLDEST`."""
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
