"""Choose layers of a module: by class, name or pattern, as stages of a network or segments of a sequence.

May import: memory.
"""

import difflib
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import isqrt
from typing import Any, Literal, TypeGuard

import torch
from torch import nn
from torch.nn.modules import activation, dropout, normalization, pooling
from torch.nn.parameter import UninitializedParameter

from lightning_vram.private_names.dispatcher import COMPILED_PART, uncompiled
from lightning_vram.private_names.torch import ConvBase, InstanceNormBase, NormBase, own_children, own_parameters

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
    glob = re.compile(_translate(pattern))
    found = [n for n, module in names.items() if glob.fullmatch(n) or pattern in _class_names(type(module))]
    if not found:
        raise ValueError(f"layers={pattern!r} matches no module or class of {model}. {_suggest(pattern, names)}")
    return [leaf for name in found for leaf in _expand(name, names)]


def _translate(pattern: str) -> str:
    """Return the regular expression of a glob, in which ``*`` stays within one part of a name."""
    wild, found = {"**": ".*", "*": r"[^.]*", "?": r"[^.]"}, ""
    for part in re.split(r"(\*\*|\*|\?|\[[^\]]*\])", pattern):
        if part[:1] == "[":
            inner = part[1:-1].replace("\\", r"\\").replace("^", r"\^")
            found += f"[^{inner[1:]}]" if inner[:1] == "!" else f"[{inner}]"
        else:
            found += wild.get(part) or re.escape(part)
    return found


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


_NORMS = (NormBase, InstanceNormBase, normalization.GroupNorm, normalization.LayerNorm, normalization.LocalResponseNorm)


def find_conv_stages(module: nn.Module) -> Iterator[tuple[int, int]]:
    """Yield the stages of a stock ``nn.Sequential`` as (first child, one after the last child).

    A stage is a convolution, norms, activations, and the dropout and pooling layers among and right after them.
    """
    if not is_stock_sequential(module):
        return
    children = list(module)
    starts = [index for index, child in enumerate(children) if isinstance(child, ConvBase)]
    for start in starts:
        stop = start + 1
        while stop < len(children) and _follows(children[stop]):
            stop += 1
        run = children[start:stop]
        if any(isinstance(child, _NORMS) for child in run) and any(_is_activation(child) for child in run):
            yield start, stop


