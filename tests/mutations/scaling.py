"""Loss scaling where the loss is on the host, and gradients are on the device."""

import torch
from support.devices import DEVICE
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from lightning_vram.techniques.mixed_precision.loss_scaling import LossScaling


def overflow_with_the_scale_on_the_host() -> list[Tensor]:
    weight = nn.Parameter(torch.ones(2, device=DEVICE))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaling = LossScaling(GradScaler(DEVICE, init_scale=8.0), [optimizer])
    scaling.scale((weight * float("inf")).sum().cpu()).backward()
    scaling.step(optimizer)
    return [torch.tensor(scaling.num_overflowed), weight.detach().cpu()]
