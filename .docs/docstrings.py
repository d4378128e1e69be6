"""A griffe extension: docstrings as Markdown, with Sphinx roles as links to public names or as code."""

import re
from typing import Any

import griffe

_PACKAGE = "lightning_vram"
_ROLE = re.compile(r":(?:class|func|meth|attr|mod|exc|data|obj):`~?([\w.]+)`")
_EXAMPLE = re.compile(r"^( *)Example:$", re.MULTILINE)


def as_markdown(text: str) -> str:
    """Return text with roles replaced, and its example under the heading that griffe knows."""
    return _EXAMPLE.sub(r"\1Examples:", _ROLE.sub(_replace, text))


def _replace(match: re.Match[str]) -> str:
    path = match[1]
    package, _, name = path.rpartition(".")
    if package == _PACKAGE:
        return f"[`{name}`][{path}]"
    return f"`{name}`" if path.startswith(_PACKAGE) else f"`{path}`"


class MarkdownDocstrings(griffe.Extension):
    """Rewrites the docstring of each object of the package."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Replace the roles of one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
