"""Autocast of CUDA, carried out on the stand-in for a card: the same casts, cached for as long.

CUDA's own kernels for it take CUDA tensors only. These take the tensors of the stand-in, from the same lists, at a
dispatch key that lies where autocast's do: in front of autograd, so that the casts are part of the graph.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_vram.memory.estimate.cuda_semantics.autocast.lists import Cast, autocast_lists
from lightning_vram.private_names.cuda.dispatch_keys import (
    AUTOCAST,
    Kernel,
    operator_named,
    operators_cast_for,
    pass_by,
)
from lightning_vram.private_names.torch.operators import given_arguments
from lightning_vram.private_names.torch.tensors import is_view
from lightning_vram.private_names.torch.trees import tree_leaves, tree_map

_norm = torch.ops.aten.norm
_WITH_DTYPE = {_norm.Scalar: _norm.ScalarOpt_dtype, _norm.ScalarOpt_dim: _norm.ScalarOpt_dim_dtype}
_to_dtype = torch.ops.aten.to.dtype


class Autocast:
    """Casts as autocast of ``"cuda"`` is set in the running thread."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._cached: dict[int, tuple[Tensor, Tensor]] = {}  # with the weight, so that its id stays its own

    def kernels(self) -> dict[str, Kernel]:
        """Return the kernel of each operator that is cast."""
        policies: dict[Cast, Callable[..., Any]] = {
            Cast.LOWER: self._lower,
            Cast.FLOAT32: self._float32,
            Cast.FLOAT32_RESULT: self._float32_result,
            Cast.FLOAT32_NORM: self._float32_result,
            Cast.WIDEST: self._widest,
            Cast.REFUSED: _refuse,
        }
        there = operators_cast_for("cuda")
        return {
            name: partial(self._run, policies[cast], operator_named(name))
            for name, cast in autocast_lists().items()
            if name in there
        }

    def clear_cache(self) -> None:
        """Forget the weights' casts."""
        self._cached.clear()

    def cast(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast a floating-point tensor of the stand-in, as autocast does; others stay as they are."""
        if not self._is_eligible(tensor) or tensor.dtype is dtype:
            return tensor
        if not self._is_cacheable(tensor, dtype):
            return _to_dtype(tensor, dtype)  # type: ignore[no-any-return]
        if id(tensor) not in self._cached:
            with torch.enable_grad():  # it serves later forwards, too
                self._cached[id(tensor)] = tensor, _to_dtype(tensor, dtype)
        return self._cached[id(tensor)][1]

    def _run(self, policy: Callable[..., Any], op: Any, /, *args: Any, **kwargs: Any) -> Any:
        with pass_by(AUTOCAST):
            is_on = torch.is_autocast_enabled("cuda") and any(map(self._is_eligible, tree_leaves((args, kwargs))))
            return policy(op, args, kwargs) if is_on else op(*args, **kwargs)

    def _is_eligible(self, leaf: Any) -> bool:
        return (
            isinstance(leaf, Tensor)
            and leaf.device.type == self._kind
            and leaf.is_floating_point()
            and leaf.dtype is not torch.float64
        )

    @staticmethod
    def _is_cacheable(tensor: Tensor, dtype: torch.dtype) -> bool:
        is_weight = tensor.requires_grad and tensor.is_leaf and not is_view(tensor) and tensor.dtype is torch.float32
        is_to_cache = dtype is torch.get_autocast_dtype("cuda") and torch.is_autocast_cache_enabled()
        return is_weight and is_to_cache and not torch.is_inference_mode_enabled()

    def _cast_all(self, nest: Any, dtype: torch.dtype) -> Any:
        return tree_map(lambda leaf: self.cast(leaf, dtype) if isinstance(leaf, Tensor) else leaf, nest)

    def _lower(self, op: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = self._cast_all((args, kwargs), torch.get_autocast_dtype("cuda"))
        return op(*args, **kwargs)

    def _float32(self, op: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = self._cast_all((args, kwargs), torch.float32)
        return op(*args, **kwargs)

    def _float32_result(self, op: Any, args: Any, kwargs: Any) -> Any:
        """Let the kernel cast: no float32 copy of the input is made. Norms do it by another signature."""
        if not self._is_eligible(args[0]):
            return op(*args, **kwargs)
        given = given_arguments(op, args, kwargs)
        if given.get("dtype") is None:
            given["dtype"] = torch.float32
        return _WITH_DTYPE.get(op, op)(**given)

    def _widest(self, op: Any, args: Any, kwargs: Any) -> Any:
        dtypes = {leaf.dtype for leaf in tree_leaves((args, kwargs)) if self._is_eligible(leaf)}
        dtype = torch.float32 if torch.float32 in dtypes else torch.get_autocast_dtype("cuda")
        args, kwargs = self._cast_all((args, kwargs), dtype)
        return op(*args, **kwargs)


def _refuse(op: Any, args: Any, kwargs: Any) -> Any:
    raise RuntimeError(f"{op} is unsafe to autocast; CUDA refuses it. Use binary_cross_entropy_with_logits.")
