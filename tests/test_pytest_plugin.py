"""The pytest plugin, in a sample project of a user: it catches a peak that has grown, and lets an equal one pass."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import pytest_lightning_vram

ROOT = Path(__file__).parents[1]
FOLDERS = os.pathsep.join(map(str, (ROOT, ROOT / "lightning_vram" / "pytest_entry")))

ONLY_NAMED = ("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # else it is there twice where the package is installed
PROJECT = """
import os
import torch

def step(peak_memory, size):
    weight = torch.nn.Parameter(torch.zeros(size, dtype=torch.uint8).float(), requires_grad=True)
    module = torch.nn.Module()
    module.weight = weight
    with peak_memory(module) as tracker:
        weight.sum().backward()
    return tracker.timeline

def test_step(peak_memory):
    timeline = step(peak_memory, int(os.environ["SIZE"]))
    assert timeline.peak_bytes == max(timeline.peak_by_phase.values())

def test_other(peak_memory):
    step(peak_memory, 1000)
    step(peak_memory, 2000)

def test_without():
    pass
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run the project, whose step has a weight of so many elements, in this process."""
    monkeypatch.chdir(tmp_path)

    def run(size, *arguments):
        (tmp_path / "test_sample.py").write_text(PROJECT)
        monkeypatch.setenv("SIZE", str(size))
        monkeypatch.setenv(*ONLY_NAMED)
        options = ["--rootdir=.", "--import-mode=importlib", "-pno:cacheprovider", "-q", *arguments]
        code = pytest.main(options, plugins=[pytest_lightning_vram])
        captured = capsys.readouterr()
        return int(code), captured.out + captured.err

    return run


def peaks(tmp_path):
    return json.loads((tmp_path / "peaks.json").read_text())


def test_a_first_run_writes_all_peaks_and_an_equal_one_passes(run, tmp_path):
    code, output = run(100_000, "--vram-baseline=peaks.json")
    assert code == 0
    assert f"peak memory of 3 blocks written to {tmp_path / 'peaks.json'}" in output
    assert list(peaks(tmp_path)) == [  # sorted
        "test_sample.py::test_other",
        "test_sample.py::test_other#2",
        "test_sample.py::test_step",
    ]
    before = peaks(tmp_path)
    assert before["test_sample.py::test_step"] == 2 * 400_000 + 2 * 4  # weight, gradient; the sum, and its gradient
    code, output = run(100_000, "--vram-baseline=peaks.json", "--vram-tolerance=0")
    assert code == 0
    assert f"peak memory of 3 blocks compared with {tmp_path / 'peaks.json'}" in output
    assert peaks(tmp_path) == before


def test_a_peak_that_has_grown_by_a_tenth_fails_and_says_what_to_do(run, tmp_path):
    run(100_000, "--vram-baseline=peaks.json")
    before = peaks(tmp_path)
    code, output = run(110_000, "--vram-baseline=peaks.json", "--vram-tolerance=2")
    assert code == 1
    assert (
        "test_sample.py::test_step: peak memory has grown by 10.00 %, from 800,008 to 880,008 bytes (781.26 "
        "KiB to 859.38 KiB); allowed: 2 %. If this is intended: pytest --vram-baseline peaks.json "
        "--vram-update" in output
    )
    assert "1 failed, 2 passed" in output
    assert peaks(tmp_path) == before  # so that the next run fails as well


@pytest.mark.parametrize(("size", "code"), [(101_000, 0), (101_100, 1)])
def test_the_tolerance_is_one_percent(run, size, code):
    run(100_000, "--vram-baseline=peaks.json")
    assert run(size, "--vram-baseline=peaks.json")[0] == code


def test_an_update_writes_what_ran_and_keeps_the_rest(run, tmp_path):
    run(100_000, "--vram-baseline=peaks.json")
    before = peaks(tmp_path)
    assert run(110_000, "--vram-baseline=peaks.json", "--vram-update", "-k", "test_step")[0] == 0
    assert peaks(tmp_path) == before | {"test_sample.py::test_step": 880_008}


def test_a_test_that_the_file_does_not_know_fails(run, tmp_path):
    (tmp_path / "peaks.json").write_text("{}")
    code, output = run(100_000, "--vram-baseline=peaks.json", "-k", "test_step")
    assert code == 1
    assert (
        "test_sample.py::test_step has no baseline in peaks.json; its peak is 800,008 bytes now. To record it: pytest"
    ) in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vram-update"], "ERROR: --vram-update needs --vram-baseline FILE"),
        (["--vram-tolerance=-1"], "ERROR: --vram-tolerance must not be negative, got -1"),
    ],
)
def test_refuses(run, arguments, message):
    code, output = run(1000, *arguments)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert message in output


@pytest.mark.parametrize(
    ("text", "message"), [('{"a": "b"}', "it must map tests to bytes."), ("{", "Expecting property name")]
)
def test_a_file_of_something_else_is_refused(run, tmp_path, text, message):
    (tmp_path / "peaks.json").write_text(text)
    code, output = run(1000, "--vram-baseline=peaks.json")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert f"peaks.json is not a --vram-baseline file: {message}" in output


def run_alone(folder, *command):
    (folder / "test_sample.py").write_text(PROJECT)
    environment = {**os.environ, "PYTHONPATH": FOLDERS, "PYTHONWARNINGS": "ignore", "SIZE": "100000"}
    environment |= dict([ONLY_NAMED])
    command = [sys.executable, *command]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_workers_of_xdist_share_one_file(run, tmp_path):
    plugins = ["-p", "pytest_lightning_vram", "-p", "xdist.plugin"]
    done = run_alone(tmp_path, "-m", "pytest", *plugins, "-n", "2", "--rootdir=.", "--vram-baseline=peaks.json")
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    assert len(peaks(tmp_path)) == 3
    code, output = run(110_000, "--vram-baseline=peaks.json")
    assert (code, "grown by 10.00 %" in output) == (1, True)


def test_what_pytest_imports_at_each_start_imports_no_torch(tmp_path):
    program = "import sys, pytest_lightning_vram; print({'torch', 'lightning', 'lightning_vram'} & set(sys.modules))"
    assert run_alone(tmp_path, "-c", program).stdout == "set()\n"
