"""A way to train a workload: plain, by a part of this package, or as a peer does it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from tests.benchmarks.cases import Workload

Suite = Literal["memory", "speed", "offload", "estimate", "plan", "optimizers", "precision", "batches", "frozen"]


def _leave(model: nn.Module) -> None:
    """Change nothing."""


def _adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _runs_anywhere(device: torch.device) -> None:
    """Nothing speaks against it."""


@dataclass(frozen=True)
class Way:
    """How a workload is trained.

    Args:
        name: Text for tables and pictures, as a user would write it: ``ActivationCheckpointing()``.
        by: ``plain``, ``ours``, or the library that a peer comes from: ``PyTorch``, ``torchtune``.
        change: Changes a model before its first step; a context manager that it returns is entered for every forward.
        make_optimizer: Of the parameters; AdamW as it is by default.
        make_trainer_options: What a Trainer is made with, for ways that only whole runs of a Trainer can go. ``None``:
            a loop of forward, backward and step is enough.
        why_not: Why it cannot run on a device, in one line that names the way out, or ``None`` where it can: what is
            not installed (``not installed: pip install torchao``), what needs a GPU. It becomes a row.
        pip: What has to be installed, as ``pip install`` takes it; empty where PyTorch or Lightning have it.
        is_trackable: Whether the tracker sees its tensors; compiled code allocates behind its back.
        steps_in_backward: Whether the optimizer has to know when its backward begins: that is its closure then.
    """

    name: str
    by: str
    change: Callable[[nn.Module], object] = _leave
    make_optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = _adamw
    make_trainer_options: Callable[[Workload], dict[str, Any]] | None = None
    why_not: Callable[[torch.device], str | None] = _runs_anywhere
    pip: str = ""
    is_trackable: bool = True
    steps_in_backward: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether only a whole run of a Trainer can go it."""
        return self.make_trainer_options is not None


PLAIN = Way("plain", "plain")
PLAIN_TRAINER = Way("plain, in a Trainer", "plain", make_trainer_options=lambda workload: {})


def with_callbacks(name: str, make: Callable[[], list[Any]], by: str = "ours") -> Way:
    """A way of a Trainer that has these callbacks, made anew for each run."""
    return Way(name, by, make_trainer_options=lambda workload: {"callbacks": make()})
