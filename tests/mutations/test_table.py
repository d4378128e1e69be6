"""No wait of the package lacks a mutation, but for those that are listed with a reason."""

import ast
from collections.abc import Iterator
from pathlib import Path

from mutations.exceptions import EXCEPTIONS
from mutations.table import MUTATIONS

import lightning_vram

ROOT = Path(lightning_vram.__file__).parent
NAMES = {
    *("wait", "wait_event", "wait_stream", "synchronize", "query", "record_event", "record_stream"),
    *("precede", "note_read", "wait_for_copies", "wait_for_writes"),  # our own
    *("wait_for_gradients", "await_reduce_stream"),
}


def waits() -> Iterator[tuple[str, int, str]]:
    """Module, line and its text, of each call that waits, or notes what to wait for, and of each late copy."""
    for path in sorted(ROOT.rglob("*.py")):
        module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Call):
                continue
            is_wait = isinstance(node.func, ast.Attribute) and node.func.attr in NAMES
            if is_wait or any(keyword.arg == "non_blocking" for keyword in node.keywords):
                yield module, node.lineno, text.splitlines()[node.lineno - 1].strip()


def test_each_wait_has_its_mutation_or_a_reason():
    changed = {
        (mutation.place.partition(":")[0], line)
        for mutation in MUTATIONS
        for line in range(mutation.lines[0], mutation.lines[1] + 1)
    }

    found = {(module, text) for module, line, text in waits() if (module, line) not in changed}

    assert sorted(found - EXCEPTIONS.keys()) == []
    assert sorted(EXCEPTIONS.keys() - found) == []
