"""Names of torch that the package uses on an accelerator exist: none of them is looked up without one.

``.ci/versions`` runs this with the oldest and the newest torch.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

PACKAGE = Path(__file__).parents[1] / "lightning_vram"
ROOTS = ("torch.cuda.", "torch.accelerator.", "torch.Stream.", "torch.Event.")


def missing_names(text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            paths = [f"torch.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            # what get_device_module() returns follows CUDA's module
            path = ast.unparse(node)
            start, call, end = path.partition("torch.get_device_module(")
            paths = ["torch.cuda" + end.partition(")")[2]] if call and not start else [path]
        else:
            continue
        yield from (f"{node.lineno}: {path}" for path in paths if path.startswith(ROOTS) and not exists(path))


def exists(path: str) -> bool:
    value = torch
    for name in path.split(".")[1:]:
        if not name.isidentifier():
            return True  # of what a call returns
        if not hasattr(value, name):
            return False
        value = getattr(value, name)
    return True


def test_names_exist():
    files = sorted(PACKAGE.rglob("*.py"))
    assert [f"{path}:{name}" for path in files for name in missing_names(path.read_text())] == []


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("torch.cuda.memory._snapshots()", ["1: torch.cuda.memory._snapshots"]),
        ("\ntorch.get_device_module(d).halt()", ["2: torch.cuda.halt"]),
        ("torch.cuda.Stream(d).here, torch.cuda.mem_get_info(), torch.accelerator.synchronize", []),
    ],
)
def test_a_mistake_is_found(text, missing):
    assert list(missing_names(text)) == missing
