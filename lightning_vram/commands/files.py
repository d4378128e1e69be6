"""The commands that write or read a file or a folder and train nothing: ``report``, ``consolidate``, ``calibrate``.

They give what is printed, part by part; what they raise is a mistake of the user.
"""

from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from lightning_vram.commands.parser import PROGRAM
from lightning_vram.memory.device.measurement import read_measurements
from lightning_vram.memory.estimate.calibrate import calibrate
from lightning_vram.memory.estimate.device_spec import write_calibration
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.benchmarks import drawable, read_results, result_tables, save_pictures
from lightning_vram.report.tables import memory_table
from lightning_vram.strategies.fsdp_offload import consolidate


def report_file(args: Sequence[str]) -> Iterator[RenderableType]:
    """Read what ``VRAMMonitor`` or benchmarks recorded, and draw what benchmarks did."""
    parser = ArgumentParser(
        prog=f"{PROGRAM} report",
        description="Print a recording of VRAMMonitor, or tables and pictures of benchmark results.",
    )
    parser.add_argument("path", type=Path, nargs="?", help="vram.jsonl in the run's log folder")
    parser.add_argument(
        "--benchmarks", type=Path, nargs="+", metavar="FILE", help="files that python -m tests.benchmarks wrote"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FOLDER", help="folder for pictures; default: the current one"
    )
    given = parser.parse_args(args)
    if (given.path is None) == (given.benchmarks is None):
        parser.error("name one file of VRAMMonitor, or --benchmarks with files of results.")
    if given.path is not None:
        if given.output is not None:
            parser.error("--output is the folder for pictures of --benchmarks; a recording of VRAMMonitor has none.")
        yield memory_table(read_measurements(given.path))
        return
    files = [read_results(path) for path in given.benchmarks]
    yield result_tables(files)
    for path in save_pictures(files, given.output or Path()):
        yield f"{path}: drawn."
    without = [file.path.name for file in files if not drawable(file)]
    if without:
        yield f"Nothing to draw in {', '.join(without)}: no row has by, a peak and seconds_per_step, or largest."


def consolidate_folder(args: Sequence[str]) -> Iterator[str]:
    """Make one file of a sharded checkpoint."""
    parser = ArgumentParser(
        prog=f"{PROGRAM} consolidate",
        description="Convert a sharded checkpoint to one file that any Trainer loads. Needs host memory for the whole "
        "checkpoint.",
    )
    parser.add_argument("folder", type=Path, help="sharded checkpoint of fsdp_offload or ModelParallelStrategy")
    parser.add_argument("file", type=Path, help="file to write; an existing one is replaced")
    answers: dict[str, Any] = {"choices": ("true", "false"), "default": "true"}
    parser.add_argument("--weights_only", **answers, help="false: also load classes, which can run code of its author")
    parser.add_argument("--verify", **answers, help="false: do not check the checksums first")
    given = parser.parse_args(args)
    consolidate(given.folder, given.file, weights_only=given.weights_only == "true", verify=given.verify == "true")
    yield f"{given.file}: {format_bytes(given.file.stat().st_size)}, for any Trainer."


def calibrate_device(args: Sequence[str]) -> Iterator[str]:
    """Measure the GPU at hand, for estimates of others."""
    parser = ArgumentParser(
        prog=f"{PROGRAM} calibrate",
        description="Measure this machine's GPU: memory, CUDA context, workspaces, bandwidths, rates. Use the file on "
        "any machine: `lightning-vram estimate --device FILE`. No other process should use the GPU.",
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="file to write, such as thisgpu.json")
    output = parser.parse_args(args).output
    if output.suffix != ".json":
        raise ValueError(f"--output must end in .json, got {str(output)!r}.")
    spec = calibrate()
    write_calibration(spec, output)
    yield f"{output}: {spec.name}, {format_bytes(spec.memory_bytes)}."


FILE_COMMANDS: dict[str, Callable[[Sequence[str]], Iterator[RenderableType]]] = {
    "report": report_file,
    "consolidate": consolidate_folder,
    "calibrate": calibrate_device,
}
