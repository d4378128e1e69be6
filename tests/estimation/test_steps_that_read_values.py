"""Steps that read values of tensors are estimated, planned and run in less memory like any other.

All programs have the same blocks over ``[B, T, D]``, so that activations are most of what a step needs. What one reads
follows from its batch, or changes little from step to step.
"""

import re
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import scipy.optimize
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import assert_equal_weights
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_vram import AutoVRAM, VRAMMonitor
from lightning_vram.estimation import estimate_memory
from lightning_vram.estimation.traced_fit import FitRun, trace_real_fit
from lightning_vram.memory.units import parse_bytes

WIDTH, LENGTH, SIZE, NUM_CLASSES, NUM_BLOCKS = 64, 32, 32, 8, 6
Batch = dict[str, Tensor]


def make_batch(size: int = SIZE) -> Batch:
    """Make a batch, the same each time: about two thirds of its tokens are valid, a third of its samples is loud."""
    generator = torch.Generator().manual_seed(size)
    lengths = torch.randint(LENGTH // 3, LENGTH + 1, (size,), generator=generator)
    lengths[0] = LENGTH
    loudness = torch.where(torch.arange(size) % 3 == 0, 3.0, 0.5)
    return {
        "x": torch.randn(size, LENGTH, WIDTH, generator=generator) * loudness[:, None, None],
        "target": torch.randn(size, LENGTH, generator=generator),
        "label": torch.randint(1, NUM_CLASSES, (size, LENGTH), generator=generator),
        "lengths": lengths,
        "valid": torch.arange(LENGTH) < lengths[:, None],
    }


def make_graphs(size: int = SIZE) -> Batch:
    """Make as many graphs as one batch, whose nodes and edges have no dimension for samples."""
    batch = make_batch(size)
    graph, _ = batch["valid"].nonzero(as_tuple=True)
    edges = torch.randint(len(graph), (2, 4 * len(graph)), generator=torch.Generator().manual_seed(0))
    return {"x": batch["x"][batch["valid"]], "edges": edges, "graph": graph, "target": batch["target"][:, 0]}


class Block(nn.Module):
    """Saves 2 MiB for the backward of a whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Program(pl.LightningModule):
    """Blocks and a head. The programs write ``loss_of``, or the whole step."""

    num_outputs = NUM_CLASSES

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        self.head = nn.Linear(WIDTH, self.num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        return self.loss_of(**batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class MixtureOfExperts(nn.Module):
    """Sends each token to the expert that its router prefers."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.router(x).softmax(-1).max(-1)
        outputs = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            places = torch.where(chosen == number)
            outputs[places] = expert(x[places]) * gates[places].unsqueeze(-1)
        return x + outputs


class Experts(Program):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(MixtureOfExperts() for _ in range(4)))

    def loss_of(self, x: Tensor, label: Tensor, **_: Tensor) -> Tensor:
        return F.cross_entropy(self(x).flatten(0, 1), label.flatten())


class Graphs(Program):
    """Message passing, and a readout of as many graphs as the last node names."""

    num_outputs = 1

    def loss_of(self, x: Tensor, edges: Tensor, graph: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks[:3]:
            x = block(x) + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]] / 4)
        num_graphs = int(graph.max().item()) + 1
        sums = x.new_zeros(num_graphs, WIDTH).scatter_add(0, graph.unsqueeze(-1).expand_as(x), x)
        return F.mse_loss(self.head(sums).squeeze(-1), target)


