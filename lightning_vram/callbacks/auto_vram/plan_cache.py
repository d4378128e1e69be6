"""Plans of earlier runs, in the folder of logs: a run whose step is like that of one of them takes its plan.

The name of a file is a hash of the traced step, memory and time, and of what else decides on a plan. Free memory is
not part of it, since it varies from run to run.
"""

import hashlib
import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_vram.estimation.fake_trainer import parts_of
from lightning_vram.estimation.running_trainer import RunningTrainer
from lightning_vram.estimation.step_time import StepTime
from lightning_vram.memory.device.accelerators import can_limit, total_bytes
from lightning_vram.planner.scheme import Exactness, Found, Measured, Part, Scheme
from lightning_vram.version import __version__

_OURS = "lightning_vram."
_MORE_BUDGET = 1.1  # times the budget that a plan was made for: with more, a faster plan may fit


def plan_folder(trainer: pl.Trainer) -> Path | None:
    """Return the folder of plans, next to those of runs; ``None`` if it is remote, or the run writes nothing."""
    folders = (logger.save_dir for logger in trainer.loggers)
    root = str(next(filter(None, folders), trainer.default_root_dir))
    return None if "://" in root or trainer.fast_dev_run else Path(root) / "auto_vram"  # type: ignore[attr-defined]


def plan_key(run: RunningTrainer, plain: Measured, asked: tuple[Any, ...]) -> str:
    """Hash the traced step, and what else decides on a plan; ``asked`` are the user's arguments."""
    device = torch.device(run.device.name)
    name = getattr(torch.get_device_module(device), "get_device_name", str)(device)
    parts = (
        asdict(plain),
        asked,
        (name, total_bytes(device) if can_limit(device) else 0, run.fit.num_ranks, run.num_devices),
        [(name, str(one.dtype), one.requires_grad) for name, one in run.module.named_parameters()],
        {
            kind: [type(one).__name__ for one in some]
            for kind, some in parts_of(run.fit.trainer_arguments, run.fit.run_callbacks).items()
        },
        (__version__, torch.__version__, version("lightning"), platform.python_version(), torch.version.cuda),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@contextmanager
def _errors_cost_only_cache(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        text = str(error).partition("\n")[0]
        rank_zero_info(f"AutoVRAM: cached plans are not used, {path}: {type(error).__name__}: {text}.")


def load_plan(path: Path | None, budget_bytes: int) -> Found | None:
    """Return the plan of an earlier run; ``None`` if there is none for this budget."""
    found = None
    if path is not None and path.is_file():
        with _errors_cost_only_cache(path):
            saved = json.loads(path.read_text(encoding="utf-8"))
            tried = tuple(map(_read_measured, saved["tried"]))
            if tried[saved["best"]].needed_bytes <= budget_bytes <= _MORE_BUDGET * saved["budget_bytes"]:
                found = Found(tried[saved["best"]], tried[saved["plain"]], tried)
    return found


def save_plan(path: Path | None, found: Found, budget_bytes: int) -> None:
    """Write a plan, whole or not at all."""
    if path is None:
        return
    with _errors_cost_only_cache(path):
        places = {"best": found.tried.index(found.taken), "plain": found.tried.index(found.plain)}
        text = json.dumps({"budget_bytes": budget_bytes, **places, "tried": list(map(asdict, found.tried))}, indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)


def _read_measured(saved: dict[str, Any]) -> Measured:
    scheme = Scheme(tuple(map(_read_part, saved["scheme"]["parts"])))
    return Measured(**{**saved, "scheme": scheme, "time": _read_time(saved["time"])})


def _read_part(saved: dict[str, Any]) -> Part:
    if not saved["class_path"].startswith(_OURS):  # a file of plans must not run other code
        raise ValueError(f"{saved['class_path']!r} is not a class of lightning_vram")
    return Part(**{**saved, "exactness": Exactness(saved["exactness"]), "replaces": tuple(saved["replaces"])})


def _read_time(saved: dict[str, Any]) -> StepTime:
    return StepTime(**{**saved, "backward": saved["backward"] and _read_time(saved["backward"])})
