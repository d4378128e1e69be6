"""What the command answers without PyTorch: help, version, files, presets, mistakes."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.parts import CONFIGS, ROOT

import lightning_vram
from lightning_vram.cli import main
from lightning_vram.commands.files import FILE_COMMANDS
from lightning_vram.memory.device.measurement import Measurement, write_measurement

HEAVY = re.compile(r"\| +(torch|lightning|jsonargparse|omegaconf|scipy)$", re.MULTILINE)


def record(path: str = "vram.jsonl") -> list[Measurement]:
    found = [
        Measurement("train", 0, batch, batch, "cuda:0", "allocator", allocated_bytes=1, peak_allocated_bytes=peak)
        for batch, peak in enumerate((3 * 2**20, 5 * 2**20))
    ]
    for one in found:
        write_measurement(Path(path), one)
    return found


@pytest.mark.parametrize(
    ("arguments", "exit_code", "words"),
    [
        (["--help"], 0, "consolidate  convert a sharded checkpoint to one file"),
        (["--version"], 0, f"lightning-vram {lightning_vram.__version__}"),
        (["estimate", "-h"], 0, "--batch.shape SHAPE"),
        (["plan", "--device=list"], 0, "RTX 4090"),
        (["report", "vram.jsonl"], 0, "5.00 MiB"),
        (["consolidate", "nope", "a.ckpt"], 2, "nope is not a sharded checkpoint"),
        (["presets", "quickstart"], 0, "configs/quickstart.yaml"),
        (["estimte"], 2, "Did you mean estimate?"),
    ],
    ids=lambda value: "_".join(value) if isinstance(value, list) else "",
)
def test_an_answer_needs_neither_pytorch_nor_half_a_second(arguments, exit_code, words):
    record()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-X", "importtime", "-m", "lightning_vram", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == exit_code
    assert words in done.stdout + done.stderr
    assert HEAVY.findall(done.stderr) == []
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1 is not a VRAMMonitor measurement: Expecting property name"),
        ("[]", "line 1 is not a VRAMMonitor measurement: "),
        ("", "contains no measurements."),
    ],
)
def test_a_damaged_recording_is_one_line(text, message, fail):
    Path("a.jsonl").write_text(text)
    assert message in fail("report", "a.jsonl")


def test_calibrate_without_a_gpu_is_one_line(monkeypatch, fail):
    monkeypatch.setattr("lightning_vram.memory.device.accelerators.has_statistics", lambda kind: False)
    assert fail("calibrate", "-o", "gpu.json").startswith("calibrate found no GPU on this machine. Run it on")
    assert not Path("gpu.json").exists()


def test_a_closed_pipe_ends_without_a_traceback():
    command = f"{sys.executable} -m lightning_vram estimate --device list | true; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_interrupt_ends_without_a_traceback(monkeypatch):
    def report(args):
        raise KeyboardInterrupt

    monkeypatch.setitem(FILE_COMMANDS, "report", report)
    with pytest.raises(SystemExit) as caught:
        main(["report", "vram.jsonl"])
    assert caught.value.code == 130
    monkeypatch.setenv("LIGHTNING_VRAM_DEBUG", "1")
    with pytest.raises(KeyboardInterrupt):
        main(["report", "vram.jsonl"])


def test_presets_are_listed(capsys):
    main(["presets"])
    out = capsys.readouterr().out
    assert all(re.search(rf"\b{path.stem}\b", out) for path in CONFIGS)
    about = (ROOT / "configs" / "quickstart.yaml").read_text().splitlines()[1].removeprefix("# ")
    assert re.search(rf"^  quickstart +{re.escape(about)}$", out, re.MULTILINE)


def test_presets_are_copied_with_what_their_commands_need(fail):
    main(["presets", "early_release"])
    assert sorted(path.name for path in Path("configs").iterdir()) == ["early_release.yaml", "quickstart.yaml"]
    main(["presets", "--all", "-o", "configs"])  # those that are there are the same
    assert {path.name for path in Path("configs").iterdir()} == {path.name for path in CONFIGS}
    for path in CONFIGS:
        assert (Path("configs") / path.name).read_bytes() == path.read_bytes()
    Path("configs/gpt_lean.yaml").write_text("mine")
    assert fail("presets", "gpt_lean").startswith("configs/gpt_lean.yaml exists and is another file.")
    assert Path("configs/gpt_lean.yaml").read_text() == "mine"
    assert fail("presets", "quickstrt") == (
        "there is no preset 'quickstrt'. Did you mean quickstart? `lightning-vram presets` lists all."
    )
