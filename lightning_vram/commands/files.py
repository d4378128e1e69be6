"""The commands that train nothing: ``report``, ``consolidate``, ``calibrate``, ``presets``.

Each returns what is printed, part by part; what it raises is a mistake of the user. PyTorch is imported only for work
that needs it, after the arguments were checked.
"""

import json
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from textwrap import fill
from typing import Any

from rich.console import RenderableType

from lightning_vram.commands.options import PROGRAM, did_you_mean, preset_names
from lightning_vram.memory.device.measurement import largest, read_measurements
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.tables import memory_table


def report_file(args: Sequence[str]) -> Iterator[RenderableType]:
    """Print what ``VRAMMonitor`` recorded."""
    parser = ArgumentParser(prog=f"{PROGRAM} report", description="Print a recording of VRAMMonitor.")
    parser.add_argument("path", type=Path, help="vram.jsonl in the run's log folder")
    parser.add_argument("--json", action="store_true", help="print the highest peak of each stage as JSON, for scripts")
    given = parser.parse_args(args)
    measurements = read_measurements(given.path)
    if given.json:
        stages = dict.fromkeys(measurement.stage for measurement in measurements)
        peaks = {stage: asdict(largest(one for one in measurements if one.stage == stage)) for stage in stages}
        yield json.dumps({"readings": len(measurements), "peaks": peaks}, indent=2)
    else:
        yield memory_table(measurements)


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
    if not all((given.folder / name).is_file() for name in (".metadata", "meta.pt")):  # before PyTorch is imported
        raise FileNotFoundError(f"{given.folder} is not a sharded checkpoint: a folder with .metadata and meta.pt.")
    from lightning_vram.core.ranks import CheckpointError
    from lightning_vram.report.progress import show_progress
    from lightning_vram.techniques.sharded_checkpoints import consolidate

    options = {"weights_only": given.weights_only == "true", "verify": given.verify == "true"}
    try:
        with show_progress() as on_progress:
            consolidate(given.folder, given.file, **options, on_progress=on_progress)
    except CheckpointError as error:
        raise ValueError(str(error)) from error
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
    if not output.parent.is_dir():
        raise FileNotFoundError(f"--output: there is no folder '{output.parent}'.")
    from lightning_vram.memory.device.accelerators import current_kind, has_statistics
    from lightning_vram.memory.estimate.device_spec import write_calibration
    from lightning_vram.memory.estimate.workspaces import calibrate
    from lightning_vram.report.progress import show_progress

    if not has_statistics(current_kind()):
        raise ValueError(
            "calibrate found no GPU on this machine. Run it on a machine with one. Estimates need no calibration for "
            f"the GPUs that `{PROGRAM} estimate --device list` prints."
        )
    with show_progress() as on_progress:
        spec = calibrate(on_progress)
    write_calibration(spec, output)
    yield f"{output}: {spec.name}, {format_bytes(spec.memory_bytes)}."


def copy_presets(args: Sequence[str]) -> Iterator[str]:
    """List the configuration files of the package, or copy some."""
    parser = ArgumentParser(
        prog=f"{PROGRAM} presets",
        description="List configuration files that come with the package: whole runs, and one file per feature. With "
        "names, or --all, copy them.",
    )
    parser.add_argument("name", nargs="*", help="files to copy, such as quickstart")
    parser.add_argument("--all", action="store_true", help="copy all")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("configs"), metavar="FOLDER", help="default: %(default)s"
    )
    given = parser.parse_args(args)
    folder = files("lightning_vram") / "presets"
    texts = {name: (folder / f"{name}.yaml").read_text(encoding="utf-8") for name in preset_names()}
    for name in given.name:
        if name not in texts:
            raise ValueError(f"there is no preset {name!r}.{did_you_mean(name, texts)} `{PROGRAM} presets` lists all.")
    if not given.name and not given.all:
        yield _list_presets(texts)
        return
    # the command in the first line of each may need another one
    names = texts if given.all else [name for name in texts if any(f"/{name}.yaml" in texts[one] for one in given.name)]
    targets = {given.output / f"{name}.yaml": texts[name] for name in names}
    for target, text in targets.items():
        if target.exists() and target.read_bytes() != text.encode():
            raise FileExistsError(f"{target} exists and is another file. Name another folder: -o FOLDER.")
    given.output.mkdir(parents=True, exist_ok=True)
    for target, text in targets.items():
        target.write_text(text, encoding="utf-8")
        yield str(target)


def _list_presets(texts: Mapping[str, str]) -> str:
    """List whole runs with the second line of each, and the names of files for one feature."""
    runs = {name: lines[1][2:] for name, text in texts.items() if (lines := text.splitlines())[1].startswith("# ")}
    width = max(map(len, runs)) + 2
    listed = "\n".join(f"  {name:{width}}{about}" for name, about in runs.items())
    features = fill(", ".join(name for name in texts if name not in runs), initial_indent="  ", subsequent_indent="  ")
    return (
        f"whole runs:\n{listed}\n\none feature each, to add to a run:\n{features}\n\n"
        f"`{PROGRAM} presets quickstart` copies one to the folder configs, `{PROGRAM} presets --all` all of them."
    )


FILE_COMMANDS: dict[str, Callable[[Sequence[str]], Iterator[RenderableType]]] = {
    "report": report_file,
    "consolidate": consolidate_folder,
    "calibrate": calibrate_device,
    "presets": copy_presets,
}
