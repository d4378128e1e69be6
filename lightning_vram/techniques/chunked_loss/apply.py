"""Losses on logits of language models in chunks of tokens: full logits are never in memory.

Logits are the largest activation of a language model: 16,384 tokens of 248,320 classes take 16 GiB in float32, and
their loss and its gradient as much again. Here the head returns a tensor without values; a loss on it computes some
tokens' logits at a time, with their gradients (Hsu et al. 2024, "Liger Kernel", https://arxiv.org/abs/2410.10989, the
source of the chunk size; Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models",
https://arxiv.org/abs/2411.09009, has the same in one kernel). It does not help with a small vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_vram.core.hooks import is_in_backward, is_transformed
from lightning_vram.core.layers import LayerPattern, select_layers
from lightning_vram.core.patching import Swaps, has_own_forward, plain_class_forward
from lightning_vram.core.tensors.properties import PLAIN_TYPES, is_strided
from lightning_vram.private_names.fsdp2 import is_sharded
from lightning_vram.private_names.torch import tree_map_only
from lightning_vram.techniques.chunked_loss.lazy_logits import LazyLogits, Settings, make_logits
from lightning_vram.techniques.chunked_loss.row_program import make_head

WAY_OUT = "Name it: ChunkedLoss(heads='net.head'), as in named_modules()"


def find_heads(model: nn.Module, heads: LayerPattern | Sequence[LayerPattern] = "auto") -> dict[str, nn.Linear]:
    """Return the layers that make logits, by name.

    ``"auto"``: what transformers models name by ``get_output_embeddings()``; else linear layers with as many outputs as
    the largest embedding for which there are some has entries.
    """
    if heads == "auto":
        found: dict[str, nn.Module] = {**(_declared(model) or _as_large_as_embeddings(model))}
        if not found:
            reason = "no nn.Linear has as many outputs as an nn.Embedding has entries"
            raise ValueError(f"No head found: {reason}. {WAY_OUT}.")
    else:
        try:
            found = {layer.name: layer.module for layer in select_layers(model, heads).layers}
        except ValueError as error:
            raise ValueError(str(error).replace("layers=", "heads=", 1)) from None
    return {name: _check_linear(name, module) for name, module in found.items()}


def _check_linear(name: str, module: nn.Module) -> nn.Linear:
    """Refuse what derives from ``nn.Linear`` and computes something else: normalised, with adapters, in few bits."""
    refusal = f"{name} ({type(module).__name__}) cannot be a head: "
    if not isinstance(module, nn.Linear):
        raise ValueError(f"{refusal}only nn.Linear can. {WAY_OUT}.")
    if has_own_forward(module) or plain_class_forward(module) is not nn.Linear.forward:
        raise ValueError(
            f"{refusal}it has its own forward, and chunks are computed as in nn.Linear. Leave out ChunkedLoss, or name "
            "other heads."
        )
    return module


def _declared(model: nn.Module) -> dict[str, nn.Linear]:
    """Those that models of transformers declare."""
    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, nn.Linear] = {}
    for module in model.modules():
        with suppress(AttributeError, NotImplementedError):  # no model of transformers, or a body without a head
            head = module.get_output_embeddings()  # type: ignore[operator]
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


_KEY = "_chunked_loss"


class ChunkedLossHandle:
    """Undoes :func:`apply_chunked_loss`. Logits are computed in chunks inside of :meth:`active`."""

    def __init__(
        self, heads: dict[str, nn.Linear], chunk: int | Literal["auto"], tell: Callable[[str, str], None]
    ) -> None:
        self.is_active = False  # whether heads return logits that are not computed yet
        self._swaps = Swaps(_KEY)
        with self._swaps.all_or_none():
            for name, head in heads.items():
                settings = Settings(name, chunk, partial(tell, name))
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

    Of ``chunk`` tokens logits are there at a time; ``"auto"``: as many as make logits of the size of the hidden states.
    ``tell`` gets the names of a head and of a function that needs whole logits.
    """
    return ChunkedLossHandle(find_heads(model, heads), chunk, tell)


def settle(values: Any, why: str) -> None:
    """Compute all logits in a nest of values now, for those who read them when the weights are others."""
    tree_map_only(LazyLogits, lambda one: one.make_whole(why, with_graph=False), values)


def _run(module: nn.Module, state: _State, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    hidden = args[0] if len(args) == 1 and not kwargs else None
    if torch.compiler.is_compiling() or is_transformed() or not (state.is_active() and isinstance(hidden, Tensor)):
        return original(*args, **kwargs)
    linear: Any = module
    kind = hidden.device.type
    can_cast = torch.amp.is_autocast_available(kind) and hidden.dtype != torch.float64
    is_cast = can_cast and torch.is_autocast_enabled(kind)
    dtype = torch.get_autocast_dtype(kind) if is_cast else None
    weight, bias = linear.weight, linear.bias
    if hasattr(weight, "form"):  # kept in few bits: decoded for the step
        weight = weight.dequantize(dtype)
    if not (is_strided(hidden) and {type(hidden), type(weight)} <= PLAIN_TYPES):
        if not isinstance(hidden, LazyLogits):
            state.settings.tell("a tensor subclass (tensor parallelism, torchao, nested tensors)")
        return original(*args, **kwargs)
    if is_sharded(module):  # its weights go when its forward ends
        weight, bias = weight.clone(), None if bias is None else bias.clone()
    if hidden.dim() < 2 or not hidden.numel() or (hidden.dtype != weight.dtype and dtype is None):
        return original(hidden)
    return make_logits(make_head(hidden, weight, bias, dtype), state.settings)