def is_stock_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether ``module`` is an ``nn.Sequential`` with the stock ``forward``."""
    is_stock = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return is_stock and "forward" not in vars(module)  # set on the instance: it may do anything


def _follows(child: nn.Module) -> bool:
    return isinstance(child, _NORMS) or _is_activation(child) or _is_in(child, dropout) or _is_in(child, pooling)


def _is_activation(child: nn.Module) -> bool:
    return _is_in(child, activation) and not isinstance(child, nn.MultiheadAttention)


def _is_in(child: nn.Module, family: object) -> bool:
    return any(base.__module__ == getattr(family, "__name__", None) for base in type(child).__mro__)


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_TRANSFORMERS_LAYER = "transformers.modeling_layers.GradientCheckpointingLayer"
_METRIC = "torchmetrics.metric.Metric"  # some hold networks; nothing of theirs is trained


@dataclass(frozen=True)
class Layer:
    """One chosen layer: a module, or a run of children of an ``nn.Sequential``, written ``"net[0:3]"``."""

    name: str
    module: nn.Module = field(repr=False)  # of a run of children: the ``nn.Sequential``
    span: tuple[int, int] | None = None  # first child of the run, and one after the last

    @property
    def title(self) -> str:
        """Name and class, for messages."""
        return f"{self.name} ({type(self.module).__name__})"


@dataclass(frozen=True)
class LayerSelection:
    """The chosen layers, and the names of matches that are left out since they are inside a chosen layer."""

    layers: tuple[Layer, ...]
    nested: tuple[str, ...] = ()

    def modules(self) -> list[nn.Module]:
        """Return the modules of the layers, those of a run one by one."""
        runs = ([one.module] if one.span is None else [*one.module.children()][slice(*one.span)] for one in self.layers)
        return [module for run in runs for module in run]


def select_layers(model: nn.Module, layers: LayerPattern | Sequence[LayerPattern] = "auto") -> LayerSelection:
    """Choose layers of ``model``, in its order: of nested matches the outermost, never the root.

    ``"auto"``: what a model declares (layers that transformers made for checkpointing, ``_no_split_modules``); else the
    children of the outermost container that holds two or more of one class, together with the
    convolution-norm-activation stages of its ``Sequential``s if those hold less than half of the parameters. Otherwise
    class names, module names, globs (``*`` stays within one part of a name, ``**`` crosses dots) or classes, one or
    several. A container without a forward stands for its children. The forward of the root may never be called.
    """
    names = name_layers(model)
    if isinstance(layers, str) and layers == "auto":
        found = _find_repeated_layers(model, names)
        nested: list[str] = []
    else:
        patterns = [layers] if isinstance(layers, str | type) else layers
        matched = {name for pattern in patterns for name in match_layers(pattern, names, type(model).__name__)}
        found = outermost(matched, names)
        inside = {part for layer in found for part in layer.module.modules()} - {layer.module for layer in found}
        nested = [name for name in names if name in matched and names[name] in inside]
    return LayerSelection(tuple(found), tuple(nested))


def thin_out(selection: LayerSelection, every_n_layers: int = 1, *, skip_last: bool = False) -> LayerSelection:
    """Keep the first and every n-th layer after it; ``skip_last`` drops the last (of each body cut into spans)."""
    bodies = [layer.module if layer.span else None for layer in selection.layers]
    last = list(dict(zip(bodies, selection.layers, strict=True)).values()) if skip_last else []
    remaining = [one for one in selection.layers[::every_n_layers] if not any(one is layer for layer in last)]
    if not remaining:
        raise ValueError(f"skip_last=True leaves no layer: the only one is {selection.layers[0].name!r}.")
    return LayerSelection(tuple(remaining), selection.nested)


def name_layers(model: nn.Module) -> dict[str, nn.Module]:
    """All modules but the root under every name a user knows, compiled ones replaced by their originals."""
    names: dict[str, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(".".join(part for part in name.split(".") if part != COMPILED_PART), uncompiled(module))
    return {name: module for name, module in names.items() if name}


def other_owners(model: nn.Module, layers: Collection[nn.Module]) -> set[int]:
    """Ids of the parameters that are not only the ``weight`` of one of ``layers``."""
    ours = set(layers)
    return {
        id(parameter)
        for module in model.modules()
        for key, parameter in own_parameters(module).items()
        if parameter is not None and not (module in ours and key == "weight")
    }


def choose_able(
    model: nn.Module, layers: LayerPattern | Sequence[LayerPattern], why_not: Callable[[nn.Module], str | None]
) -> dict[str, nn.Module]:
    """Return, by first name, the layers whose weight can be quantized for all that read it.

    ``layers``: ``"auto"`` for all of them; else those that patterns name, and those inside. ``why_not`` says what
    speaks against a layer, or ``None``. Raises ``ValueError`` if a pattern names none, or a shared weight.
    """
    names = name_layers(model)
    able = {name: layer for name, layer in names.items() if why_not(layer) is None}
    found = able if layers == "auto" else {}
    for pattern in [layers] if isinstance(layers, str | type) else layers:
        if layers != "auto":
            matched = match_layers(pattern, names, type(model).__name__)
            inside = {name: able[name] for name in able if any(f"{name}.".startswith(f"{one}.") for one in matched)}
            if not inside:
                reason = why_not(names[matched[0]])
                raise ValueError(f"layers={pattern!r} names {matched[0]!r}, which has nothing to quantize: {reason}.")
            found = found | inside
    first = {layer: name for name, layer in reversed(found.items())}
    others = other_owners(model, first)
    shared = [name for layer, name in first.items() if id(own_parameters(layer)["weight"]) in others]
    if shared and layers != "auto":
        raise ValueError(
            f"layers={layers!r} names {shared[0]!r}, which shares its weight with a module that is not quantized: name "
            "other layers."
        )
    return {name: layer for name, layer in found.items() if first[layer] == name and name not in shared}


def outermost(matched: set[str], names: dict[str, nn.Module]) -> list[Layer]:
    """The matches that are inside no other, each module once, in the model's order."""
    found: dict[nn.Module, str] = {}
    for name in names:
        if name in matched and matched.isdisjoint(_ancestors(name)):
            found.setdefault(names[name], name)
    inside = {part for module in found for part in module.modules() if part is not module}  # under another name
    return [Layer(name, module) for module, name in found.items() if module not in inside]


