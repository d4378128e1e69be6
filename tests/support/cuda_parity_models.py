"""Small models of the usual kinds, each with a loss, to run under CUDA's own dispatcher and under ours."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int | None = None, dropout: float = 0.0, causal: bool = True):
        super().__init__()
        self.heads, self.groups, self.dropout, self.causal = heads, groups or heads, dropout, causal
        self.head_width = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, self.groups * self.head_width)
        self.value = nn.Linear(width, self.groups * self.head_width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, rotary: Tensor | None = None) -> Tensor:
        b, t, c = x.shape
        q = self.query(x).view(b, t, self.heads, -1).transpose(1, 2)
        k = self.key(x).view(b, t, self.groups, -1).transpose(1, 2)
        v = self.value(x).view(b, t, self.groups, -1).transpose(1, 2)
        if rotary is not None:
            q, k = (y * rotary.cos().to(y.dtype) + y.roll(1, -1) * rotary.sin().to(y.dtype) for y in (q, k))
        if self.groups != self.heads:
            k, v = (y.repeat_interleave(self.heads // self.groups, 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float = 0.0, causal: bool = True):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout=dropout, causal=causal)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm_1(x)))
        return x + self.drop(self.mlp(self.norm_2(x)))


class GPT(nn.Module):
    def __init__(self, causal: bool = True, dropout: float = 0.0):
        super().__init__()
        self.tokens, self.places = nn.Embedding(512, 128), nn.Embedding(96, 128)
        self.blocks = nn.ModuleList(Block(128, 4, dropout, causal) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(128), nn.Linear(128, 512, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


class LlamaBlock(nn.Module):
    def __init__(self, width: int = 128):
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, 4, groups=2)
        self.gate, self.up, self.down = (nn.Linear(*s, bias=False) for s in ((128, 344), (128, 344), (344, 128)))

    def forward(self, x: Tensor, rotary: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), rotary)
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head, self.norm = nn.Embedding(512, 128), nn.Linear(128, 512, bias=False), nn.RMSNorm(128)
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.tokens(x)
        rotary = torch.arange(x.shape[1], device=x.device)[:, None] * torch.ones(32, device=x.device)
        for block in self.blocks:
            h = block(h, rotary)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [(3, 16, 1), (16, 32, 2), (32, 32, 1)]
        self.convolutions = nn.ModuleList(nn.Conv2d(i, o, 3, stride=s, padding=1, bias=False) for i, o, s in layers)
        self.norms = nn.ModuleList(nn.BatchNorm2d(o) for _, o, _ in layers)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.relu(norm(convolution(x)))
        return F.cross_entropy(self.head(F.max_pool2d(x, 2).mean((2, 3))), y)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.down = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.middle, self.up = nn.Conv2d(64, 64, 3, padding=1), nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.leave, self.norm_1, self.norm_2 = nn.Conv2d(64, 3, 3, padding=1), nn.GroupNorm(8, 64), nn.GroupNorm(8, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a = F.silu(self.enter(x))
        b = F.silu(self.norm_1(self.down(a)))
        c = self.middle(F.interpolate(F.avg_pool2d(b, 2), scale_factor=2.0, mode="nearest")) + b
        mixed = torch.einsum("bchw,bcvw->bhv", c, c).softmax(-1)
        c = self.norm_2(c + torch.einsum("bhv,bcvw->bchw", mixed, c))
        z = F.interpolate(self.leave(torch.cat([self.up(c), a], 1)), size=x.shape[-2:], mode="bilinear")
        return F.mse_loss(z, x) + F.binary_cross_entropy_with_logits(z.mean((1, 2, 3)), y.float())


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches, self.first = nn.Conv2d(3, 128, 8, stride=8), nn.Parameter(torch.zeros(1, 1, 128))
        self.blocks = nn.Sequential(*(Block(128, 4, causal=False) for _ in range(2)))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1)
        return F.cross_entropy(self.head(self.blocks(x)[:, 0]), y)


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.1):
        super().__init__()
        self.tokens, self.head = nn.Embedding(512, 128), nn.Linear(128, 10)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.layers(self.tokens(x)).mean(1)), y[:, 0] % 10)


class Losses(nn.Module):
    """Functions of autocast's lists that the others do not call."""

    def __init__(self):
        super().__init__()
        self.layer, self.weight = nn.Linear(64, 64), nn.Parameter(torch.ones(64))
        self.bilinear = nn.Bilinear(64, 64, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layer(x.flatten(1)[:, :64])
        z = torch.addcmul(h, h, self.weight) + h.exp().log1p() + h.pow(2) + h.norm(dim=1, keepdim=True) + h.norm()
        z = z + h.cumsum(1) + F.softplus(h) + h.prod(1, keepdim=True) + F.prelu(h, self.weight)
        z = z + F.softmax(h, -1, dtype=torch.float32) + torch.linalg.vector_norm(h, dim=1, keepdim=True)
        z = z + F.instance_norm(h[None])[0] + torch.cdist(h, h).sum() + F.cosine_similarity(h, z).mean()
        other = self.bilinear(h, x.flatten(1)[:, :64]).float().log_softmax(-1)
        return F.smooth_l1_loss(z, h) + F.kl_div(other, other.exp(), reduction="batchmean") + F.nll_loss(other, y % 8)


MODELS = {
    "gpt": (GPT, "tokens"),
    "gpt_dropout": (lambda: GPT(dropout=0.1), "tokens"),
    "bert": (lambda: GPT(causal=False, dropout=0.1), "tokens"),
    "llama": (Llama, "tokens"),
    "cnn": (CNN, "images"),
    "cnn_channels_last": (CNN, "channels_last"),
    "unet": (UNet, "images"),
    "vit": (ViT, "images"),
    "encoder": (Encoder, "tokens"),
    "losses": (Losses, "images"),
}


def batch_of(kind: str, device: torch.device) -> tuple[Tensor, Tensor]:
    if kind == "tokens":
        x, y = (torch.zeros(4, 96, dtype=torch.long, device=device) for _ in range(2))
        return x, y
    layout = torch.channels_last if kind == "channels_last" else torch.contiguous_format
    return torch.empty(4, 3, 64, 64, device=device).to(memory_format=layout), torch.zeros(
        4, dtype=torch.long, device=device
    )
