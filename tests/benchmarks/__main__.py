"""Run suites, print their tables, write the figures with device and versions."""

import argparse
import gc
import logging
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.benchmarks.compare import Options
from tests.benchmarks.measure import Row, error_row
from tests.benchmarks.output import print_tables, write
from tests.benchmarks.suites import MEASUREMENTS, SUITES


def main() -> None:
    """Do what the command line says; the exit code is 1 if a measurement as a whole went wrong."""
    arguments, modules, given = parse()
    for name in ("lightning.pytorch", "lightning.fabric", "lightning_vram"):
        logging.getLogger(name).setLevel(logging.ERROR)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gc.freeze()  # what is imported stays: each collection would walk through it for a quarter of a second
    has_failed = False
    for suite, names in arguments.suites.items():
        rows, settings = [], {}
        for name in names:
            module = modules[name]
            known = {**module.SETTINGS, **(module.QUICK if arguments.quick else {})}
            settings[name] = {key: given.get(key, value) for key, value in known.items()}
            options = Options(device, arguments.only, arguments.ways, arguments.quick, arguments.peers, settings[name])
            found = []
            for row in attempt(module, options):
                found.append(row)
                rows.append({"measurement": name, **row} if len(names) > 1 else row)
                if arguments.output is not None:  # after each row: a run that is cut off has what it measured
                    asked = {name: getattr(arguments, name) for name in ("quick", "peers", "only", "ways")}
                    write(suite, {**asked, **settings}, rows, path_of(arguments.output, suite, device))
            print_tables(found)
            has_failed |= any(row.keys() <= {"error", "all_traceback"} for row in found)
        if not rows:
            print(f"{suite}: nothing was measured: no workload name contains --only {arguments.only!r}.")
        has_failed |= not rows
    sys.exit(int(has_failed))


def path_of(output: Path, suite: str, device: torch.device) -> Path:
    """Return where the figures of a suite go: the file that was named, or one of the folder."""
    return output if output.suffix == ".json" else output / f"{suite}_{device.type}.json"


def parse() -> tuple[argparse.Namespace, dict[str, ModuleType], dict[str, Any]]:
    """Return the arguments, the modules that measure, and those of their settings that were given."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__, add_help=False)
    parser.add_argument("--suite", nargs="+", default=[], metavar="NAME", help=f"all, {', '.join(SUITES)}, or a case")
    parser.add_argument("--peers", action="store_true", help="also run variants of other libraries, where installed")
    parser.add_argument("--quick", action="store_true", help="small workloads, few repeats")
    parser.add_argument("--only", default="", metavar="TEXT", help="piece of the name of a workload or case")
    parser.add_argument("--ways", default="", metavar="TEXT", help="piece of a variant's name; baseline always runs")
    parser.add_argument("-o", "--output", type=Path, help="JSON file, or a folder for one file per suite")
    arguments, rest = parser.parse_known_args()
    wanted = list(SUITES) if arguments.suite == ["all"] else arguments.suite
    parts = {**{name: (name,) for name in MEASUREMENTS}, **SUITES}
    if unknown := [name for name in wanted if name not in parts]:
        parser.error(f"--suite {' '.join(unknown)}: use all, {', '.join(SUITES)}, or a case of one: {', '.join(parts)}")
    arguments.suites = {name: parts[name] for name in wanted}
    if len(wanted) > 1 and arguments.output is not None and arguments.output.suffix == ".json":
        parser.error(f"-o {arguments.output}: several suites need a folder.")
    modules = {
        name: import_module(f"tests.benchmarks.suites.{name}") for names in arguments.suites.values() for name in names
    }
    own = argparse.ArgumentParser(parents=[parser], prog=parser.prog, argument_default=argparse.SUPPRESS)
    known: dict[str, Any] = {}
    for name, module in modules.items():
        for key, value in module.SETTINGS.items():
            if key not in known:
                kind: Any = {"action": "store_true"} if isinstance(value, bool) else {"type": type(value)}
                own.add_argument(f"--{key.replace('_', '-')}", help=f"of {name}: {value}", **kind)
            known[key] = value
    given = own.parse_args(rest)
    if not wanted:
        own.error("--suite is missing: name at least one.")
    check(own, given, arguments.output)
    return arguments, modules, {key: value for key, value in vars(given).items() if key in known}


def check(parser: argparse.ArgumentParser, given: argparse.Namespace, output: Path | None) -> None:
    """Refuse what would be noticed only when all is measured."""
    for key in ("repeats", "steps"):
        if getattr(given, key, 1) < 1:
            parser.error(f"--{key} must be at least 1, got {getattr(given, key)}.")
    if output is not None:
        try:
            path_of(output, "", torch.device("cpu")).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"-o {output}: {error.strerror}.")


def attempt(module: ModuleType, options: Options) -> Iterator[Row]:
    """Yield the rows of a measurement; its error is the last one."""
    try:
        yield from module.measure(options)
    except Exception as error:
        yield error_row(error)


if __name__ == "__main__":
    main()
