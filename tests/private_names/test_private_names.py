"""Private names of torch, Lightning and torchmetrics stand in one folder, each listed there with its versions."""

import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import lightning
import pytest
import torch
import torchmetrics

PACKAGE = Path(__file__).parents[2] / "lightning_vram"
FOLDER = PACKAGE / "private_names"
LISTED = sorted(path for path in FOLDER.rglob("*.py") if path.name != "__init__.py")
LIBRARIES = ("torch", "lightning", "torchmetrics", "jsonargparse")
READERS = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"}  # that get a name as text
NOT_OF_THEM = {  # private by their spelling, of other libraries or documented
    *("_replace", "_fields", "_make", "_asdict", "_getframe"),  # documented: named tuples, frames
    *("_reconstructor", "_popen", "_start_method"),  # Python's: pickles and processes
    *("_no_split_modules", "_initialize_weights"),  # transformers'
}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in {"_", *NOT_OF_THEM}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def defined_in(path: Path) -> frozenset[str]:
    """Private names that ``path`` gives to something itself: functions, classes, attributes, module-level values."""
    found = set()
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
    return frozenset(filter(is_private, found))


@cache
def inherited_in(path: Path) -> frozenset[str]:
    """Private names that classes of ``path`` have from other classes of this package."""
    bases = {base for cls in classes_of(path) for base in cls.__mro__ if base.__module__.startswith("lightning_vram.")}
    return frozenset().union(*map(own_names, bases))


def private_uses(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield each private attribute, import and ``getattr`` in ``path``: its line, and whether it is of ``self``."""
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Attribute(attr=name, value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                yield node.lineno, name, True
            case ast.Attribute(attr=name):
                yield node.lineno, name, False
            case ast.Import(names=aliases):
                yield from ((node.lineno, part, False) for alias in aliases for part in alias.name.split("."))
            case ast.ImportFrom(module=module, names=aliases):
                yield from ((node.lineno, part, False) for part in (module or "").split("."))
                yield from ((node.lineno, alias.name, False) for alias in aliases)
            case ast.Call(func=ast.Name(id=called), args=args) if called in READERS:
                keys = [key.value for key in args if isinstance(key, ast.Constant) and isinstance(key.value, str)]
                yield from ((node.lineno, part, False) for key in keys for part in key.split("."))


def foreign_uses(path: Path) -> list[str]:
    def is_ours(name: str, is_of_self: bool) -> bool:
        if is_of_self:
            return name in defined_in(path) or name in inherited_in(path)
        return name in defined_in(path) and name not in LISTED_NAMES

    uses = {(line, name) for line, name, is_of_self in private_uses(path) if not is_ours(name, is_of_self)}
    return [f"{path.relative_to(PACKAGE.parent)}:{line}: {name}" for line, name in sorted(uses) if is_private(name)]


def package_files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if FOLDER not in path.parents)


def test_no_file_outside_of_the_folder_uses_a_private_name():
    assert [use for path in package_files() for use in foreign_uses(path)] == []


@cache
def classes_of(path: Path) -> list[type]:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    members = {} if name.endswith("__main__") else vars(importlib.import_module(name))
    return [value for value in members.values() if isinstance(value, type) and value.__module__ == name]


@cache
def class_texts(path: Path) -> dict[str, str]:
    """Classes of a file by name; Python's own ``getsource`` reads the file again for each."""
    lines, texts = path.read_text().splitlines(), defaultdict(str)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ClassDef):
            texts[node.name] += "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return texts


@cache
def own_names(cls: type) -> frozenset[str]:
    """Private names of a class: its members, annotations and the attributes that its methods set."""
    names = set(vars(cls)) | set(vars(cls).get("__annotations__", {}))
    with suppress(OSError, TypeError):  # written in C
        text = class_texts(Path(inspect.getsourcefile(cls) or "")).get(cls.__name__, "")
        names |= set(re.findall(r"\bself\.(_\w+)\s*(?::[^=\n]+)?=[^=]", text))
    return frozenset(filter(is_private, names))


def is_of_a_library(cls: type) -> bool:
    return cls.__module__.split(".")[0] in LIBRARIES


HARMLESS = {"_abc_impl", "_backward_cls", "_is_protocol"}  # made by metaclasses and Protocol, for each class


