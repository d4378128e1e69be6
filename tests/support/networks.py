"""Well-known networks, as their papers define them, with random weights: what memory claims are measured on.

Affine parameters of norms are random: at their initial values a recomputation that is merely close looks exact.
"""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def conv_norm(
    num_in: int, num_out: int, kernel: int = 1, stride: int = 1, groups: int = 1, *then: nn.Module
) -> nn.Sequential:
    """Convolution without bias, batch norm, and what comes then."""
    conv = nn.Conv2d(num_in, num_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(num_out), *then)


class Bottleneck(nn.Module):
    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        num_out = 4 * width
        self.reduce = conv_norm(num_in, width)
        self.conv = conv_norm(width, width, 3, stride)
        self.expand = conv_norm(width, num_out)
        self.shortcut = conv_norm(num_in, num_out, 1, stride) if stride != 1 or num_in != num_out else nn.Identity()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.conv(self.relu(self.reduce(x))))
        return self.relu(self.expand(y) + self.shortcut(x))


class Head(nn.Module):
    def __init__(self, num_in: int, num_classes: int = 1000) -> None:
        super().__init__()
        self.linear = nn.Linear(num_in, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))


def resnet50() -> nn.Module:
    stem = [*conv_norm(3, 64, 7, 2, 1, nn.ReLU()), nn.MaxPool2d(3, 2, 1)]
    blocks, num_in = [], 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            blocks.append(Bottleneck(num_in, width, stride if index == 0 else 1))
            num_in = 4 * width
    return nn.Sequential(*stem, *blocks, Head(2048))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(width, squeezed, 1), nn.Conv2d(squeezed, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.expand(F.silu(self.reduce(x.mean((2, 3), keepdim=True)))).sigmoid()


class InvertedResidual(nn.Module):
    def __init__(
        self, num_in: int, num_out: int, stride: int, expansion: int, *, kernel: int = 3, is_efficient: bool = False
    ) -> None:
        super().__init__()
        width = num_in * expansion
        act: Callable[[], nn.Module] = nn.SiLU if is_efficient else nn.ReLU6
        layers: list[nn.Module] = [*conv_norm(num_in, width, 1, 1, 1, act())] if expansion != 1 else []
        layers += conv_norm(width, width, kernel, stride, width, act())
        if is_efficient:
            layers.append(SqueezeExcite(width, num_in // 4))
        self.layers = nn.Sequential(*layers, *conv_norm(width, num_out))
        self.has_shortcut = stride == 1 and num_in == num_out

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.has_shortcut else self.layers(x)


def _inverted_residuals(
    settings: Iterable[tuple[int, int, int, int, int]], act: Callable[[], nn.Module], *, is_efficient: bool
) -> nn.Module:
    layers, num_in = [*conv_norm(3, 32, 3, 2, 1, act())], 32
    for expansion, num_out, count, stride, kernel in settings:
        for index in range(count):
            step = stride if index == 0 else 1
            layers.append(InvertedResidual(num_in, num_out, step, expansion, kernel=kernel, is_efficient=is_efficient))
            num_in = num_out
    return nn.Sequential(*layers, *conv_norm(320, 1280, 1, 1, 1, act()), Head(1280))


def mobilenetv2() -> nn.Module:
    expansions, widths, counts = (1, 6, 6, 6, 6, 6, 6), (16, 24, 32, 64, 96, 160, 320), (1, 2, 3, 4, 3, 3, 1)
    settings = zip(expansions, widths, counts, (1, 2, 2, 2, 1, 2, 1), (3,) * 7, strict=True)
    return _inverted_residuals(settings, nn.ReLU6, is_efficient=False)


def efficientnet_b0() -> nn.Module:
    expansions, widths, counts = (1, 6, 6, 6, 6, 6, 6), (16, 24, 40, 80, 112, 192, 320), (1, 2, 2, 3, 3, 4, 1)
    settings = zip(expansions, widths, counts, (1, 2, 2, 2, 1, 2, 1), (3, 3, 5, 3, 5, 5, 3), strict=True)
    return _inverted_residuals(settings, nn.SiLU, is_efficient=True)


class DenseLayer(nn.Module):
    def __init__(self, num_in: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(num_in), nn.Conv2d(num_in, 128, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(128), nn.Conv2d(128, 32, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.conv1(F.relu(self.norm1(torch.cat(features, 1)), inplace=True))
        return self.conv2(F.relu(self.norm2(x), inplace=True))


class DenseBlock(nn.Module):
    def __init__(self, num_in: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DenseLayer(num_in + 32 * index) for index in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


def densenet121() -> nn.Module:
    layers: list[nn.Module] = [*conv_norm(3, 64, 7, 2, 1, nn.ReLU()), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for count in (6, 12, 24, 16):
        layers.append(DenseBlock(width, count))
        width += 32 * count
        layers += [nn.BatchNorm2d(width), nn.ReLU()]
        if count != 16:
            layers += [nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            width //= 2
    return nn.Sequential(*layers, Head(width))


class UNet(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth)]
        self.down = nn.ModuleList([self.double(3 if i == 0 else widths[i - 1], widths[i]) for i in range(depth)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(widths[i], widths[i - 1], 2, 2) for i in range(depth - 1, 0, -1)])
        self.merge = nn.ModuleList([self.double(2 * widths[i - 1], widths[i - 1]) for i in range(depth - 1, 0, -1)])
        self.head = nn.Conv2d(width, 4, 1)

    @staticmethod
    def double(num_in: int, num_out: int) -> nn.Sequential:
        return nn.Sequential(
            *conv_norm(num_in, num_out, 3, 1, 1, nn.ReLU()), *conv_norm(num_out, num_out, 3, 1, 1, nn.ReLU())
        )

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for index, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if index else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = merge(torch.cat([skip, up(x)], 1))
        return self.head(x)


def vgg13_bn() -> nn.Module:
    layers: list[nn.Module] = []
    num_in = 3
    for width in (64, 128, 256, 512, 512):
        for _ in range(2):
            layers += [nn.Conv2d(num_in, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            num_in = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Linear(512 * 16, 512), nn.ReLU(), nn.Dropout(), nn.Linear(512, 512), nn.ReLU(), nn.Dropout()]
    return nn.Sequential(*layers, nn.Flatten(), *head, nn.Linear(512, 1000))


class ChannelNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.fc1, self.fc2 = (
            nn.LayerNorm(width, 1e-6),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.scale = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.fc2(F.gelu(self.fc1(y)))
        return x + (y * self.scale).permute(0, 3, 1, 2)


def convnext_tiny() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ChannelNorm(96, 1e-6)]
    width = 96
    for count, num_out in ((3, 96), (3, 192), (9, 384), (3, 768)):
        if num_out != width:
            layers += [ChannelNorm(width, 1e-6), nn.Conv2d(width, num_out, 2, 2)]
            width = num_out
        layers += [ConvNeXtBlock(width) for _ in range(count)]
    return nn.Sequential(*layers, Head(width))


class ViTBlock(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width)
        x = x + self.project(y)
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    """ViT-S/16 on images of 128 pixels, six blocks by default, as the table of measurements has it."""

    def __init__(self, width: int = 384, num_blocks: int = 6, num_heads: int = 6, pixels: int = 128) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 1 + (pixels // 16) ** 2, width))
        self.blocks = nn.Sequential(*[ViTBlock(width, num_heads) for _ in range(num_blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class Llama(nn.Module):
    """The model of ``transformers``, small: RMSNorm in Python, rotary embedding, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            vocab_size=512,
            attn_implementation="sdpa",
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, use_cache=False).logits


def _images() -> Tensor:
    return torch.randn(4, 3, 128, 128)


def _tokens() -> Tensor:
    return torch.randint(0, 512, (4, 256))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "resnet50": (resnet50, _images),
    "mobilenetv2": (mobilenetv2, _images),
    "efficientnet_b0": (efficientnet_b0, _images),
    "densenet121": (densenet121, _images),
    "unet": (UNet, _images),
    "vgg13_bn": (vgg13_bn, _images),
    "convnext_tiny": (convnext_tiny, _images),
    "vit_small": (ViT, _images),
    "llama": (Llama, _tokens),
}


def make_network(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    make, make_input = NETWORKS[name]
    network = make().train()
    for module in network.modules():
        if "Norm" in type(module).__name__:
            for parameter, mean in ((getattr(module, "weight", None), 1.0), (getattr(module, "bias", None), 0.0)):
                if parameter is not None:
                    nn.init.normal_(parameter, mean, 0.3)
    return network, make_input()
