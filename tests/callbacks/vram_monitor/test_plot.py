"""VRAMMonitor.plot: the tracked step alone, and beside that of another run."""

import lightning.pytorch as pl
import pytest
from support.helpers import LitTiny, TinyGPT

pytest.importorskip("matplotlib", reason="the extra plots")
from matplotlib import image

from lightning_vram import ActivationCheckpointing, VRAMMonitor


@pytest.fixture(scope="module")
def monitors():
    """Monitors of a baseline and of a run with checkpointed layers."""
    found = []
    for callbacks in ([], [ActivationCheckpointing()]):
        monitor = VRAMMonitor(track=True, path=None)
        options = {"max_steps": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False}
        trainer = pl.Trainer(
            callbacks=[*callbacks, monitor], enable_progress_bar=False, enable_model_summary=False, **options
        )
        trainer.fit(LitTiny(TinyGPT()))
        found.append(monitor)
    return found


def test_one_step_and_two_are_pictures_of_one_width(monitors, tmp_path):
    baseline, monitor = monitors
    monitor.plot(tmp_path / "one.png")
    monitor.plot(str(tmp_path / "both.png"), baseline, limit="1MiB")
    assert [image.imread(tmp_path / name).shape[1] for name in ("one.png", "both.png")] == [2480] * 2


def test_a_monitor_that_tracked_nothing_is_an_error(monitors, tmp_path):
    for monitor, baseline in ((VRAMMonitor(), None), (monitors[1], VRAMMonitor())):
        with pytest.raises(ValueError, match=r"^VRAMMonitor\.plot\(\) needs a tracked training batch: use VRAMMonitor"):
            monitor.plot(tmp_path / "step.png", baseline)


@pytest.mark.parametrize(
    ("path", "limit", "message"),
    [
        ("step.txt", None, r"plot\(path\) must end in one of .png, .svg, .pdf, .html, got"),
        ("step.png", "20 apples", r"VRAMMonitor\.plot\(limit\)"),
        ("step.png", -1, r"VRAMMonitor\.plot\(limit\)"),
    ],
)
def test_what_cannot_be_drawn_is_refused_first(path, limit, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        VRAMMonitor().plot(tmp_path / path, limit=limit)
