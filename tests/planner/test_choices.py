"""Each part that a plan may choose, where it is what makes a run fit; a real run then takes what was told."""

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_vram import DeviceSpec, plan_memory
from lightning_vram.core.tensors import native_codecs
from lightning_vram.demos import GPT
from lightning_vram.estimation.traced_fit import FitRun, trace_real_fit
from lightning_vram.memory.units import GIB, KIB, MIB

CARD = DeviceSpec("card", 8 * GIB, bandwidth_bytes_per_s=1e12, flops_per_s={"fp32": 2e13}, bus_bytes_per_s=2e10)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


class Trained(pl.LightningModule):
    net: nn.Module

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in self.parameters() if one.requires_grad])


class Vocabulary(Trained):
    """Logits are most of it: 8 MiB, and three times as much in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = GPT(4096, 1, 32, 2, 64, 0.0)

    def training_step(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self.net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class Wide(Trained):
    """Weights, gradients and states are most of it: 2 MiB, and 8 in all."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))


class Frozen(Trained):
    """Frozen weights are most of it: 64 MiB."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.net = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)), nn.Linear(2048, 8))
        self.net[:-1].requires_grad_(False)


CASES = {
    "logits": (Vocabulary, torch.zeros(8, 65, dtype=torch.int64), "cpu"),
    "gradients": (Wide, torch.zeros(4, 256), "cpu"),
    "frozen": (Frozen, torch.zeros(4, 2048), CARD),
}


@pytest.mark.quick_sample(1)
@pytest.mark.parametrize(
    ("case", "budget", "allow", "chosen", "note"),
    [
        ("logits", 20, "lossless", "ChunkedLoss", "# Computes logits and loss in chunks of tokens."),
        (
            "gradients",
            5,
            "any",
            "OptimizerInBackward + LowBitOptimizer(bits=4)",
            "# Stores optimizer moments in 4 bits.",
        ),
        (
            "frozen",
            560,
            "any",
            "QuantizeFrozenWeights(bits=8)",
            "# Quantizes frozen weights to 8 bits.",
        ),
    ],
)
def test_it_makes_a_run_fit_and_is_left_out_where_it_need_not(case, budget, allow, chosen, note, monkeypatch):
    monkeypatch.setattr(native_codecs, "_ask", lambda count: None)  # steps in C take less than was told
    make, batch, device = CASES[case]
    plan = plan_memory(make(), batch, device=device, budget=budget * MIB, allow=allow)
    assert str(plan.best.scheme) == chosen
    assert note in plan.to_yaml()
    plain = plan.found.plain.needed_bytes
    assert not plan_memory(make(), batch, device=device, budget=plain, allow=allow).is_needed
    if device == "cpu":
        real = trace_real_fit(make(), batch, FitRun(plan.trainer_kwargs())).timeline.peak_bytes
        assert plan.peak_bytes == real + 64 * KIB + int(0.001 * real)  # what only tensors with values keep
