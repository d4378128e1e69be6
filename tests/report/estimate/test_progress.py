"""The display while an estimate runs."""

import io
from contextlib import nullcontext

import pytest
from rich.console import Console
from support.helpers import LitTiny, TinyCNN

from lightning_vram import estimate_memory, plan_memory
from lightning_vram.report import progress
from lightning_vram.report.progress import show_progress


def show(*calls: tuple[str, float], is_terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=100, color_system=None)
    with show_progress(console=console) as on_progress:
        for stage, done in calls:
            on_progress(stage, done)
    return file.getvalue()


def test_the_current_stage_stands_alone():
    text = show(("building", 0.0), ("tracing the step", 0.5), is_terminal=True)
    frames = [line for line in text.splitlines() if "0:0" in line]
    assert "building" in frames[0]
    assert "tracing the step" in frames[-1]
    assert "building" not in frames[-1]
    assert "━" in frames[-1]
    assert show(("building", 0.0), ("tracing the step", 0.5), is_terminal=False).strip() == ""


def test_nothing_is_written_where_a_trainer_shows_no_progress_bar(make_trainer):
    for is_shown in (True, False):
        file = io.StringIO()
        console = Console(file=file, force_terminal=True)
        with show_progress(make_trainer(enable_progress_bar=is_shown), console=console) as on_progress:
            on_progress("building", 0.5)
        assert ("building" in file.getvalue()) == is_shown


def test_the_screen_is_left_as_it_was():
    text = show(("building", 1.0), is_terminal=True)
    assert text.endswith("\x1b[2K")
    assert "\x1b[?25h" in text  # the cursor is seen again


@pytest.mark.slow
@pytest.mark.parametrize("work", [estimate_memory, plan_memory], ids=lambda work: work.__name__)
def test_python_calls_show_what_they_do_unless_the_caller_listens(work, monkeypatch):
    seen, heard = [], []
    monkeypatch.setattr(progress, "show_progress", lambda: nullcontext(lambda stage, done: seen.append(stage)))
    model, batch = LitTiny(TinyCNN()), TinyCNN().samples(2)[:2]
    work(model, batch, device="cpu")
    assert seen
    num_seen = len(seen)
    work(model, batch, device="cpu", on_progress=lambda stage, done: heard.append(stage))
    assert heard == seen
    assert len(seen) == num_seen