def _find_repeated_layers(model: nn.Module, names: dict[str, nn.Module]) -> list[Layer]:
    # Those that a transformers model declares: made to be checkpointed, or classes not to be split.
    unsplit = {kind for module in (model, *names.values()) for kind in getattr(module, "_no_split_modules", None) or ()}
    declared = {name for name, module in names.items() if type(module).__name__ in unsplit}
    made_for_it = {name for name, module in names.items() if _has_base(module, _TRANSFORMERS_LAYER)}
    holders = {holder for name in made_for_it for holder in _ancestors(name)}
    layers = outermost(made_for_it | (declared - holders), names)
    if layers:
        return layers
    layers = list(_iterate_repeated(model, ""))
    covered = {part for layer in layers for part in layer.module.modules()}
    if _count_parameters(*(layer.module for layer in layers)) * 2 < _count_parameters(model):
        # Nothing repeats, or only small things such as heads: a sequential backbone has stages.
        first_names: dict[nn.Module, str] = {}
        for name, module in {"": model, **names}.items():
            first_names.setdefault(module, name)
        layers += [
            Layer(f"{name}[{start}:{stop}]", module, (start, stop))
            for module, name in first_names.items()
            for start, stop in find_conv_stages(module)
            if module not in covered
        ]
    if not layers:
        raise ValueError(
            f"layers='auto' finds no candidate in {type(model).__name__}: no _no_split_modules, no container with two "
            "or more layers of one class, no convolution-norm-activation stage. Name the layers by class or pattern; "
            f"the model's modules are {show_names(list(names))}."
        )
    return layers


def _iterate_repeated(module: nn.Module, name: str) -> Iterator[Layer]:
    children = list(_iterate_children(module, name))
    counts = Counter(type(child) for _, child in children if _is_block(child))
    is_container = isinstance(module, _CONTAINERS)
    seen: set[nn.Module] = set()
    for child_name, child in children:
        if child in seen or _has_base(child, _METRIC):
            continue
        seen.add(child)
        is_repeated = is_container and counts[type(child)] > 1
        inside = list(_iterate_repeated(child, child_name)) if not is_repeated or type(child) in _CONTAINERS else []
        if inside or not is_repeated:
            yield from inside
        else:
            yield Layer(child_name, child)


