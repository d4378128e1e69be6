"""Names of torch that the package uses on an accelerator exist, and calls of them bind. None of them runs without one.

``torch.cuda``, ``torch.accelerator``, streams and events are followed through variables, as far as one file shows it.
``.ci/versions`` runs this with the oldest and the newest torch.
"""

import ast
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

PACKAGE = Path(__file__).parents[1] / "lightning_vram"
NAMES = re.compile(r"\btorch\b.*\b(cuda|accelerator|Stream|Event|get_device_module)\b")
ROOTS = ("torch.cuda", "torch.accelerator", "torch.Stream", "torch.Event", "torch.get_device_module")


@dataclass(frozen=True)
class Found:
    """What an expression is.

    Attributes:
        path: As it could be written, such as ``torch.cuda.Stream.record_event``.
        value: What is there; for an object that only a run has, its class.
        is_instance: Whether it is such an object.
    """

    path: str
    value: Any
    is_instance: bool = False


RESULTS = {
    "torch.get_device_module": Found("torch.cuda", torch.cuda),  # other devices' modules follow CUDA's
    "torch.accelerator.current_stream": Found("torch.Stream", torch.Stream, is_instance=True),
    "torch.cuda.current_stream": Found("torch.cuda.Stream", torch.cuda.Stream, is_instance=True),
    "torch.Stream.record_event": Found("torch.Event", torch.Event, is_instance=True),
    "torch.cuda.Stream.record_event": Found("torch.cuda.Event", torch.cuda.Event, is_instance=True),
}
"""What calls return, by the path of what is called; of a class, an instance."""
if hasattr(torch._C, "_cudart"):  # not in a build for the CPU
    RESULTS["torch.cuda.cudart"] = Found("torch.cuda.cudart()", torch._C._cudart)
BASES = {"torch.cuda.Stream": torch.Stream, "torch.cuda.Event": torch.Event}  # which a build for the CPU leaves out


class TorchNames(ast.NodeVisitor):
    """Follows names of torch through the text of a file.

    Attributes:
        paths: All that were looked up.
        errors: Names that do not exist and calls that do not bind, with their lines.
    """

    def __init__(self, text: str) -> None:
        self.paths: set[str] = set()
        self.errors: set[str] = set()
        self._known: dict[str, Found] = {}  # variables and attributes of self
        self._returned: dict[str, Found] = {}  # by functions of the file
        tree = ast.parse(text)
        for _ in range(2):  # functions may be called above their definition
            self.visit(tree)

    def find(self, node: ast.AST | None) -> Found | None:
        """Return what an expression is; ``None``: not known, or of no interest."""
        match node:
            case ast.Name(id="torch"):
                return Found("torch", torch)
            case ast.Name() | ast.Attribute() if (known := self._known.get(ast.unparse(node))) is not None:
                return known
            case ast.Attribute(value=value, attr=name) if (owner := self.find(value)) is not None:
                return self._look_up(owner, name, node.lineno)
            case ast.Call(func=ast.Name(id=name)):
                return self._returned.get(name)
            case ast.Call(func=function) if (called := self.find(function)) is not None:
                if isinstance(called.value, type) and not called.is_instance:
                    return Found(called.path, called.value, is_instance=True)
                return RESULTS.get(called.path)
            case ast.IfExp(body=one, orelse=other) | ast.BinOp(left=one, op=ast.BitOr(), right=other):
                return self.find(one) or self.find(other)
        return None

    def _look_up(self, owner: Found, name: str, line: int) -> Found | None:
        path = f"{owner.path}.{name}"
        if not path.startswith(ROOTS):
            return None
        self.paths.add(path)
        for value in (owner.value, BASES.get(path.rpartition(".")[0])):
            if hasattr(value, name):
                return Found(path, getattr(value, name))
        self.errors.add(f"{line}: {path} does not exist")
        return None

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.find(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        called = self.find(node.func)
        if called is None or called.is_instance or not callable(called.value):
            return
        owner = self.find(node.func.value) if isinstance(node.func, ast.Attribute) else None
        try:
            signature = inspect.signature(called.value)
        except ValueError:  # built in, without a signature
            return
        given = [part for part in node.args if not isinstance(part, ast.Starred)]
        named = {keyword.arg: keyword for keyword in node.keywords if keyword.arg is not None}
        is_whole = len(given) + len(named) == len(node.args) + len(node.keywords)
        try:
            (signature.bind if is_whole else signature.bind_partial)(
                *(["self"] if owner is not None and owner.is_instance else []), *given, **named
            )
        except TypeError as error:
            self.errors.add(f"{node.lineno}: {called.path}: {error}")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside = self._known
        self._known = dict(outside)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self._annotate(argument.arg, argument.annotation)
        self.generic_visit(node)
        if isinstance(node.body[-1], ast.Return) and (found := self.find(node.body[-1].value)) is not None:
            self._returned[node.name] = found
        self._known = outside | {name: found for name, found in self._known.items() if name.startswith("self.")}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outside = self._known
        self._known = {name: found for name, found in outside.items() if not name.startswith("self.")}
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                self._annotate(f"self.{part.target.id}", part.annotation)
        self.generic_visit(node)
        self._known = outside

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module == "torch":
            for alias in node.names:
                self._know(alias.asname or alias.name, self._look_up(Found("torch", torch), alias.name, node.lineno))

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        found = self.find(node.value)
        for target in node.targets:
            self.visit(target)
            self._know(ast.unparse(target), found)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self._annotate(ast.unparse(node.target), node.annotation)
        if (found := self.find(node.value)) is not None:
            self._know(ast.unparse(node.target), found)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):  # of a loop, say
            self._know(node.id, None)

    def _annotate(self, name: str, annotation: ast.expr | None) -> None:
        found = self.find(annotation)
        is_class = found is not None and isinstance(found.value, type)
        self._know(name, Found(found.path, found.value, is_instance=True) if is_class else None)

    def _know(self, name: str, found: Found | None) -> None:
        if found is None:
            self._known.pop(name, None)
        else:
            self._known[name] = found


