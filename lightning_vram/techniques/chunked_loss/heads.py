"""Find the layer that makes logits."""

from collections.abc import Sequence

from torch import nn

from lightning_vram.core.layers.patterns import LayerPattern
from lightning_vram.core.layers.selection import select_layers
from lightning_vram.core.surgery.class_swap import has_own_forward, plain_class_forward

WAY_OUT = "Name it: ChunkedLoss(heads='net.head'), as in named_modules()"


def find_heads(model: nn.Module, heads: LayerPattern | Sequence[LayerPattern] = "auto") -> dict[str, nn.Linear]:
    """Return the layers that make logits, by name.

    ``"auto"``: what transformers models name by ``get_output_embeddings()``; else linear layers with as many outputs as
    the largest embedding for which there are some has entries.
    """
    if heads == "auto":
        found = _declared(model) or _as_large_as_embeddings(model)
        if not found:
            raise ValueError(
                f"No head found: no nn.Linear has as many outputs as an nn.Embedding has entries. {WAY_OUT}."
            )
        return _only_linear(found)
    try:
        chosen = {layer.name: layer.module for layer in select_layers(model, heads).layers}
    except ValueError as error:
        raise ValueError(str(error).replace("layers=", "heads=", 1)) from None
    others = {name: module for name, module in chosen.items() if not isinstance(module, nn.Linear)}
    if others:
        name, module = next(iter(others.items()))
        raise ValueError(f"{name} ({type(module).__name__}) cannot be a head: only nn.Linear can. {WAY_OUT}.")
    return _only_linear({name: module for name, module in chosen.items() if isinstance(module, nn.Linear)})


def _only_linear(heads: dict[str, nn.Linear]) -> dict[str, nn.Linear]:
    """Refuse what derives from ``nn.Linear`` and computes something else: normalised, with adapters, in few bits."""
    for name, module in heads.items():
        if has_own_forward(module) or plain_class_forward(module) is not nn.Linear.forward:
            raise ValueError(
                f"{name} ({type(module).__name__}) cannot be a head: it has its own forward, and chunks are computed "
                "as in nn.Linear. Leave out ChunkedLoss, or name other heads."
            )
    return heads


def _declared(model: nn.Module) -> dict[str, nn.Linear]:
    """Those that models of transformers declare."""
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, nn.Linear] = {}
    for module in model.modules():
        get = getattr(type(module), "get_output_embeddings", None)
        if get is None:
            continue
        try:
            head = get(module)
        except (AttributeError, NotImplementedError):  # a body without a head
            continue
        if isinstance(head, nn.Linear) and id(head) in names:
            found[names[id(head)]] = head
    return found


def _as_large_as_embeddings(model: nn.Module) -> dict[str, nn.Linear]:
    """Those of the largest vocabulary that has some: of words, not of positions. Those in no list come first."""
    sizes = {module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)}
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for size in sorted(sizes, reverse=True):
        found = {name: module for name, module in linears.items() if module.out_features == size}
        outside = {name: module for name, module in found.items() if not any(map(str.isdigit, name.split(".")))}
        if found:
            return outside or found
    return {}
