"""Losses on logits of language models, chunk by chunk: the logits are never whole.

Of a language model they are the largest activation: 16,384 tokens of 248,320 classes take 16 GiB in float32, and their
loss and its gradient as much again. Here the head returns a tensor without values; a loss on it computes some tokens'
logits at a time, with their gradients (Hsu et al. 2024, "Liger Kernel", https://arxiv.org/abs/2410.10989, from which
the size of chunks is; Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models",
https://arxiv.org/abs/2411.09009, has the same in one kernel). It does not help where the vocabulary is small.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_vram.core.hooks.moment import is_in_backward, is_transformed
from lightning_vram.core.layers.patterns import LayerPattern
from lightning_vram.core.surgery.class_swap import Swaps
from lightning_vram.core.tensors.parameter_classes import PLAIN_TYPES
from lightning_vram.core.tensors.versions import is_strided
from lightning_vram.private_names.fsdp2.states import is_sharded
from lightning_vram.private_names.torch.trees import tree_map_only
from lightning_vram.techniques.chunked_loss.chunk_rows import ChunkRows
from lightning_vram.techniques.chunked_loss.expression import Head
from lightning_vram.techniques.chunked_loss.heads import find_heads
from lightning_vram.techniques.chunked_loss.lazy_logits import LazyLogits, Settings, make_logits

_KEY = "_chunked_loss"


class ChunkedLossHandle:
    """Undoes :func:`apply_chunked_loss`. Logits are computed in chunks inside of :meth:`active`."""

    def __init__(
        self, heads: dict[str, nn.Linear], chunk: int | Literal["auto"], tell: Callable[[str, str], None]
    ) -> None:
        self.heads = list(heads)
        self.is_active = False  # whether heads return logits that are not computed yet
        self._swaps = Swaps(_KEY)
        find_rows = ChunkRows(chunk)
        with self._swaps.all_or_none():
            for name, head in heads.items():
                settings = Settings(name, find_rows, partial(tell, name))
                self._swaps.add(head, _State(self, settings), _run)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Have heads return logits that are not there, inside the block."""
        before, self.is_active = self.is_active, True
        try:
            yield
        finally:
            self.is_active = before

    def remove(self) -> None:
        """Give the heads their class back. Twice does nothing."""
        self._swaps.remove()


@dataclass
class _State:
    handle: ChunkedLossHandle
    settings: Settings
    was_active: bool = False  # in its last run outside of a backward

    def is_active(self) -> bool:
        """Whether the head returns logits that are not there; in a checkpoint's second run as it did in its first."""
        if not is_in_backward():
            self.was_active = self.handle.is_active
        return self.was_active


def apply_chunked_loss(
    model: nn.Module,
    heads: LayerPattern | Sequence[LayerPattern] = "auto",
    chunk: int | Literal["auto"] = "auto",
    *,
    tell: Callable[[str, str], None] = lambda head, function: None,
) -> ChunkedLossHandle:
    """Let the heads of ``model`` return logits that are computed when a loss asks for them.

    Args:
        model: Any module.
        heads: See :func:`~lightning_vram.techniques.chunked_loss.heads.find_heads`.
        chunk: Tokens whose logits are there at a time; ``"auto"``: as many as make logits of the size of the hidden
            states, or fewer where the device has no room for them.
        tell: Is called where something needs whole logits, with the names of the head and of the function.

    Returns:
        What undoes it.

    Raises:
        ValueError: If there is no head, or its class cannot be changed.
    """
    return ChunkedLossHandle(find_heads(model, heads), chunk, tell)


def settle(values: Any, why: str) -> None:
    """Compute all logits in a nest of values now, for those who read them when the weights are others."""
    tree_map_only(LazyLogits, lambda one: one.settle(why), values)


def _run(module: nn.Module, state: _State, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    hidden = args[0] if len(args) == 1 and not kwargs else None
    if torch.compiler.is_compiling() or is_transformed() or not (state.is_active() and isinstance(hidden, Tensor)):
        return plain(*args, **kwargs)
    linear: Any = module
    kind = hidden.device.type
    is_cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if is_cast else None
    weight, bias = linear.weight, linear.bias
    if hasattr(weight, "form"):  # kept in few bits: decoded for the step
        weight = weight.dequantize(dtype)
    if not (is_strided(hidden) and {type(hidden), type(weight)} <= PLAIN_TYPES):
        if not isinstance(hidden, LazyLogits):
            state.settings.tell("a tensor subclass (tensor parallelism, torchao, nested tensors)")
        return plain(*args, **kwargs)
    if is_sharded(module):  # its weights go when its forward ends
        weight, bias = weight.clone(), None if bias is None else bias.clone()
    if hidden.dim() < 2 or not hidden.numel() or not hidden.is_floating_point():
        return plain(hidden)
    return make_logits(Head(hidden, weight, bias, dtype), state.settings)
