"""Which arguments of a call have tokens, and the call on some of them.

Tokens are along the last dimension but one of the first floating tensor: [B, T, D], or [T, D]. Whatever is called
batch and token does not matter, as independence along this dimension is what is proven. Other tensors that begin with
the same sizes ([B, T]) are cut along with it; those that do not are handed on whole.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_vram.core.tensors.nests import Rebuild, flatten_arguments
from lightning_vram.core.tensors.parameter_classes import PLAIN_TYPES
from lightning_vram.core.tensors.versions import is_strided

_VALUES = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_FEWEST_ROWS = 1024
MIN_DIMS = 2


@dataclass(frozen=True)
class CutCall:
    """How a call is cut. Holds no tensor."""

    values: tuple[Any, ...]  # arguments, in a row; ``None`` in the places of tensors
    rebuild: Rebuild  # makes arguments of as many others
    places: tuple[int, ...]  # of tensors
    is_cut: tuple[bool, ...]  # whether each of them has tokens
    dim: int  # of tokens
    num_tokens: int  # T
    num_rows: int  # tokens of the whole batch
    width: int  # D

    def tile(self, tile: int | Literal["auto"]) -> int:
        """Return the tokens of a tile, a function of sizes only, so that a run can be repeated.

        ``"auto"``: as many as a token has numbers, as in ALST, so that what a layer makes of a tile is about as large
        as its weights; at least 1,024 rows over all sequences, since products of fewer rows are slow.
        """
        if tile != "auto":
            return tile
        num_tiles = -(-self.num_rows // max(self.width, _FEWEST_ROWS))
        return -(-self.num_tokens // num_tiles)

    def tiles(self, tile: int) -> Iterator[tuple[int, int]]:
        """Yield first token and length of each tile."""
        for start in range(0, self.num_tokens, tile):
            yield start, min(tile, self.num_tokens - start)

    def cut(self, tensors: Sequence[Tensor], take: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Apply ``take`` to tensors that have tokens."""
        return [take(tensor) if is_cut else tensor for tensor, is_cut in zip(tensors, self.is_cut, strict=True)]

    def part(self, tensors: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
        """Return a tile of each tensor, in one piece: modules make views of their inputs."""
        return self.cut(tensors, lambda one: one.narrow(self.dim, start, length).contiguous())

    def arguments(self, tensors: Sequence[Tensor]) -> Any:
        """Return arguments with these tensors."""
        leaves = list(self.values)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return self.rebuild(leaves)


def cut_call(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[CutCall, list[Tensor]] | str:
    """Return how a call can be cut, and its tensors; or why it cannot."""
    leaves, rebuild = flatten_arguments(arguments)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[place] for place in places]
    others = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *_VALUES))]
    if others:
        return f"gets a {type(others[0]).__name__}"
    if any(type(tensor) not in PLAIN_TYPES or not is_strided(tensor) for tensor in tensors):
        return "gets a tensor subclass or sparse tensor"
    first = next((one for one in tensors if one.is_floating_point() and one.dim() >= MIN_DIMS), None)
    if first is None or not first.numel():
        return "gets no floating-point tensor with tokens"
    dim = first.dim() - 2
    begin = first.shape[: dim + 1]
    values = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    is_cut = tuple(tensor.shape[: dim + 1] == begin for tensor in tensors)
    call = CutCall(values, rebuild, tuple(places), is_cut, dim, begin[dim], begin.numel(), first.shape[-1])
    return call, tensors