def _iterate_children(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Children that have a forward; lists of lists are one list."""
    for child, inner in own_children(module).items():
        if inner is None:
            continue
        child_name = f"{name}.{child}" if name else child
        if isinstance(module, _CONTAINERS) and has_no_forward(inner):
            yield from _iterate_children(inner, child_name)
        else:
            yield child_name, uncompiled(inner)


def _is_block(module: nn.Module) -> bool:
    """Whether recomputing the module can save anything: it computes in several operations and has parameters."""
    is_composite = any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn.")
    is_layer = is_composite and not has_no_forward(module) and not _has_base(module, _METRIC)
    return is_layer and any(True for _ in module.parameters())


def _has_base(module: nn.Module, name: str) -> bool:
    """Whether a base of the module has this full name: a check that imports nothing."""
    return any(f"{base.__module__}.{base.__qualname__}" == name for base in type(module).__mro__)


def _count_parameters(*modules: nn.Module) -> int:
    parameters = {p for module in modules for p in module.parameters()}
    return sum(parameter.numel() for parameter in parameters if not isinstance(parameter, UninitializedParameter))


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


Segments = int | Literal["sqrt"]
_MIN_BODY = 4  # layers of a Sequential that is found by itself: heads and the like have fewer


def select_segments(
    model: nn.Module, layers: LayerPattern | Sequence[LayerPattern], segments: Segments
) -> LayerSelection:
    """Choose the segments of the sequential bodies of ``model``, one layer each, in the model's order.

    n equal layers in k segments save k inputs, and n / k layers while one segment is recomputed: least at k = sqrt(n)
    (Chen et al. 2016, https://arxiv.org/abs/1604.06174). ``layers``: ``"auto"`` for the outermost ``nn.Sequential`` s
    with four or more layers; else patterns, which must match ones with two or more. ``segments``: number per body, at
    least 2, or ``"sqrt"``. Layers are children with parameters; others (activations) belong to the layer before them.
    """
    chosen: list[Layer] = []
    for body in _find_bodies(model, layers):
        starts = _layer_starts(body.module)
        number = max(2, round(len(starts) ** 0.5)) if segments == "sqrt" else segments
        if number > len(starts):
            raise ValueError(
                f"segments={segments} is more than the {len(starts)} layers with parameters of {body.name!r}. "
                f"Use segments='sqrt' ({max(2, isqrt(len(starts)))}) or fewer."
            )
        cuts = [0, *(starts[len(starts) * part // number] for part in range(1, number)), len(body.module)]  # type: ignore[arg-type]
        chosen += [Layer(f"{body.name}[{start}:{stop}]", body.module, (start, stop)) for start, stop in pairwise(cuts)]
    return LayerSelection(tuple(chosen))


def _layer_starts(body: nn.Module) -> list[int]:
    return [place for place, child in enumerate(body.children()) if any(True for _ in child.parameters())]


def _find_bodies(model: nn.Module, layers: LayerPattern | Sequence[LayerPattern]) -> list[Layer]:
    """Find the ``nn.Sequential`` s of ``model``, itself among them, that can be cut into segments."""
    names = {"": model, **name_layers(model)}
    sequentials = {name: len(_layer_starts(part)) for name, part in names.items() if is_stock_sequential(part)}
    bodies = {name: num_layers for name, num_layers in sequentials.items() if num_layers > 1}
    if isinstance(layers, str) and layers == "auto":
        large = {name for name, num_layers in bodies.items() if num_layers >= _MIN_BODY}
        found = outermost(large, names) if "" not in large else [Layer("", model)]
        if not found:
            raise ValueError(
                f"segments finds no nn.Sequential with {_MIN_BODY} or more layers in {type(model).__name__}: the "
                "model's own code calls the layers of a ModuleList. Use every_n_layers, or name a shorter body."
            )
        return found
    selection = select_layers(model, layers)
    for layer in selection.layers:
        if layer.name not in bodies:
            raise ValueError(
                f"segments needs nn.Sequential bodies with two or more layers, but layers={layers!r} matches "
                f"{layer.name!r} ({type(layer.module).__name__}). Use every_n_layers, or name the nn.Sequential."
            )
    return list(selection.layers)


class _OfThread(threading.local):
    num_running = 0


class RunningLayers:
    """Detects, in any thread, whether one of ``layers`` runs, by hooks that exist during :meth:`watching`."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = list(dict.fromkeys(layers))
        self._here = _OfThread()

    @property
    def is_inside(self) -> bool:
        """Whether one of the layers is running in this thread."""
        return self._here.num_running > 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside the block."""
        self._here = _OfThread()  # an error that is no Exception leaves layers without a word
        with ExitStack() as stack:
            for layer in self._layers:
                stack.callback(layer.register_forward_pre_hook(partial(self._count, 1), prepend=True).remove)
                stack.callback(layer.register_forward_hook(partial(self._count, -1), always_call=True).remove)
            yield

    def _count(self, number: int, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._here.num_running += number
