"""What ``lightning-vram report --benchmarks`` prints, line by line."""

import io

from rich.console import Console
from support.result_files import BIGGEST, SPEED, write

from lightning_vram.report.benchmarks import read_results, result_tables

SPEED_TABLE = """\
a.json: speed
x86_64, 1 threads, torch 2.13.0+cpu, file of 2026-11-24

GPT
                           by         peak, tracked  of baseline  time per step  of baseline (low to high)  did not run
plain                      plain         400.00 MiB         1.00       500.0 ms        1.00 (0.95 to 1.10)
ActivationCheckpointing()  ours          100.00 MiB         0.25       625.0 ms        1.25 (1.20 to 1.35)
InPlaceFusion()            ours          300.00 MiB         0.75       562.5 ms        1.12 (1.07 to 1.23)
torch.utils.checkpoint     PyTorch       120.00 MiB         0.30       750.0 ms        1.50 (1.45 to 1.60)
OffloadActivations()       torchtune                                                                        not installed: pip install torchtune
"""  # noqa: E501
BIGGEST_TABLE = """\
b.json: biggest
x86_64, 1 threads, torch 2.15.0, file of 2026-11-24

GPT
                        by       what        largest  of baseline  peak, tracked  of baseline      budget  did not run
plain                   plain    batch size        4         1.00     290.00 MiB         1.00  300.00 MiB
AutoVRAM()              ours     batch size       18         4.50     290.00 MiB         1.00  300.00 MiB
torch.utils.checkpoint  PyTorch  batch size       10         2.50     290.00 MiB         1.00  300.00 MiB
save_on_cpu             PyTorch  batch size                                                                needs a GPU

machines differ in torch: 2.13.0+cpu (a.json); 2.15.0 (b.json)
"""


def printed(*files):
    out = io.StringIO()
    Console(file=out, width=160).print(result_tables([read_results(path) for path in files]))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def test_each_line(tmp_path):
    speed = write(tmp_path / "a.json", SPEED)
    assert printed(speed) == f"{SPEED_TABLE}\n"
    biggest = write(tmp_path / "b.json", BIGGEST[:4], "biggest", torch="2.15.0")
    assert printed(speed, biggest) == f"{SPEED_TABLE}\n{BIGGEST_TABLE}"


def test_files_from_before_by_show_what_they_have(tmp_path):
    rows = [
        {"workload": "W", "variant": "plain", "peak_bytes": 2048, "kept_bytes": 1024, "of_plain": 1.0},
        {"workload": "W", "variant": "[red]x\x1b", "peak_bytes": 1024, "step_seconds": 2.0, "steps": 1200},
    ]
    lines = printed(write(tmp_path / "a.json", rows)).splitlines()
    assert lines[3:] == [
        "W",
        "         peak, tracked  of baseline      kept  of plain    step  steps",
        "plain         2.00 KiB         1.00  1.00 KiB      1.00       -      -",
        "[red]x?       1.00 KiB         0.50         -         -  2.00 s  1,200",
        "",
    ]
