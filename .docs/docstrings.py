"""A griffe extension: Sphinx roles of docstrings become links to public names, or code."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|mod|exc|data|obj):`~?([\w.]+)`")


def as_markdown(text: str) -> str:
    """Return text with roles replaced."""
    return _ROLE.sub(_replace, text)


def _replace(match: re.Match[str]) -> str:
    path = match[1]
    package, _, name = path.rpartition(".")
    return f"[`{name}`][{path}]" if package == "lightning_vram" else f"`{path}`"


class Roles(griffe.Extension):
    """Replace roles in each docstring."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace them in that of one object."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


class MarkdownDocstrings(griffe.Extension):
    """Rewrites the docstring of each object of the package."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace the roles of one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
