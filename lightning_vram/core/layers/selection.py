"""Choose layers of a model."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.nn.parameter import UninitializedParameter

from lightning_vram.core.layers.conv_stages import find_conv_stages
from lightning_vram.core.layers.patterns import LayerPattern, has_no_forward, match_layers, show_names
from lightning_vram.private_names.torch.compiled import COMPILED_PART, uncompiled
from lightning_vram.private_names.torch.modules import own_children, own_parameters

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


def select_layers(model: nn.Module, layers: LayerPattern | Sequence[LayerPattern] = "auto") -> LayerSelection:
    """Choose layers of ``model``, in its order: of nested matches the outermost, never the root.

    ``"auto"``: what a model declares (transformers does: layers made for checkpointing, and the classes in
    ``_no_split_modules``); else the children of the outermost ``ModuleList``, ``ModuleDict`` or ``Sequential`` that
    holds two or more of one class, together with the convolution-norm-activation stages of its ``Sequential``s if those
    children hold less than half of the parameters. Otherwise class names, module names, globs over module names (``*``
    stays within one part of a name, ``**`` crosses dots) or classes, one or several. A container without a forward
    stands for its children. Nothing guarantees that the forward of the root is called. ``ValueError`` if a pattern
    matches nothing, or ``"auto"`` finds no candidate.
    """
    names = name_layers(model)
    if isinstance(layers, str) and layers == "auto":
        found = _find_repeated_layers(model, names)
        nested: list[str] = []
    else:
        patterns = [layers] if isinstance(layers, str | type) else layers
        matched: set[str] = set()
        for pattern in patterns:
            matched.update(match_layers(pattern, names, type(model).__name__))
        found = outermost(matched, names)
        inside = {part for layer in found for part in layer.module.modules()} - {layer.module for layer in found}
        nested = [name for name in names if name in matched and names[name] in inside]
    return LayerSelection(tuple(found), tuple(nested))


def thin_out(selection: LayerSelection, every_n_layers: int = 1, *, skip_last: bool = False) -> LayerSelection:
    """Keep the first and every n-th layer after it; ``skip_last`` drops the last (of each body cut into spans)."""
    last_of = {_body_of(layer): layer for layer in selection.layers} if skip_last else {}
    remaining = [layer for layer in selection.layers[::every_n_layers] if layer is not last_of.get(_body_of(layer))]
    if not remaining:
        raise ValueError(f"skip_last=True leaves no layer: the only one is {selection.layers[0].name!r}.")
    return LayerSelection(tuple(remaining), selection.nested)


def _body_of(layer: Layer) -> nn.Module | None:
    return layer.module if layer.span else None


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


def outermost(matched: set[str], names: dict[str, nn.Module]) -> list[Layer]:
    """The matches that are inside no other, each module once, in the model's order."""
    found: dict[nn.Module, str] = {}
    for name in names:
        if name in matched and matched.isdisjoint(_ancestors(name)):
            found.setdefault(names[name], name)
    inside = {part for module in found for part in module.modules() if part is not module}  # under another name
    return [Layer(name, module) for module, name in found.items() if module not in inside]


def _find_repeated_layers(model: nn.Module, names: dict[str, nn.Module]) -> list[Layer]:
    layers = _find_declared_layers(model, names)
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


def _find_declared_layers(model: nn.Module, names: dict[str, nn.Module]) -> list[Layer]:
    """Layers that a transformers model declares: made to be checkpointed, or classes not to be split."""
    unsplit = {kind for module in (model, *names.values()) for kind in getattr(module, "_no_split_modules", None) or ()}
    made_for_it = {name for name, module in names.items() if _has_base(module, _TRANSFORMERS_LAYER)}
    holders = {holder for name in made_for_it for holder in _ancestors(name)}
    declared = {name for name, module in names.items() if type(module).__name__ in unsplit}
    return outermost(made_for_it | (declared - holders), names)


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
    if has_no_forward(module) or _has_base(module, _METRIC):
        return False
    is_composite = any(True for _ in module.children()) or not type(module).__module__.startswith("torch.nn.")
    return is_composite and any(True for _ in module.parameters())


def _has_base(module: nn.Module, name: str) -> bool:
    """Whether a base of the module has this full name: a check that imports nothing."""
    return any(f"{base.__module__}.{base.__qualname__}" == name for base in type(module).__mro__)


def _count_parameters(*modules: nn.Module) -> int:
    parameters = {p for module in modules for p in module.parameters()}
    return sum(parameter.numel() for parameter in parameters if not isinstance(parameter, UninitializedParameter))


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]