@pytest.fixture(scope="module")
def files() -> dict[Path, TorchNames]:
    texts = {path: path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return {path: TorchNames(text) for path, text in texts.items() if NAMES.search(text)}


def test_names_exist_and_calls_bind(files):
    errors = [f"{path.relative_to(PACKAGE)}:{error}" for path, names in files.items() for error in names.errors]
    assert errors == []


def test_uses_of_the_package_are_found(files):
    found = set().union(*(names.paths for names in files.values()))
    assert found >= {
        "torch.accelerator.current_device_index",
        "torch.accelerator.synchronize",
        "torch.cuda.Stream.stream_id",
        "torch.cuda.Stream.wait_event",  # through self._module and the stream of it
        "torch.cuda.cudart",
        "torch.cuda.max_memory_reserved",  # through a function
        "torch.cuda.mem_get_info",
        "torch.cuda.set_per_process_memory_fraction",
        "torch.Stream.record_event",
    }


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("torch.cuda.memory._snapshots()", "1: torch.cuda.memory._snapshots does not exist"),
        ("torch.accelerator.idle()", "1: torch.accelerator.idle does not exist"),
        ("torch.Stream(d).wait_for(e)", "1: torch.Stream.wait_for does not exist"),
        ("from torch import cuda\ncuda.here()", "2: torch.cuda.here does not exist"),
        ("torch.cuda.mem_get_info(card=0)", "1: torch.cuda.mem_get_info: got an unexpected keyword argument 'card'"),
        ("torch.cuda.set_per_process_memory_fraction()", "missing a required argument: 'fraction'"),
        ("torch.accelerator.empty_cache(1)", "1: torch.accelerator.empty_cache: too many positional arguments"),
        ("x = torch.get_device_module(d)\nx.Stream(d).wait_event()", "2: torch.cuda.Stream.wait_event: missing a"),
        ("def f(e: torch.Event | None):\n    e.halt()", "2: torch.Event.halt does not exist"),
        ("class A:\n    e: torch.Event\n    def f(self):\n        self.e.halt()", "4: torch.Event.halt does not"),
        ("def g():\n    f().halt()\ndef f():\n    return torch.get_device_module(d)", "2: torch.cuda.halt does not"),
    ],
)
def test_a_mistake_is_found(text, error):
    (found,) = TorchNames(text).errors
    assert error in found


@pytest.mark.parametrize(
    "text",
    [
        "torch.cuda.mem_get_info(*a, **b)",
        "torch.cuda.set_per_process_memory_fraction(*a)",
        "getattr(torch.cuda, 'here', None)",
        "x = torch.get_device_module(d)\nfor x in y: x.here()",
        "x = torch.cuda\ndef f(x): x.here()",
        "def f():\n    x = torch.cuda\ndef g():\n    x.here()",
    ],
)
def test_what_is_right_or_not_known_is_no_error(text):
    assert TorchNames(text).errors == set()
