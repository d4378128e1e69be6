"""Which device, and what a Trainer is told of it."""

import importlib
import sys
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.measure import accelerator_of

TESTS = Path(__file__).parents[2]


def open_device(name: str) -> torch.device:
    """Return the device called ``"cuda"``, ``"cpu"`` or ``"sim"``, ready for use.

    Raises:
        RuntimeError: If it is not there.
    """
    if name == "sim":
        sys.path.insert(0, str(TESTS))  # as pytest has it
        importlib.import_module("support.simdevice.trainer")  # a compiler builds it
    if name == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("There is no CUDA device: --device cpu, or --dry-run.")
    return torch.device(name) if name == "cpu" else torch.device(name, 0)


def trainer_options(device: torch.device) -> dict[str, Any]:
    """Return a Trainer's arguments: one quiet device."""
    return {
        "accelerator": accelerator_of(device),
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }
