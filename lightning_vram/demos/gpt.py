"""A GPT-2 style decoder."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MLP_RATIO = 4
INIT_STD = 0.02


class MLP(nn.Module):
    """The feed-forward part of a block: [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, MLP_RATIO * width)
        self.project = nn.Linear(MLP_RATIO * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each position."""
        inner = F.gelu(self.expand(self.norm(hidden)), approximate="tanh")
        out: Tensor = self.project(inner)
        return out


class Block(nn.Module):
    """One pre-norm transformer block: [B, T, D] -> [B, T, D]."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp = MLP(width)
        self.residual_dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Attend, then transform each position."""
        hidden = hidden + self.residual_dropout(self._attend(self.attention_norm(hidden)))
        out: Tensor = hidden + self.residual_dropout(self.mlp(hidden))
        return out

    def _attend(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(hidden).unflatten(-1, (3, self.num_heads, -1))  # [B, T, 3, H, D / H]
        query, key, value = heads.transpose(1, 3).unbind(2)  # each [B, H, T, D / H]
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return out


class GPT(nn.Module):
    """GPT-2 style, pre-norm, with fused attention and learned positions: tokens [B, T] -> logits [B, T, vocab_size]."""

    def __init__(
        self, vocab_size: int, num_layers: int, width: int, num_heads: int, sequence_length: int, dropout: float
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.position = nn.Embedding(sequence_length, width)
        self.embed_dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.apply(_init)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the token after each position."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embed_dropout(self.embed(tokens) + self.position(positions))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def _init(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=INIT_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
