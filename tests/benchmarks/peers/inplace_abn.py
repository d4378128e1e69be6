"""``InPlaceABN``: norm and activation in one, of which the backward needs the result alone.

It has no ReLU; what its pages put in place of one, a leaky ReLU, makes it another network. Bottlenecks are put together
as its own ResNet has them. Its source wants ``setuptools_scm`` and PyTorch to be there when it is installed.
"""

import importlib
from functools import partial
from typing import Any

from torch import Tensor, nn

from tests.benchmarks.peers.installed import needs
from tests.benchmarks.ways import Way

MODULE, PIP = "inplace_abn", "--no-build-isolation inplace-abn"


def _fuse(norm: nn.BatchNorm2d, activation: str = "leaky_relu") -> nn.Module:
    module: Any = importlib.import_module(MODULE)
    fused = module.InPlaceABN(norm.num_features, norm.eps, norm.momentum, activation=activation)
    fused.load_state_dict(norm.state_dict())
    return fused.to(norm.weight.device)


def _fuse_last(stage: nn.Sequential, activation: str = "leaky_relu") -> None:
    stage[-1] = _fuse(stage[-1], activation)


def _forward(block: nn.Module, images: Tensor) -> Tensor:
    hidden = block.bn2(block.conv2(block.bn1(block.conv1(images))))
    return block.relu(block.bn3(block.conv3(hidden)) + block.shortcut(images))


def _forward_of_stages(block: nn.Module, images: Tensor) -> Tensor:
    return block.relu(block.expand(block.conv(block.reduce(images))) + block.shortcut(images))


def _convert(model: nn.Module) -> None:
    for module in list(model.modules()):
        if isinstance(module, nn.Sequential):
            for index in range(len(module) - 1):
                if isinstance(module[index], nn.BatchNorm2d) and isinstance(module[index + 1], nn.ReLU):
                    module[index], module[index + 1] = _fuse(module[index]), nn.Identity()
        elif all(hasattr(module, name) for name in ("bn1", "bn2", "bn3", "relu", "shortcut")):
            module.bn1, module.bn2 = _fuse(module.bn1), _fuse(module.bn2)
            module.bn3 = _fuse(module.bn3, "identity")
            module.forward = partial(_forward, module)
        elif all(hasattr(module, name) for name in ("reduce", "conv", "expand", "relu", "shortcut")):
            _fuse_last(module.reduce)
            _fuse_last(module.conv)
            _fuse_last(module.expand, "identity")
            module.forward = partial(_forward_of_stages, module)


_why_not = needs(MODULE, PIP, devices=("cpu", "cuda"))
ACTIVATIONS = (Way("InPlaceABN, leaky ReLU", "inplace_abn", _convert, why_not=_why_not, pip=PIP),)
