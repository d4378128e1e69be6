"""How many small faults in the package the tests find.

``python -m tests.benchmarks.planted_faults --faults 60 --seed 0 -o faults.json`` plants one fault at a time in a clone,
each in another file: a comparison, ``and``, ``not``, a sum, a number or a call that is changed. Faults are drawn from
the package alone, so those of one seed are the same before and after a change of the tests: ``--tests`` names the
checkout whose tests are run. Of the fast tests those of the fault's own folder run, then the contract of callbacks.
"""

import argparse
import ast
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import Queue

import pytest

ROOT = Path(__file__).parents[2]
COMPARISONS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
CALCULATIONS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult}
ELSEWHERE = {  # folders of the package whose code is tested in others as well
    "core": ["techniques/micro_batching", "callbacks/micro_batching"],
    "demos": ["callbacks/test_contract.py", "test_notebook.py"],
    "private_names": ["techniques/sharding", "strategies"],
    "precision": ["techniques/mixed_precision"],
    "report": ["commands", "callbacks/vram_monitor"],
    "startup": ["callbacks/hook_points", "test_package.py"],
}


@dataclass(frozen=True)
class Fault:
    """One expression of the package, and what stands there instead."""

    file: str  # below lightning_vram
    line: int
    old: str
    new: str
    start: int  # bytes from the start of the file
    end: int

    def plant(self, package: Path) -> None:
        file = package / self.file
        text = file.read_bytes()
        file.write_bytes(text[: self.start] + self.new.encode() + text[self.end :])


def faults_of(package: Path, file: Path) -> Iterator[Fault]:
    """Yield the faults that can be planted in a file, messages and annotations left out."""
    text = file.read_bytes()
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in _code(ast.parse(text)):
        changed = _change(deepcopy(node))
        if changed is None:
            continue
        start, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        place = str(file.relative_to(package)), node.lineno
        yield Fault(*place, text[start:end].decode(), changed, start, end)


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "exc", "msg"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST) and not isinstance(node, ast.JoinedStr):
                yield node
                yield from _code(node)


def _change(node: ast.AST) -> str | None:
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            node.ops = [COMPARISONS[type(op)]()]
        case ast.BoolOp(op=op):
            node.op = ast.Or() if isinstance(op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"({ast.unparse(operand)})"
        case ast.BinOp(op=op) if type(op) in CALCULATIONS and not _has_text(node):
            node.op = CALCULATIONS[type(op)]()
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return str(number + 1)
        case ast.Expr(value=ast.Call()):
            return "pass"
        case _:
            return None
    return f"({ast.unparse(node)})"


def _has_text(node: ast.AST) -> bool:
    texts = (part for part in ast.walk(node) if isinstance(part, ast.JoinedStr | ast.Constant))
    return any(isinstance(part, ast.JoinedStr) or isinstance(part.value, str) for part in texts)


def draw(package: Path, num_faults: int, seed: int) -> list[Fault]:
    """Return faults in as many files; long files are drawn more often."""
    found = [fault for file in sorted(package.rglob("*.py")) for fault in faults_of(package, file)]
    random.Random(seed).shuffle(found)
    first = {fault.file: fault for fault in reversed(found)}
    return [fault for fault in found if first[fault.file] == fault][:num_faults]


def tests_of(fault: Fault, tests: Path) -> list[str]:
    """Return what to run: the file of the same name, the folder, that of the callback or technique, the contract."""
    *folders, name = Path(fault.file).with_suffix("").parts
    nearest = ["/".join([*folders[:depth], rest]) for depth in range(len(folders), -1, -1) for rest in (name, "")]
    places = [f"{'/'.join([*folders, 'test_' + name])}.py", *nearest[: 2 * len(folders)]]
    twins = {"techniques": "callbacks", "callbacks": "techniques"}
    if folders and folders[0] in twins and len(folders) > 1:
        places.insert(3, f"{twins[folders[0]]}/{folders[1]}")
    places += [*ELSEWHERE.get((folders or [name])[0], []), f"test_{name}.py", "callbacks/test_contract.py"]
    kept: list[str] = []
    for place in (place.strip("/") for place in places):
        is_whole = place in ("callbacks", "techniques", "private_names") and len(folders) > 1
        if place and not is_whole and (tests / place).exists() and place not in kept:
            kept.append(place)
    return [f"tests/{place}" for place in kept]


def find(fault: Fault, clone: Path, tests: Path, limit_s: float) -> dict[str, object]:
    """Plant a fault in a clone and return what found it; ``None``: nothing."""
    file = clone / "lightning_vram" / fault.file
    before = file.read_bytes()
    fault.plant(clone / "lightning_vram")
    options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    command = [sys.executable, "-m", "pytest", *options, *tests_of(fault, tests / "tests")]
    try:
        returncode, output = _run(command, clone, limit_s)
        lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if returncode == pytest.ExitCode.USAGE_ERROR:  # nothing has run
            raise RuntimeError(output)
        is_found = returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        by = (lines or [f"exit code {returncode}"])[0][:160] if is_found else None
    except subprocess.TimeoutExpired:
        by = "it hangs, or takes too long"
    finally:
        file.write_bytes(before)
    return {**asdict(fault), "found_by": by}


def _run(command: list[str], clone: Path, limit_s: float) -> tuple[int, str]:
    """Run pytest in a session of its own: what hangs is ended with the ranks it has forked."""
    env = {**os.environ, "PYTHONPATH": str(clone)}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=clone, env=env, start_new_session=True, **piped) as run:
        try:
            output, _ = run.communicate(timeout=limit_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    return run.returncode, output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", metavar="FILE:LINE", help="of them only this; may be repeated")
    parser.add_argument("--tests", type=Path, default=ROOT, help="the checkout whose committed tests are run")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=600, help="seconds for the tests of one fault")
    parser.add_argument("-o", type=Path, required=True)
    arguments = parser.parse_args()
    faults = draw(ROOT / "lightning_vram", arguments.faults, arguments.seed)
    if arguments.only:
        faults = [fault for fault in faults if f"{fault.file}:{fault.line}" in arguments.only]
    clones: Queue[Path] = Queue()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.processes) as pool:
        for number in range(arguments.processes):
            clones.put(clone := Path(folder) / str(number))
            subprocess.run(["git", "clone", "-q", str(arguments.tests), str(clone)], check=True)

        def run(fault: Fault) -> dict[str, object]:
            clone = clones.get()
            try:
                result = find(fault, clone, arguments.tests, arguments.limit_s)
            finally:
                clones.put(clone)
            print(f"{fault.file}:{fault.line}  {fault.old!r} -> {fault.new!r}: {result['found_by']}", flush=True)
            return result

        results = list(pool.map(run, faults))
    found = sum(result["found_by"] is not None for result in results)
    arguments.o.write_text(json.dumps({"faults": len(results), "found": found, "results": results}, indent=1) + "\n")
    print(f"{found} of {len(results)} found")


if __name__ == "__main__":
    main()