def test_no_class_overrides_a_private_name_of_a_class_it_derives_from():
    overridden = []
    for path in package_files():
        for cls in classes_of(path):
            foreign = set().union(*(own_names(base) for base in cls.__mro__ if is_of_a_library(base)))
            names = (own_names(cls) & foreign) - HARMLESS
            overridden += [f"{cls.__module__}.{cls.__qualname__}: {name}" for name in sorted(names)]
    assert overridden == []


class Entry(NamedTuple):
    file: str
    name: str
    versions: str

    @property
    def library(self) -> ModuleType:
        first = self.name.partition(".")[0]
        by_file = {"lightning.py": lightning, "metrics.py": torchmetrics}
        return {"torch": torch, "lightning": lightning, "torchmetrics": torchmetrics}.get(
            first, by_file.get(self.file, torch)
        )


def read_tables() -> Iterator[Entry]:
    """Read ``| `name`, `name` | what for | versions | without it |`` below ``## file.py`` and ``### `prefix` ``."""
    file = prefix = ""
    for line in (FOLDER / "README.md").read_text().splitlines():
        if line.startswith("## "):
            file, prefix = line.removeprefix("## "), ""
        elif line.startswith("### "):
            prefix = line.removeprefix("### ").strip("`") + "."
        elif line.startswith("| `"):
            names, *parts = [cell.strip() for cell in line.strip("|").split(" | ")]
            assert len(parts) == 3, f"{file}: | `name` | what for | versions | without it |, got {line!r}"
            assert all(parts), line
            assert re.fullmatch(r"(\d\.\d+ )?-( \d\.\d+)?", parts[1]), f"{line!r}: versions are a range"
            yield from (Entry(file, prefix + name, parts[1]) for name in re.findall(r"`([\w.]+)`", names))


ENTRIES = list(read_tables())
LISTED_NAMES = {entry.name.rpartition(".")[2] for entry in ENTRIES}
DISPATCHER = {"dispatch", "operators", "operator_calls", "operator_names", "fakes", "compiled", "partitioner"}


def table_of(path: Path) -> str:
    """Return the file whose table lists the names of ``path``, which is to become a part of that file."""
    folder = path.parent.name
    if path.stem in DISPATCHER or folder == "cuda":
        return "dispatcher.py"
    if path.stem == "distributed":
        return "fsdp2.py"
    if folder == "lightning" and path.stem in {"compile", "metrics"}:
        return {"compile": "torch.py", "metrics": "metrics.py"}[path.stem]
    return path.name if path.parent == FOLDER else f"{folder}.py"


def test_each_file_has_a_table():
    assert {entry.file for entry in ENTRIES} == set(map(table_of, LISTED))


@pytest.mark.parametrize("path", LISTED, ids=lambda path: path.relative_to(FOLDER).as_posix())
def test_every_private_name_that_a_file_of_the_folder_uses_is_in_its_table(path):
    listed = {part for entry in ENTRIES if entry.file == table_of(path) for part in entry.name.split(".")}
    own = {name for name in defined_in(path) if name not in listed}
    used = {name for _, name, _ in private_uses(path) if is_private(name)} - own
    assert sorted(used - listed) == []


def in_range(entry: Entry) -> bool:
    here = tuple(map(int, entry.library.__version__.split(".")[:2]))
    since, until = (tuple(map(int, part.split("."))) if part.strip() else None for part in entry.versions.split("-"))
    return (since is None or since <= here) and (until is None or here <= until)


def exists(dotted: str) -> bool | None:
    """Whether a dotted path leads somewhere; ``None`` if it begins with no module, as attributes of graph nodes do."""
    parts = dotted.split(".")
    if parts[0] not in LIBRARIES:
        return None
    value: Any = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], 2):
        if isinstance(value, ModuleType) and not hasattr(value, part):
            try:
                importlib.import_module(".".join(parts[:place]))
            except ImportError:
                return False
        if hasattr(value, part):
            value = getattr(value, part)
        else:
            return isinstance(value, type) and any(part in _words(base) for base in value.__mro__)
    return True


@cache
def _words(cls: type) -> frozenset[str]:
    try:
        return frozenset(re.findall(r"\w+", inspect.getsource(cls)))
    except (OSError, TypeError):
        return frozenset(dir(cls))


def test_what_is_listed_for_this_version_is_there():
    here = {entry.name: exists(entry.name) for entry in ENTRIES if in_range(entry)}
    assert [name for name, is_there in here.items() if is_there is False] == []
    assert sum(map(bool, here.values())) > 100  # of which the test knows more than that they have no path
