"""What a fit of the command leaves to be told: peaks, time, weights, the picture of a step."""

from pathlib import Path

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningCLI

from lightning_vram.callbacks.auto_vram import AutoVRAM
from lightning_vram.callbacks.vram_monitor import VRAMMonitor
from lightning_vram.report.comparison import FitResult
from lightning_vram.report.measured_step import write_step


def find_monitor(cli: LightningCLI) -> VRAMMonitor | None:
    """Return the monitor among the callbacks."""
    callbacks: list[Callback] = cli.trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, VRAMMonitor)), None)


def draw_step(cli: LightningCLI) -> Path | None:
    """Draw the step that was tracked, beside the file of the monitor."""
    monitor = find_monitor(cli)
    if monitor is None or monitor.path is None or monitor.timeline is None or cli.trainer.global_rank:
        return None
    auto = next((callback for callback in cli.trainer.callbacks if isinstance(callback, AutoVRAM)), None)  # type: ignore[attr-defined]
    batch_size = getattr(cli.trainer.train_dataloader, "batch_size", None)  # a loader of several has none
    path = Path(cli.trainer.log_dir or ".") / "step.html"
    write_step(monitor.timeline, None if auto is None else auto.budget_bytes, batch_size or 0, path)
    return path


def read_result(cli: LightningCLI) -> FitResult:
    """Return what there is to compare."""
    monitor = find_monitor(cli)
    weights = {name: tensor.detach().cpu().clone() for name, tensor in cli.model.state_dict().items()}
    if monitor is None:
        return FitResult(peak=None, seconds_per_batch=None, weights=weights)
    return FitResult(monitor.peaks.get("train"), monitor.seconds_per_batch, weights)
