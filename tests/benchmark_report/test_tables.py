"""What ``python -m tests.benchmarks.report`` prints, line by line."""

from support.consoles import shown_at
from support.result_files import BIGGEST, SPEED, write

from tests.benchmarks.report import read_results, result_tables

SPEED_TABLE = """\
a.json: speed
x86_64, 1 threads, torch 2.13.0+cpu, file of 2026-11-24

GPT
                           by        peak, tracked  of baseline  time per step  of baseline (low to high)
baseline                   baseline     400.00 MiB         1.00       500.0 ms        1.00 (0.95 to 1.10)
ActivationCheckpointing()  ours         100.00 MiB         0.25       625.0 ms        1.25 (1.20 to 1.35)
InPlaceFusion()            ours         300.00 MiB         0.75       562.5 ms        1.12 (1.07 to 1.23)
torch.utils.checkpoint     PyTorch      120.00 MiB         0.30       750.0 ms        1.50 (1.45 to 1.60)

"""
BIGGEST_TABLE = """\
b.json: biggest
x86_64, 1 threads, torch 2.15.0, file of 2026-11-24

GPT
                        by        what        largest  of baseline  peak, tracked  of baseline      budget
baseline                baseline  batch size        4         1.00     290.00 MiB         1.00  300.00 MiB
AutoVRAM()              ours      batch size       18         4.50     290.00 MiB         1.00  300.00 MiB
torch.utils.checkpoint  PyTorch   batch size       10         2.50     290.00 MiB         1.00  300.00 MiB

"""
DIFFERENCES = "machines differ in torch: 2.13.0+cpu (a.json); 2.15.0 (b.json)\n"


def printed(*files, width=160, **options):
    text = shown_at(width, result_tables([read_results(path) for path in files], **options))
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


def test_each_line(tmp_path):
    speed = write(tmp_path / "a.json", SPEED)
    assert printed(speed) == f"{SPEED_TABLE}Left out: 1 row that did not run (shown by --all).\n"
    biggest = write(tmp_path / "b.json", BIGGEST[:4], "biggest", torch="2.15.0")
    assert (
        printed(speed, biggest)
        == f"{SPEED_TABLE}{BIGGEST_TABLE}Left out: 2 rows that did not run (shown by --all).\n{DIFFERENCES}"
    )
