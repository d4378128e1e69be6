"""A few training steps of each part, compared with the plain run on the same device."""

import os
import tempfile
import time
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_vram.core.processes import leave_group
from lightning_vram.demos import ByteGPT, DigitsResNet
from tests.benchmarks.gpu_day import parts
from tests.benchmarks.gpu_day.items import Item, Setting
from tests.benchmarks.gpu_day.parts import REFERENCES, Options, Part
from tests.benchmarks.gpu_day.results import Report
from tests.benchmarks.measure import Row, give_back, read_peaks
from tests.benchmarks.whole_runs import trainer_options

NUM_STEPS = 4  # parts look at the first, prove the second; two are as all later ones
Weights = dict[str, Tensor]


class _LitGPT(ByteGPT):
    """An optimizer whose kernel is named: then sharded weights are equal to the bit."""

    def __init__(self, *, is_tiny: bool, dropout: float = 0.1) -> None:
        num_layers, width, length = (2, 32, 32) if is_tiny else (4, 256, 256)
        super().__init__(num_layers, width, 4, length, dropout=dropout)
        self.tokens = torch.randint(256, (4 * NUM_STEPS, length + 1))

    validation_step = pl.LightningModule.validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-3, fused=True)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.tokens, batch_size=4)


class _LitResNet(DigitsResNet):
    def __init__(self, *, is_tiny: bool) -> None:
        super().__init__((2,) if is_tiny else (2, 2), 4 if is_tiny else 32)
        pixels = 8 if is_tiny else 32
        self.images = torch.randn(4 * NUM_STEPS, 1, pixels, pixels)
        self.labels = torch.randint(10, (4 * NUM_STEPS,))

    validation_step = pl.LightningModule.validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-3, fused=True)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.utils.data.TensorDataset(self.images, self.labels), batch_size=4)


_MODELS = {"gpt": _LitGPT, "gpt without dropout": partial(_LitGPT, dropout=0.0), "images": _LitResNet}


def _train(model_name: str, setting: Setting, options: Options) -> Weights:
    """Train from scratch; return the weights on the host."""
    pl.seed_everything(0, verbose=False)
    model = _make(model_name, setting)
    give_back(setting.device)
    fixed = {**trainer_options(setting.device), "max_steps": NUM_STEPS, "max_epochs": 1}
    # torch's attention stays random in its backward where it only warns
    fixed["deterministic"] = True if setting.device.type == "cuda" else "warn"
    try:
        pl.Trainer(**{**fixed, **options}).fit(model)
    finally:
        if torch.distributed.is_initialized():  # it may stay for the next fit
            leave_group()
        os.environ.pop("MASTER_PORT", None)  # another may have taken it by the next fit
    return _weights_of(model)


def _make(model_name: str, setting: Setting) -> pl.LightningModule:
    model = _MODELS[model_name](is_tiny=setting.is_tiny)
    parts.initialize(model)
    return model


def _weights_of(model: pl.LightningModule) -> Weights:
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


@cache
def _initial(model_name: str, setting: Setting) -> Weights:
    pl.seed_everything(0, verbose=False)
    return _weights_of(_make(model_name, setting))


@cache
def _reference(model_name: str, setting: Setting, name: str) -> Weights:
    with tempfile.TemporaryDirectory() as folder:
        return _train(model_name, setting, REFERENCES[name](setting.device, Path(folder)))


@cache
def _control(model_name: str, setting: Setting, name: str) -> float:
    """How far a reference is from itself when it is run twice: 0 where kernels are deterministic."""
    expected = _reference(model_name, setting, name)
    with tempfile.TemporaryDirectory() as folder:
        again = _train(model_name, setting, REFERENCES[name](setting.device, Path(folder)))
    return _relative_difference(again, expected, _initial(model_name, setting))


def compare(part: Part, model_name: str, setting: Setting) -> Row:
    """Train with ``part`` and its reference; where the reference differs from itself, rounding is allowed."""
    control = _control(model_name, setting, part.reference)
    expected = _reference(model_name, setting, part.reference)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        actual = _train(model_name, setting, part.make(setting.device, Path(folder)))
    seconds = time.perf_counter() - start
    difference = _relative_difference(actual, expected, _initial(model_name, setting))
    is_equal = list(actual) == list(expected) and all(torch.equal(actual[name], expected[name]) for name in expected)
    return {
        "reference": part.reference,
        "is_equal": is_equal,
        "relative_difference": difference,
        "tolerance": part.tolerance,
        "control_difference": control,
        "is_met": is_equal if part.tolerance == control == 0 else difference <= max(part.tolerance, 10 * control),
        "seconds": round(seconds, 3),
        **read_peaks(setting.device),
    }


def _relative_difference(actual: Weights, expected: Weights, initial: Weights) -> float:
    """Norm of the difference, in norms of what training has changed; NaN where a weight is."""
    floats = [name for name, tensor in expected.items() if tensor.is_floating_point()]
    apart = torch.stack([(actual[name].double() - expected[name].double()).norm() for name in floats]).norm()
    moved = torch.stack([(expected[name].double() - initial[name].double()).norm() for name in floats]).norm()
    return (apart / moved).item()


def run(setting: Setting, report: Report, *, model_name: str, chosen: Sequence[Part]) -> None:
    """Add a row for each part."""
    # with TF32 a difference in the last bit of a weight becomes one of a thousandth
    torch.backends.cudnn.allow_tf32 = False
    for part in chosen:
        report.attempt(part.name, partial(compare, part, model_name, setting))


ITEMS = tuple(
    Item(f"smoke.{name}", seconds, partial(run, model_name=model, chosen=chosen), row_seconds=60, shares=True)
    for name, seconds, model, chosen in (
        ("callbacks", 30, "gpt", parts.CALLBACKS),
        ("strategies", 15, "gpt", parts.STRATEGIES),
        ("precisions", 15, "gpt", parts.PRECISIONS),
        ("parameters", 15, "gpt without dropout", parts.PARAMETERS),
        ("combinations", 15, "gpt", parts.COMBINATIONS),
        ("images", 15, "images", parts.IMAGES),
    )
)
