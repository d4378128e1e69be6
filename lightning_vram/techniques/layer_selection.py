"""Choose layers of a model: by class, by name or glob, or by finding the blocks it repeats."""

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn

from lightning_vram.techniques.conv_stages import find_conv_stages

LayerPattern = str | type[nn.Module]
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_COMPILED = "_orig_mod"  # what torch.compile(module) puts between a module and its name
_SHOWN_NAMES = 5


@dataclass(frozen=True)
class Layer:
    """One chosen layer.

    Args:
        name: Path in the model, as in ``named_modules()``; a run of children is written ``"net[0:3]"``.
        module: The module, or the ``nn.Sequential`` that holds the run.
        span: First child and the one after the last, if the layer is a run of children; else ``None``.
    """

    name: str
    module: nn.Module = field(repr=False)
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class LayerSelection:
    """What was chosen, and what was matched but left out since it lies inside a chosen layer."""

    layers: tuple[Layer, ...]
    nested: tuple[str, ...] = ()


def select_layers(
    model: nn.Module, layers: LayerPattern | Sequence[LayerPattern] = "auto", every_n_layers: int = 1
) -> LayerSelection:
    """Choose layers of ``model``.

    Args:
        model: The whole model. It is never chosen itself: nothing guarantees that its ``forward`` is called.
        layers: ``"auto"``: the classes a model names in ``_no_split_modules`` (transformers does); else the children
            of the outermost ``ModuleList``, ``ModuleDict`` or ``Sequential`` that holds two or more of one class; else
            the convolution-norm-activation stages of its ``Sequential``s. Otherwise class names, module names, globs
            over module names (``*`` stays within one part of a name, ``**`` crosses dots) or classes, one or several.
            A container without a forward stands for its children.
        every_n_layers: Keep the first and every n-th after it.

    Returns:
        The layers in the model's order. Where matches are nested, the outermost is chosen.

    Raises:
        ValueError: If a pattern matches nothing, or ``"auto"`` finds no candidate.
    """
    names = _named_layers(model)
    if isinstance(layers, str) and layers == "auto":
        found = _find_repeated_layers(model, names)
        nested: list[str] = []
    else:
        patterns = [layers] if isinstance(layers, str | type) else layers
        matched: set[str] = set()
        for pattern in patterns:
            matched.update(_match(pattern, names, type(model).__name__))
        outermost = [name for name in names if name in matched and not _has_ancestor(name, matched)]
        found = [Layer(name, names[name]) for name in outermost]
        nested = [name for name in names if name in matched and name not in set(outermost)]
    return LayerSelection(tuple(found[::every_n_layers]), tuple(nested))


def _named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """All modules but the root by the name a user knows, compiled ones replaced by what they compile, each once."""
    first_names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        first_names.setdefault(_uncompiled(module), ".".join(part for part in name.split(".") if part != _COMPILED))
    return {name: module for module, name in first_names.items() if name}


def _find_repeated_layers(model: nn.Module, names: dict[str, nn.Module]) -> list[Layer]:
    unsplit = {kind for module in (model, *names.values()) for kind in getattr(module, "_no_split_modules", None) or ()}
    declared = {name for name, module in names.items() if type(module).__name__ in unsplit}
    if declared:
        return [Layer(name, names[name]) for name in names if name in declared and not _has_ancestor(name, declared)]
    repeated = list(_iterate_repeated(model, ""))
    if repeated:
        return repeated
    stages = [
        Layer(f"{name}[{start}:{stop}]" if name else f"[{start}:{stop}]", module, (start, stop))
        for name, module in (("", model), *names.items())
        for start, stop in find_conv_stages(module)
    ]
    if not stages:
        raise ValueError(
            f"layers='auto' finds no candidate in {type(model).__name__}: no _no_split_modules, no container with two "
            "or more layers of one class, no convolution-norm-activation stage. Name the layers by class or pattern; "
            f"the model's modules are {_show(list(names))}."
        )
    return stages


def _iterate_repeated(module: nn.Module, name: str) -> Iterator[Layer]:
    children = [(_join(name, child), _uncompiled(inner)) for child, inner in module.named_children()]
    repeated: set[type[nn.Module]] = set()
    if isinstance(module, _CONTAINERS):
        counts = Counter(type(child) for _, child in children if _is_block(child))
        repeated = {kind for kind, count in counts.items() if count > 1}
    for child_name, child in children:
        inside = list(_iterate_repeated(child, child_name)) if type(child) not in repeated or _is_plain(child) else []
        if inside or type(child) not in repeated:
            yield from inside
        else:
            yield Layer(child_name, child)


def _is_block(module: nn.Module) -> bool:
    """Whether recomputing the module can save anything: it computes in several operations and has parameters."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward is nn.Module.forward:
        return False
    is_composite = any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn.")
    return is_composite and any(True for _ in module.parameters())


def _is_plain(module: nn.Module) -> bool:
    return type(module) in _CONTAINERS


def _match(pattern: LayerPattern, names: dict[str, nn.Module], model: str) -> list[str]:
    if isinstance(pattern, type):
        found = [name for name, module in names.items() if isinstance(module, pattern)]
        kind = f"{pattern.__module__}.{pattern.__qualname__}"
        if not found:
            raise ValueError(f"layers={kind} matches no module of {model}. {_suggest(pattern.__name__, names)}")
        return found
    glob = re.compile(_translate(pattern))
    found = [n for n, module in names.items() if glob.fullmatch(n) or pattern in _class_names(type(module))]
    if not found:
        raise ValueError(f"layers={pattern!r} matches no module or class of {model}. {_suggest(pattern, names)}")
    return [leaf for name in found for leaf in _expand(name, names)]


def _translate(pattern: str) -> str:
    parts = re.split(r"(\*\*|\*|\?|\[[^\]]*\])", pattern)
    wild = {"**": ".*", "*": r"[^.]*", "?": r"[^.]"}
    return "".join(wild.get(part) or (part if part.startswith("[") else re.escape(part)) for part in parts)


def _class_names(kind: type) -> set[str]:
    """Names a class answers to: its own and those of its bases below ``nn.Module``, short and qualified."""
    kinds = [base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    return {name for base in kinds for name in (base.__name__, f"{base.__module__}.{base.__qualname__}")}


def _expand(name: str, names: dict[str, nn.Module]) -> list[str]:
    module = names[name]
    if not isinstance(module, nn.ModuleList | nn.ModuleDict) or type(module).forward is not nn.Module.forward:
        return [name]
    return [leaf for child, _ in module.named_children() for leaf in _expand(_join(name, child), names)]


def _suggest(pattern: str, names: dict[str, nn.Module]) -> str:
    classes = {type(module).__name__ for module in names.values()}
    globs = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names}
    close = difflib.get_close_matches(pattern, sorted({*globs, *names, *classes}), n=_SHOWN_NAMES, cutoff=0.5)
    if close:
        return f"Close names: {_show(close)}."
    return f"It has {_show(sorted(globs, key=lambda name: name.count('.')))} and the classes {_show(sorted(classes))}."


def _show(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:_SHOWN_NAMES])
    return f"{shown} and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else shown


def _has_ancestor(name: str, matched: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:length]) in matched for length in range(1, len(parts)))


def _uncompiled(module: nn.Module) -> nn.Module:
    inner = getattr(module, _COMPILED, None)
    return inner if isinstance(inner, nn.Module) else module


def _join(name: str, child: str) -> str:
    return f"{name}.{child}" if name else child
