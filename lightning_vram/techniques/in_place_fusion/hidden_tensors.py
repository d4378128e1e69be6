"""Find what custom autograd functions keep past ``save_for_backward``: no hook sees it, nothing can drop it."""

from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from lightning_vram.private_names.torch.tensors import storage_key
from lightning_vram.private_names.torch.trees import tree_leaves


def count_hidden_bytes(outputs: Any) -> tuple[int, int]:
    """Walk the graph behind ``outputs`` and add up the tensors that functions hold in attributes of ``ctx``.

    Args:
        outputs: Any nest with tensors, such as what ``training_step`` returned.

    Returns:
        The functions that hide tensors, and the bytes of these tensors, each memory once.
    """
    waiting: list[Any] = [
        leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.grad_fn is not None
    ]
    seen: set[Any] = set(waiting)
    functions: set[str] = set()
    storages: dict[int, int] = {}
    while waiting:
        node = waiting.pop()
        if isinstance(node, BackwardCFunction):
            tensors = [leaf for leaf in tree_leaves(list(vars(node).values())) if isinstance(leaf, Tensor)]
            functions |= {type(node).__name__} if tensors else set()
            storages |= {storage_key(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in tensors}
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return len(functions), sum(storages.values())
