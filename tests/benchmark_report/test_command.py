"""What ``python -m tests.benchmarks.report`` prints and draws, and its errors."""

import pytest
from support.result_files import SPEED
from support.result_files import write as write_results

from tests.benchmarks.report.__main__ import main


def test_benchmarks_are_printed_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="the extra plots")
    speed = write_results(tmp_path / "speed.json", SPEED)
    old = write_results(tmp_path / "old.json", [{"variant": "plain", "peak_bytes": 1024}])
    main([str(speed), str(old), "-o", str(tmp_path / "pictures")])
    picture = tmp_path / "pictures" / "speed_peak_and_time.png"
    out = capsys.readouterr().out
    assert "torch.utils.checkpoint     PyTorch " in out
    assert "OffloadActivations()" not in out
    assert "\nLeft out: 1 row that did not run (shown by --all).\n" in out
    assert f"\n{picture}: drawn.\n" in out
    assert out.endswith("Nothing to draw in old.json: no row has by, a peak and seconds_per_step, or largest.\n")
    assert picture.read_bytes().startswith(b"\x89PNG")
