"""Any LightningModule is estimated: architectures and steps of all sorts, each held against its real step."""

import copy
import logging
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from support.any_modules import MODULES
from support.helpers import describe_module
from support.hf_models import MODELS
from torch import Tensor, nn

from lightning_vram.estimation import estimate_memory
from lightning_vram.estimation.traced_fit import FitRun, TracedFit, trace_fit, trace_real_fit

BATCH_SIZE = 4

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class LitModel(pl.LightningModule):
    """Trains a model of ``transformers``, and logs as people do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch)
        loss = output.get("loss")
        if loss is None:
            loss = sum(
                t.float().square().mean() for t in output.to_tuple() if isinstance(t, Tensor) and t.requires_grad
            )
        self.log("loss", loss, prog_bar=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch)[0].float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


# What differs on the host between a traced step and a real one, and by how much of the peak at most. With fake tensors
# transformers assumes a mask that hides something, and torch's own fake kernels return other tensors than the real
# ones in places.
ALIKE = {
    **{"bert": 0.0, "roberta": 0.002, "gpt2": 0.0, "llama": 0.02, "bart": 0.0, "swin": 0.01, "clip": 0.01},
    **{"detr": 0.0, "own average": 0.0, "bf16": 0.0, "lstm": 0.002},
}
# Steps that need values: they are run on real tensors, as test_real_steps.py has it.
NEED_VALUES = ("deberta", "lbfgs", "sparse")


def make_case(name: str) -> tuple[pl.LightningModule, Any, dict[str, Any]]:
    torch.manual_seed(0)
    if name in MODULES:
        make, make_batch, trainer = MODULES[name]
        return make(), make_batch(BATCH_SIZE), trainer
    make_model, make_batch = MODELS[name]
    return LitModel(make_model().train()), make_batch(BATCH_SIZE), {}


def events_of(traced: TracedFit) -> list[tuple[int, str]]:
    return [(event.change_bytes, event.phase) for event in traced.timeline.events]


def state_of_torch() -> tuple[Any, ...]:
    return (
        dict(Tensor.__dict__),
        torch.utils.swap_tensors,
        torch.Stream,
        dict(vars(torch.accelerator)),
        vars(dist).copy(),
    )


def state_of(module: pl.LightningModule) -> list[Any]:
    parts = [(dict(part._parameters), dict(part._buffers)) for part in module.modules()]
    return [describe_module(module), [list(map(id, named.values())) for pair in parts for named in pair]]


def check(name: str) -> None:
    module, batch, trainer = make_case(name)
    before, weights, torch_before = state_of(module), copy.deepcopy(module.state_dict()), state_of_torch()
    card = estimate_memory(module, batch, device="rtx4090", trainer=trainer, find_limits=False)
    assert state_of_torch() == torch_before
    assert not hasattr(torch, "lazy")
    assert not dist.is_initialized()
    assert state_of(module) == before
    assert all(torch.equal(value, weights[key]) for key, value in module.state_dict().items())
    assert card.fits
    assert set(card.stages) >= {"train", "validation"}
    assert card.batch_size == (0 if name == "list of samples" else BATCH_SIZE)  # columns or samples: nobody can tell
    assert not any("cannot be traced" in note for note in card.notes)
    fake, real = (trace(module, batch, FitRun(trainer)) for trace in (trace_fit, trace_real_fit))
    for stage in real.spans:
        peak_bytes = real.stage(stage).peak_bytes
        assert abs(fake.stage(stage).peak_bytes - peak_bytes) <= ALIKE.get(name, 0.0) * peak_bytes, stage
    assert name in ALIKE or events_of(fake) == events_of(real)


@pytest.mark.parametrize("name", ["cnn", "late with hooks", "gan", "skipping", "batch encoding", "metrics"])
def test_a_step_of_any_sort(name):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    check(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*MODULES, *MODELS} - {*NEED_VALUES}))
def test_every_architecture_as_its_real_step(name):
    check(name)


def test_enough_of_them():
    assert len({*MODULES, *MODELS}) >= 50
