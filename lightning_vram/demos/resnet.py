"""A bottleneck ResNet for small images."""

from collections.abc import Sequence

from torch import Tensor, nn

EXPANSION = 4


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut: [B, C, H, W] -> [B, 4 width, H / stride, W / stride]."""

    def __init__(self, in_channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = EXPANSION * width
        self.conv1 = nn.Conv2d(in_channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or in_channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, 1, stride, bias=False), nn.BatchNorm2d(out_channels)
            )

    def forward(self, images: Tensor) -> Tensor:
        """Add the three convolutions to the shortcut."""
        hidden = self.relu(self.bn1(self.conv1(images)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        out: Tensor = self.relu(self.bn3(self.conv3(hidden)) + self.shortcut(images))
        return out


class ResNet(nn.Module):
    """He et al. 2015, https://arxiv.org/abs/1512.03385: images [B, in_channels, H, W] -> logits [B, num_classes].

    Each stage after the first halves H and W, and doubles the channels.
    """

    def __init__(self, blocks_per_stage: Sequence[int], width: int, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(in_channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        stages, channels = [], width
        for stage, num_blocks in enumerate(blocks_per_stage):
            inner = width * 2**stage
            strides = [1 if stage == 0 else 2] + [1] * (num_blocks - 1)
            inputs = [channels] + [EXPANSION * inner] * (num_blocks - 1)
            stages.append(nn.Sequential(*(Bottleneck(i, inner, s) for i, s in zip(inputs, strides, strict=True))))
            channels = EXPANSION * inner
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Classify."""
        logits: Tensor = self.head(self.pool(self.stages(self.stem(images))).flatten(1))
        return logits
