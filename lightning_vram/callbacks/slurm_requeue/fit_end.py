"""What a trainer is left with when a fit has ended, which no checkpoint of Lightning's has."""

from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from lightning_vram.private_names.lightning.logging import update_metrics
from lightning_vram.private_names.lightning.loops import stop_restarting_all

_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def read_end(trainer: pl.Trainer) -> dict[str, Any]:
    """Return the metrics of this rank, on the host, and whether the fit was stopped early.

    Args:
        trainer: Whose fit has just ended.
    """
    metrics = {kind: {name: _on_host(value) for name, value in getattr(trainer, kind).items()} for kind in _METRICS}
    return metrics | {"should_stop": bool(trainer.should_stop)}


def restore_end(trainer: pl.Trainer, end: dict[str, Any]) -> None:
    """Give a trainer back what it was left with.

    Args:
        trainer: Whose fit was loaded at its end, and had nothing to do.
        end: From :func:`read_end`.
    """
    for kind in _METRICS:
        update_metrics(trainer, kind, end[kind])
    trainer.should_stop = end["should_stop"]


def end_loading(trainer: pl.Trainer) -> None:
    """Let loops forget that their state was loaded, as they do when they run.

    Args:
        trainer: Whose fit had nothing to do.
    """
    loop = trainer.fit_loop
    stop_restarting_all(loop)
    loop.on_iteration_done()


def _on_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
