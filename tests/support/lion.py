"""Lion as its paper has it (Chen et al., 2023); torch.optim has none."""

from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """One number for each weight."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * average.lerp(p.grad, 1 - first).sign_())
                average.lerp_(p.grad, 1 - second)
        return loss
