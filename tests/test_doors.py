"""Rooms are entered by their doors: what ``__init__`` hands on. What lies behind may move without anybody noticing."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_vram
from lightning_vram.techniques.sharding import can_recover

PACKAGE = Path(lightning_vram.__file__).parent
WITH_DOORS = ("callbacks", "optimizers", "precision", "strategies", "techniques")
ROOMS = sorted(
    path.parent
    for floor in WITH_DOORS
    for path in (PACKAGE / floor).rglob("__init__.py")
    if path.parent.parent != PACKAGE
)


def name_of(room: Path) -> str:
    return ".".join(room.relative_to(PACKAGE.parent).parts)


def capability_of(path: Path) -> tuple[str, ...]:
    """Its floor and the outermost room on it."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[:1] if parts[0] == "precision" else parts[:2]


def imported_by(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ImportFrom(module=str(module), names=names, lineno=line) if module.startswith("lightning_vram"):
                yield line, module
                handed_on = getattr(importlib.import_module(module), "__all__", ())
                yield from ((line, f"{module}.{alias.name}") for alias in names if alias.name not in handed_on)
            case ast.Import(names=names, lineno=line):
                yield from ((line, alias.name) for alias in names)


def go_past_doors(path: Path) -> Iterator[str]:
    """Imports of a file behind the door of somebody else's room."""
    for line, name in imported_by(path):
        target = PACKAGE.joinpath(*name.split(".")[1:]).with_suffix(".py")
        is_behind = name.startswith("lightning_vram.") and target.is_file() and target.parent in ROOMS
        if is_behind and capability_of(target) != capability_of(path):
            yield f"{path.relative_to(PACKAGE)}:{line}: {name}"


def test_rooms_are_entered_by_their_doors():
    assert len(ROOMS) > 25
    assert [found for path in sorted(PACKAGE.rglob("*.py")) for found in go_past_doors(path)] == []


@pytest.mark.parametrize("room", ROOMS, ids=name_of)
def test_a_door_says_what_its_room_is_for_and_hands_on_names(room):
    door = importlib.import_module(name_of(room))
    assert door.__doc__
    assert door.__all__
    assert all(hasattr(door, name) for name in door.__all__)


def test_every_folder_has_at_most_fifteen_files():
    sizes = {name_of(path.parent): len(list(path.parent.glob("*.py"))) for path in PACKAGE.rglob("__init__.py")}
    assert {name: size for name, size in sizes.items() if size > 16} == {}  # with __init__.py


def test_a_file_holds_a_topic():
    """Neither a fragment that sends its reader from file to file, nor more than one can keep in mind."""
    lengths = {path.relative_to(PACKAGE): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path: length for path, length in lengths.items() if length > 600} == {}
    assert len(lengths) <= 300


@pytest.mark.slow
@pytest.mark.skipif(not can_recover(), reason="MicroBatching('auto') under FSDP2 needs torch 2.13")
def test_few_files_have_to_be_read_to_follow_a_training_step():
    command = [sys.executable, "-m", "tests.benchmarks.files_per_step", "fsdp_offload", "all four"]
    printed = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True).stdout
    alone, together = ([*map(int, line.split()[-3:])] for line in printed.splitlines()[-2:])
    assert 10 < together[0] <= 35, printed
    assert alone[1] <= 1500, printed  # calls, for 28 parameters
    assert alone[2] <= 700, printed  # changes of file
