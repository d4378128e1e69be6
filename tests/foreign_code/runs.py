"""Run a program with and without a part, and compare all that its owner can see."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

Program = Callable[[], pl.LightningModule]


class Memo(Logger):
    """Keeps what is logged."""

    name, version = "memo", 0

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, float]]] = []

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        ours = ("vram/",)  # of the parts themselves
        theirs = {name: value for name, value in metrics.items() if not name.startswith(ours)}
        if theirs.keys() - {"epoch"}:
            self.lines.append((step, theirs))


@dataclass
class Result:
    weights: dict[str, Tensor]
    logged: list[tuple[int | None, dict[str, float]]]
    program: pl.LightningModule


def make_trainer(*callbacks: pl.Callback, **arguments: Any) -> pl.Trainer:
    defaults = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "log_every_n_steps": 1,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "logger": Memo(),
    }
    return pl.Trainer(callbacks=list(callbacks), **(defaults | arguments))


def fit(make_program: Program, *callbacks: pl.Callback, **arguments: Any) -> Result:
    """Fit from a fixed seed; the data come from it as well."""
    trainer = make_trainer(*callbacks, **arguments)
    pl.seed_everything(0, verbose=False)
    program = make_program()
    trainer.fit(program)
    return read_result(trainer, program)


def read_result(trainer: pl.Trainer, program: pl.LightningModule) -> Result:
    weights = {name: value.detach().clone() for name, value in program.state_dict().items()}
    return Result(weights, trainer.logger.lines if isinstance(trainer.logger, Memo) else [], program)


@cache
def _fit_plain(make_program: Program, arguments: tuple[tuple[str, Any], ...]) -> Result:
    return fit(make_program, **dict(arguments))


def fit_plain(make_program: Program, **arguments: Any) -> Result:
    """Fit without any part; the same run is made once."""
    return copy.copy(_fit_plain(make_program, tuple(sorted(arguments.items()))))


def assert_same(actual: Result, expected: Result) -> None:
    """To the bit: weights, buffers, and every value that was logged."""
    assert actual.weights.keys() == expected.weights.keys()
    assert [name for name, value in actual.weights.items() if not torch.equal(value, expected.weights[name])] == []
    assert actual.logged == expected.logged
    assert expected.logged


def assert_close(actual: Result, expected: Result, tolerance: float) -> None:
    """Up to rounding."""
    assert actual.weights.keys() == expected.weights.keys()
    for name, value in actual.weights.items():
        torch.testing.assert_close(value, expected.weights[name], rtol=tolerance, atol=tolerance, msg=name)
    assert [(step, list(values)) for step, values in actual.logged] == [
        (step, list(values)) for step, values in expected.logged
    ]
    for (_, values), (_, plain) in zip(actual.logged, expected.logged, strict=True):
        assert values == pytest.approx(plain, rel=tolerance, abs=tolerance)
