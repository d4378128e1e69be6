"""Keep the key-value caches of transformers out of recomputed layers.

A decoder layer of transformers appends its keys and values to a cache that is passed in (``use_cache=True`` is the
default, in training too). Run a second time it would append them twice, and the cache would keep alive what
checkpointing frees. transformers itself drops the cache under its own gradient checkpointing; so do we.
"""

from typing import Any

from torch import nn

from lightning_vram.private_names.torch.trees import tree_map


def drop_empty_caches(layer: nn.Module, arguments: Any) -> Any:
    """Replace key-value caches in ``arguments`` by ``None``.

    Args:
        layer: Layer that gets the arguments.
        arguments: Any nest of arguments.

    Returns:
        The same nest, or a copy of it without caches.

    Raises:
        RuntimeError: If a cache already holds keys for this layer, as with prefix tuning: the layer needs them.
    """
    if not any(_is_cache(leaf) for leaf in _shallow_leaves(arguments)):
        return arguments

    def drop(leaf: Any) -> Any:
        if not _is_cache(leaf):
            return leaf
        position = next((module.layer_idx for module in layer.modules() if hasattr(module, "layer_idx")), 0)
        if leaf.get_seq_length(position):
            raise RuntimeError(
                f"layer {type(layer).__name__} reads a filled key-value cache and cannot be recomputed. "
                "Choose other layers to checkpoint, or train without past_key_values."
            )
        return None

    return tree_map(drop, arguments, is_leaf=_is_cache)


def _shallow_leaves(arguments: Any) -> list[Any]:
    args, kwargs = arguments
    return [*args, *kwargs.values()]


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")
