"""The tables of a GPU's figures, printed from the committed files and from partial ones."""

import json
from pathlib import Path

import pytest

from tests.benchmarks.gpu_day.figures import print_figures

FOLDER = Path(__file__).parent / "benchmarks" / "results" / "gpu"
BASELINE = {"name": "plain", "by": "plain", "max_memory_allocated_bytes": 4 << 30, "seconds_per_step": 0.2}


def figures_of(tmp_path, capsys, items):
    (tmp_path / "card.json").write_text(json.dumps({"items": items}))
    print_figures(tmp_path)
    return capsys.readouterr().out


def test_the_committed_figures_are_printed_with_the_ratios_worked_out_by_hand(capsys):
    print_figures(FOLDER)
    printed = capsys.readouterr().out
    # 395.46 ms of 256.72 ms, 2,622,596,096 of 27,144,586,240 bytes
    assert "| `ActivationCheckpointing()` | 2.44 (0.10) | 28.07 (0.67) | 395 (1.54) |" in printed
    assert "| fsdp_offload, params | 6.20 | 6.44 | 23.79 | 0.89 | 18,353 (0.54) |" in printed
    # 1,100.2 ms of the 257.8 ms of bf16-mixed
    assert "| 39.49 (0.83) | 1100 (4.27) |" in printed
    assert "Allocated: 10 of 15 cases within 0.1 %" in printed
    assert "smoke.images, fsdp_offload, params: differs by 2.6e-04" in printed


def test_ratios_refer_to_the_baseline_and_its_second_run_stands_below_the_table(tmp_path, capsys):
    row = {**BASELINE, "name": "Ours()", "by": "ours", "max_memory_allocated_bytes": 1 << 30, "seconds_per_step": 0.3}
    again = {**BASELINE, "name": "plain, again", "seconds_per_step": 0.21}
    printed = figures_of(tmp_path, capsys, {"speed.toy": {"rows": [BASELINE, row, again]}})
    assert "| `Ours()` |  | 1.00 (0.25) | 300 (1.50) |" in printed
    assert "plain, again" not in printed
    assert "took 1.050 of its first time" in printed


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"items": {}}', '{"items": {"speed.a": {"rows": []}}}'])
def test_a_file_without_figures_prints_no_table(tmp_path, capsys, text):
    (tmp_path / "card.json").write_text(text)
    print_figures(tmp_path)
    assert "|" not in capsys.readouterr().out