class PackedSequences(Program):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def loss_of(self, x: Tensor, lengths: Tensor, label: Tensor, valid: Tensor, **_: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.blocks(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=LENGTH)
        return F.cross_entropy(self.head(outputs)[valid], label[valid])


class SpeechRecognition(Program):
    def loss_of(self, x: Tensor, label: Tensor, lengths: Tensor, **_: Tensor) -> Tensor:
        chances = self(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(chances, label[:, : LENGTH // 4], lengths, lengths // 4, zero_infinity=True)


class FixedPoint(Program):
    """Iterates one cell until its output changes no more, as equilibrium models do."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.Linear(WIDTH, WIDTH)

    def loss_of(self, x: Tensor, label: Tensor, **_: Tensor) -> Tensor:
        state, change = torch.zeros_like(x), float("inf")
        while change > 1e-2:
            last, state = state, torch.tanh(0.5 * self.cell(state) + x)
            change = (state - last).norm() / state.norm()
        return F.cross_entropy(self(state).flatten(0, 1), label.flatten())


class HungarianMatching(Program):
    """Assigns predictions to targets at the least cost, as DETR does."""

    num_outputs = 1

    def loss_of(self, x: Tensor, target: Tensor, lengths: Tensor, **_: Tensor) -> Tensor:
        outputs, losses = self(x).squeeze(-1), []
        for one, wanted, length in zip(outputs, target, lengths.tolist(), strict=True):
            costs = torch.cdist(one[:, None], wanted[:length, None])
            rows, columns = scipy.optimize.linear_sum_assignment(costs.detach().cpu().numpy())
            losses.append(F.l1_loss(one[torch.as_tensor(rows)], wanted[torch.as_tensor(columns)]))
        return torch.stack(losses).mean()


class ClippedByHand(Program):
    def loss_of(self, x: Tensor, label: Tensor, **_: Tensor) -> Tensor:
        return F.cross_entropy(self(x).flatten(0, 1), label.flatten())

    def configure_gradient_clipping(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        gradients = [parameter.grad for parameter in self.parameters()]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        if norm.item() > 0.1:
            for gradient in gradients:
                gradient.mul_(0.1 / norm)


PROGRAMS: dict[str, tuple[Callable[[], pl.LightningModule], Callable[..., Batch]]] = {
    "clipped by hand": (ClippedByHand, make_batch),
    "experts": (Experts, make_batch),
    "fixed point": (FixedPoint, make_batch),
    "graphs": (Graphs, make_graphs),
    "hungarian matching": (HungarianMatching, make_batch),
    "packed sequences": (PackedSequences, make_batch),
    "speech recognition": (SpeechRecognition, make_batch),
}


def make(name: str) -> tuple[pl.LightningModule, Batch]:
    make_module, make_batch = PROGRAMS[name]
    pl.seed_everything(0, verbose=False)
    return make_module(), make_batch()


@pytest.mark.slow_except("graphs")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_estimate_is_near_real_steps(name):
    real_bytes = trace_real_fit(*make(name), FitRun({})).stage("train").peak_bytes
    estimate = estimate_memory(*make(name), device="cpu", find_limits=False)
    assert abs(estimate.peak_bytes - real_bytes) <= 0.001 * real_bytes


@pytest.mark.filterwarnings("ignore:InPlaceFusion found nothing to save")  # a plan with checkpointed layers has it, too
@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_auto_vram_keeps_half_of_the_memory_or_the_minimum_that_it_names(name, fit, monkeypatch):
    # on a machine that is busy a search may last for longer than it is given
    monkeypatch.setattr("lightning_vram.callbacks.auto_vram.decision._LEAST_SECONDS", 3600.0)

    def make_module():
        module, batch = make(name)
        module.train_dataloader = lambda: DataLoader([batch] * 3, batch_size=None)
        return module

    def train(*callbacks):
        monitor = VRAMMonitor(track=True, path=None)
        return fit(make_module, *callbacks, monitor), monitor.peaks["train"].peak_allocated_bytes

    baseline, baseline_bytes = train()
    budget_bytes = baseline_bytes // 2
    try:
        optimized, peak_bytes = train(AutoVRAM(f"{budget_bytes}B"))  # that it cannot plan is an error here
    except MisconfigurationException as error:
        (minimum,) = re.findall(r"The minimum found is .*What helps: budget='(\S+)'", str(error))
        budget_bytes = parse_bytes(minimum)
        optimized, peak_bytes = train(AutoVRAM(f"{budget_bytes}B"))
    assert peak_bytes <= budget_bytes
    assert_equal_weights(baseline, optimized)
