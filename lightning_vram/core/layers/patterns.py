"""Patterns by which users choose layers."""

import difflib
import re
from collections.abc import Sequence

from torch import nn

from lightning_vram.private_names.torch.modules import own_children

LayerPattern = str | type[nn.Module]
_SHOWN_NAMES = 5


def check_layers(name: str, layers: object) -> None:
    """Refuse values that :func:`select_layers` does not take; ``name`` is the argument as typed, with its class."""
    patterns = layers if isinstance(layers, Sequence) and not isinstance(layers, str) else [layers]
    for pattern in patterns:
        if not (isinstance(pattern, str) or (isinstance(pattern, type) and issubclass(pattern, nn.Module))):
            raise TypeError(
                f"{name} must be 'auto', class names, module names, globs or nn.Module classes, "
                f"got {pattern!r} of type {type(pattern).__name__}."
            )
    if not patterns or "" in patterns:
        raise ValueError(f"{name} must name at least one layer, got {layers!r}. 'auto' finds them.")


def match_layers(pattern: LayerPattern, names: dict[str, nn.Module], model: str) -> list[str]:
    """Return the names of the modules that ``pattern`` matches. Raises ``ValueError`` if there are none."""
    if isinstance(pattern, type):
        found = [name for name, module in names.items() if isinstance(module, pattern)]
        kind = f"{pattern.__module__}.{pattern.__qualname__}"
        if not found:
            raise ValueError(f"layers={kind} matches no module of {model}. {_suggest(pattern.__name__, names)}")
        return found
    try:
        glob = re.compile(_translate(pattern))
    except re.error as error:
        raise ValueError(
            f"layers={pattern!r} is not a valid pattern: {error}. Globs support *, **, ? and [abc]."
        ) from None
    found = [n for n, module in names.items() if glob.fullmatch(n) or pattern in _class_names(type(module))]
    if not found:
        raise ValueError(f"layers={pattern!r} matches no module or class of {model}. {_suggest(pattern, names)}")
    return [leaf for name in found for leaf in _expand(name, names)]


def _translate(pattern: str) -> str:
    parts = re.split(r"(\*\*|\*|\?|\[[^\]]*\])", pattern)
    wild = {"**": ".*", "*": r"[^.]*", "?": r"[^.]"}
    return "".join(wild.get(part) or (_translate_set(part) if part[:1] == "[" else re.escape(part)) for part in parts)


def _translate_set(part: str) -> str:
    inner = part[1:-1].replace("\\", r"\\").replace("^", r"\^")
    return f"[^{inner[1:]}]" if inner[:1] == "!" else f"[{inner}]"


def _class_names(kind: type) -> set[str]:
    """Names that match a class: its own and those of its bases below ``nn.Module``, short and qualified."""
    kinds = [base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    return {name for base in kinds for name in (base.__name__, f"{base.__module__}.{base.__qualname__}")}


def _expand(name: str, names: dict[str, nn.Module]) -> list[str]:
    if not has_no_forward(names[name]):
        return [name]
    return [leaf for child in own_children(names[name]) for leaf in _expand(f"{name}.{child}", names)]


def _suggest(pattern: str, names: dict[str, nn.Module]) -> str:
    classes = {type(module).__name__ for module in names.values()}
    globs = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names}
    close = difflib.get_close_matches(pattern, sorted({*globs, *names, *classes}), n=_SHOWN_NAMES, cutoff=0.5)
    if close:
        return f"Close names: {show_names(close)}."
    nearest = show_names(sorted(globs, key=lambda name: name.count(".")))
    return f"It has {nearest} and the classes {show_names(sorted(classes))}."


def show_names(names: Sequence[str]) -> str:
    """List the first names, for messages."""
    shown = ", ".join(repr(name) for name in names[:_SHOWN_NAMES])
    return f"{shown} and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else shown


def has_no_forward(module: nn.Module) -> bool:
    """Whether ``module`` only holds others."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward
