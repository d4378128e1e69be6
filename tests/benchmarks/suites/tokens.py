"""How many tokens of one sequence fit a card, by the estimator: as it is, and with the parts for long contexts.

Shapes of Llama, weights and states on the host in both. Kernels are those of an H100, memory is that of each card. No
GPU is needed; activations that wait on the host take room there.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_vram import ActivationCheckpointing, ActivationOffload, ChunkedLoss, TokenTiling, estimate_memory
from lightning_vram.memory.estimate.device_spec import find_device
from tests.benchmarks.compare import Options
from tests.benchmarks.measure import Row

SETTINGS: dict[str, Any] = {}
QUICK: dict[str, Any] = {}
CARDS = ("RTX 3060", "RTX 4080 Super", "RTX 4090", "L40S", "H100", "H200")
SHAPES = {
    "Llama 3.2 1B": (16, 2048, 32, 8, 8192),
    "Llama 3.2 3B": (28, 3072, 24, 8, 8192),
    "Llama 3.1 8B": (32, 4096, 32, 8, 14336),
}
"""Layers, width, heads, of keys, width of MLPs; the first two have a tied head."""
NUM_CLASSES, TIED = 128256, 3072
LEAST, STEP, CLOSE = 512, 512, 64
WAYS: dict[str, Callable[[], list[pl.Callback]]] = {
    "tokens_as_it_is": list,
    "tokens": lambda: [ChunkedLoss(), ActivationCheckpointing(), ActivationOffload()],
}
IN_TILES = "tiles"
TILED: tuple[tuple[str, int], ...] = (
    ("Llama 3.2 1B", 32768),
    ("Llama 3.2 1B", 131072),
    ("Llama 3.1 8B", 196608),
    ("Llama 3.1 8B", 524288),
)
"""What is run with tiles, too, with ``--ways tiles``: a step takes minutes, as each tile of each layer is traced."""


class MLP(nn.Module):
    """Gated, as in Llama: [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(hidden)) * self.up(hidden))
        return out


class Block(nn.Module):
    """Grouped attention with rotary positions, and a gated MLP: [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, num_heads: int, num_groups: int, inner: int) -> None:
        super().__init__()
        self.heads = (num_heads, num_groups, num_groups)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, sum(self.heads) * width // num_heads, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = MLP(width, inner)

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mixed = self.qkv(self.norms[0](hidden)).unflatten(-1, (sum(self.heads), -1)).transpose(1, 2)
        query, key, value = mixed.split(self.heads, 1)
        query, key = (_rotate(one, cos.to(one.dtype), sin.to(one.dtype)) for one in (query, key))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        out: Tensor = hidden + self.mlp(self.norms[1](hidden))
        return out


def _rotate(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, other = values.chunk(2, -1)
    return values * cos + torch.cat([-other, one], -1) * sin


class Llama(pl.LightningModule):
    """A decoder in the shape of Llama."""

    def __init__(self, num_layers: int, width: int, num_heads: int, num_groups: int, inner: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_CLASSES, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, num_groups, inner) for _ in range(num_layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, NUM_CLASSES, bias=False)
        self.head_width = width // num_heads
        if width <= TIED:
            self.head.weight = self.embed.weight

    def training_step(self, batch: Tensor) -> Tensor:
        hidden = self.embed(batch[:, :-1])
        angles = torch.arange(hidden.shape[1], device=hidden.device)[:, None] * torch.ones(
            self.head_width, device=hidden.device
        )
        cos, sin = angles.cos(), angles.sin()
        for block in self.blocks:
            hidden = block(hidden, cos, sin)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


@cache
def needed_bytes(shape: str, way: str, num_tokens: int) -> int:
    """Return what a step with one sequence needs of the card."""
    with torch.device("meta"):
        module = Llama(*SHAPES[shape])
    callbacks = [*WAYS["tokens"](), TokenTiling()] if way == IN_TILES else WAYS[way]()
    trainer = {"precision": "bf16-mixed", "strategy": "fsdp_offload", "callbacks": callbacks}
    batch = torch.zeros(1, num_tokens + 1, dtype=torch.int64)
    return estimate_memory(module, batch, device="h100", trainer=trainer, find_limits=False).needed_bytes


def most_tokens(needed: Callable[[int], int], limit_bytes: int, known: dict[int, int]) -> int:
    """Return the most that fit, found to a part in 64; 0: none of ``LEAST``.

    Args:
        needed: What so many need. It grows with them, nearly by a line.
        limit_bytes: What there is.
        known: What so many need, as far as it was seen. Is added to.
    """
    tokens = 16 * LEAST
    while True:
        if tokens not in known:
            known[tokens] = needed(tokens)
        fitting = [one for one, num_bytes in known.items() if num_bytes <= limit_bytes]
        others = [one for one, num_bytes in known.items() if num_bytes > limit_bytes]
        least, most = max(fitting, default=0), min(others, default=0)
        if most and most - least <= max(STEP, least // CLOSE):
            return least
        if not least or not most:
            tokens = 2 * least or most // 2
            continue
        share = (limit_bytes - known[least]) / (known[most] - known[least])
        step = max(STEP, least // CLOSE // STEP * STEP)
        tokens = max(least + step, min(most - STEP, int(least + share * (most - least)) // STEP * STEP))


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each shape and card; the first shape and card if it is to be quick."""
    if options.ways == IN_TILES:
        for shape, num_tokens in TILED:
            if options.only in shape:
                found = {f"{way}_bytes": needed_bytes(shape, way, num_tokens) for way in ("tokens", IN_TILES)}
                yield {"workload": shape, "variant": f"{num_tokens:,} tokens", "by": "ours", **found}
        return
    for shape in list(SHAPES)[:1] if options.is_quick else SHAPES:
        if options.only not in shape:
            continue
        known: dict[str, dict[int, int]] = {way: {} for way in WAYS}
        for name in CARDS[:1] if options.is_quick else CARDS:
            card = find_device(name)
            found = {
                way: most_tokens(partial(needed_bytes, shape, way), card.memory_bytes, seen)
                for way, seen in known.items()
            }
            yield {"workload": shape, "variant": card.name, "by": "ours", "memory_bytes": card.memory_bytes, **found}
