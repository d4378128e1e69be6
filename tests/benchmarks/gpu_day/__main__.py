"""What a GPU has to show, in calls of minutes: python -m tests.benchmarks.gpu_day --items first.

Each item runs in a process of its own, with a time limit, and writes a JSON file. A call starts no item that does not
fit into its minutes; the next call continues. ``--dry-run`` walks through all of it with toys.
"""

import argparse
import re
import tempfile
from pathlib import Path

from tests.benchmarks.gpu_day import STARTED, results, traces
from tests.benchmarks.gpu_day.agenda import GROUPS, ITEMS, choose
from tests.benchmarks.gpu_day.figures import print_figures
from tests.benchmarks.gpu_day.goals import print_summary
from tests.benchmarks.gpu_day.items import Item, Job
from tests.benchmarks.gpu_day.schedule import run_items
from tests.benchmarks.gpu_day.worker import work

FOLDER = Path("build", "gpu_day")  # git ignores it: it survives between two calls on one machine


def main() -> None:
    """Do what the command line says."""
    arguments = parse()
    if arguments.figures is not None:
        print_figures(arguments.figures)
        return
    job = make_job(arguments)
    folder = job.folder
    if arguments.work:
        work(next(item for item in ITEMS if item.name == arguments.work), job)
    if arguments.scatter is not None:
        print(f"{len(results.scatter(arguments.scatter, folder))} results are in {folder}")
    if arguments.list or arguments.items or arguments.only or arguments.dry_run:
        list_or_run(choose(arguments.items, arguments.only, job), job, arguments)
    if arguments.estimate:
        traces.estimate_peaks(folder)
    if arguments.summary or arguments.dry_run:
        print_summary(folder)
    if arguments.gather is not None:
        results.gather(folder, arguments.gather)


def list_or_run(items: list[Item], job: Job, arguments: argparse.Namespace) -> None:
    """Print the items, or run them as long as the minutes last."""
    if arguments.list:
        print_list(items, job.folder)
        return
    forget(items, job.folder, arguments.again)
    late = run_items(items, job, arguments.minutes, STARTED)
    print(f"left for the next call: {', '.join(late) or 'nothing'}")


def make_job(arguments: argparse.Namespace) -> Job:
    """Return how items are run: a dry run has toys, on the CPU, and leaves nothing behind."""
    folder = arguments.output or (Path(tempfile.mkdtemp()) if arguments.dry_run else FOLDER)
    device = arguments.device or ("cpu" if arguments.dry_run else "cuda")
    return Job(device, folder, arguments.dry_run, arguments.fresh, arguments.gather)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.gpu_day", description=__doc__)
    parser.add_argument("--minutes", type=float, default=9, help="of this call, imports included; 9 by default")
    parser.add_argument("--items", default="", metavar="GROUPS", help=f"what is run, in order: {', '.join(GROUPS)}")
    parser.add_argument("--only", default="", metavar="PATTERN", help="regular expression, found in names of items")
    parser.add_argument("--again", choices=("failed", "all"), help="forget results, of --only where it is given")
    parser.add_argument("--list", action="store_true", help="print the items, their seconds, and what is done")
    parser.add_argument("--estimate", action="store_true", help="compare peaks with estimates: needs no GPU")
    parser.add_argument("--summary", action="store_true", help="print the figures with their goals")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="print gathered files as Markdown, run nothing")
    parser.add_argument("--gather", type=Path, metavar="FILE", help="write all results into one file, after each item")
    parser.add_argument("--scatter", type=Path, metavar="FILE", help="read such a file back")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help=f"of the results, {FOLDER}")
    parser.add_argument("--device", choices=("cuda", "sim", "cpu"), help="cuda by default; with --dry-run cpu")
    parser.add_argument("--dry-run", action="store_true", help="toys; results go to a temporary folder")
    parser.add_argument("--fresh", action="store_true", help="start each process anew instead of forking it")
    parser.add_argument("--work", help=argparse.SUPPRESS)  # the process of one item, under --fresh
    arguments = parser.parse_args()
    try:
        re.compile(arguments.only)
    except re.error as error:
        parser.error(f"--only: {error}")
    if unknown := set(filter(None, arguments.items.split(","))) - set(GROUPS):
        parser.error(f"--items: no group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    return arguments


def print_list(items: list[Item], folder: Path) -> None:
    """Print each item with its estimate, the sum so far, and its state."""
    total, longest = 0.0, 0.0  # of those that share, the longest counts
    for item in items:
        total += max(0.0, item.estimate - longest) if item.shares else item.estimate
        longest = max(longest, item.estimate) if item.shares else 0.0
        result = results.read(folder, item.name)
        state = "" if result is None else f"{result['status']}{', errors' * results.has_errors(result)}"
        print(f"{item.name:<44} {item.estimate:6.0f} s {total / 60:6.1f} min  {'shares  ' * item.shares}{state}")


def forget(items: list[Item], folder: Path, again: str | None) -> None:
    """Remove results that are wanted anew: all of them, or rows with an error and those that differ."""
    for item in items:
        result = results.read(folder, item.name)
        if again == "all" and result is not None:
            results.path_of(folder, item.name).unlink()
        elif again == "failed" and result is not None and results.has_errors(result):
            good = [row for row in result["rows"] if "error" not in row and row.get("is_met", True)]
            results.write(folder, item.name, {"status": "cut", "rows": good, "at": None})


if __name__ == "__main__":
    main()
