"""Run some modules in float32 while the rest of the model runs under autocast.

For what 16 bits break: a router's softmax, a physics term, a head whose logits overflow in float16. What comes in is
cast to float32, autocast is off inside, what goes out is cast back. It costs the 16-bit speed and the memory of those
modules: their activations take twice the bytes. What autocast runs in float32 anyway (losses, softmax and norms on
CUDA) needs no island. What ``forward`` writes into a list or dict that holds 16-bit tensors, or into such a tensor,
its caller does not see.

In compiled code the backward runs under autocast like the forward around it, islands included: so torch has it
unless ``torch._functorch.config.backward_pass_autocast`` is ``"off"``.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_vram.techniques.class_swap import plain_class_forward
from lightning_vram.techniques.forward_stand_in import (
    ForwardHandle,
    ForwardStandIn,
    has_own_forward,
)

_LOW = (torch.float16, torch.bfloat16)


def run_in_fp32(modules: Iterable[nn.Module], device_type: str) -> ForwardHandle:
    """Let each of ``modules`` run in float32 wherever autocast is enabled when it is called.

    16-bit tensors among the arguments, in any pytree, are cast to float32; float64 and integers stay. If there was
    one, float32 tensors of the result are cast to its dtype. Those without dimensions, losses, stay float32: float16
    would overflow once they are scaled. Results and gradients are those of the module called by hand with float32
    inputs outside of autocast.

    Args:
        modules: Whatever is inside of them is in float32 as well. Of one without a ``forward`` of its own, such as a
            ``ModuleList``, each member. Parameters have to be float32 (they stay what they are).
        device_type: Whose autocast is meant, ``"cuda"`` or ``"cpu"``.

    Returns:
        The undo.

    Raises:
        ValueError: If a module is scripted or traced. All modules are then as they were.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> handle = run_in_fp32([layer], "cpu")
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     print(layer(torch.ones(1, 2)).dtype)
        torch.float32
        >>> handle.remove()
    """
    return ForwardHandle(Float32Forward(module, device_type) for module in _unique_callable(modules))


class Float32Forward(ForwardStandIn):
    """Calls ``forward`` outside of autocast: see :func:`run_in_fp32`."""

    def run(self, *args: Any, **kwargs: Any) -> Any:  # noqa: D102
        if not torch.is_autocast_enabled(self.device_type):
            return self.plain(*args, **kwargs)
        given = [leaf.dtype for leaf in tree_leaves((args, kwargs)) if _is_low(leaf)]
        if given:
            args = tuple(_map_where(_is_low, torch.float32, value) for value in args)
            kwargs = {name: _map_where(_is_low, torch.float32, value) for name, value in kwargs.items()}
        with torch.autocast(self.device_type, enabled=False):
            output = self.plain(*args, **kwargs)
        return _map_where(_is_wide, given[0], output) if given else output


def _is_low(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in _LOW


def _is_wide(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and leaf.dim() > 0


def _map_where(is_meant: Any, dtype: torch.dtype, tree: Any) -> Any:
    """Cast some tensors of ``tree``. Without any it is the same object, which ``forward`` may write into."""
    if not any(is_meant(leaf) for leaf in tree_leaves(tree)):
        return tree
    return tree_map(lambda leaf: leaf.to(dtype) if is_meant(leaf) else leaf, tree)


def _unique_callable(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Each once, and in the place of those that are never called themselves, their members."""
    found: dict[nn.Module, None] = {}
    for module in modules:
        is_called = plain_class_forward(module) is not nn.Module.forward or has_own_forward(module)
        found.update(dict.fromkeys([module] if is_called else _unique_callable(module.children())))
    return list(found)
