"""Train cases on the device, and estimate the same: a process for each, whose allocator holds nothing else."""

import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_vram.estimation import estimate_memory
from lightning_vram.memory.estimate.device_spec import DeviceSpec, describe_this_device
from tests.benchmarks.estimates.cases import CASES
from tests.benchmarks.measure import Row, describe_error
from tests.benchmarks.whole_runs import Same, trainer_options

NUM_STEPS = 4  # parts look at the first and prove the second; from the third on all is as it stays
_STATISTICS = ("requested", "allocated", "reserved")


def measure_all(names: Iterable[str], *, has_cudnn: bool = True) -> Iterator[Row]:
    """Make a row of each case, errors among them.

    Args:
        names: In :data:`CASES`.
        has_cudnn: Whether convolutions may use cuDNN, whose workspaces nobody can foretell.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imported once
    for name in names:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            yield pool.submit(compare, name, has_cudnn).result()


def compare(name: str, has_cudnn: bool) -> Row:
    """Train a case in this process, which has not used the device before, and estimate it."""
    try:
        with warnings.catch_warnings(), torch.backends.cudnn.flags(enabled=has_cudnn):
            warnings.simplefilter("ignore")
            steps = train(name)
            return {"name": name, **summarize(steps, estimate(name, describe_this_device())), "all_steps": steps}
    except Exception as error:
        return {"name": name, **describe_error(error)}


def train(name: str) -> list[Row]:
    """Return the allocator's peaks of each step."""
    case = CASES[name]
    options = case.make_options()
    peaks = _Peaks()
    num_batches = NUM_STEPS * options.get("accumulate_grad_batches", 1)
    trainer = pl.Trainer(**trainer_options(torch.device("cuda", 0)), **options, max_epochs=1)
    trainer.callbacks.append(peaks)  # after all others
    trainer.fit(case.make_module(), DataLoader(Same(case.model.make_batch(), num_batches), batch_size=None))
    return peaks.steps


def estimate(name: str, device: DeviceSpec) -> Row:
    """Return what is said of the same, of the first step and of later ones."""
    case = CASES[name]
    found = estimate_memory(
        case.make_module(), case.model.make_batch(), device=device, trainer=case.make_options(), find_limits=False
    )
    first, step = found.stages["first step"], found.stages["train"]
    return {
        "first_allocated_bytes": first.allocated_bytes,
        "allocated_bytes": step.allocated_bytes,
        "reserved_bytes": step.reserved_bytes,
        "live_bytes": step.timeline.peak_bytes,
    }


def summarize(steps: list[Row], estimated: Row) -> Row:
    """Hold peaks of a run against their estimate."""
    measured = {
        "first_allocated_bytes": steps[0]["allocated_bytes"],
        "allocated_bytes": max(step["allocated_bytes"] for step in steps[1:]),
        "reserved_bytes": steps[-1]["reserved_bytes"],
    }
    errors = {name.replace("bytes", "error"): estimated[name] / measured[name] - 1 for name in measured}
    return {**measured, **{f"estimated_{name}": number for name, number in estimated.items()}, **errors}


class _Peaks(Callback):
    """Reads the allocator's peaks at the end of each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[Row] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step > len(self.steps):
            torch.cuda.synchronize()
            statistics = torch.cuda.memory_stats()
            self.steps.append({f"{name}_bytes": statistics[f"{name}_bytes.all.peak"] for name in _STATISTICS})
            torch.cuda.reset_peak_memory_stats()
