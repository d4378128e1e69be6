"""One place of the package made wrong, in this process and for a while."""

import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import Tensor

Workload = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Mutation:
    """A wait that is taken out, or comes too early."""

    place: str  # module within the package and function in it: "core.host.transfers:StreamCopies.send"
    old: str  # lines of the function, without their common indentation
    workload: Workload  # a program that is wrong then
    new: str = "pass"  # what the lines become

    @property
    def lines(self) -> tuple[int, int]:
        """The first and the last line of the module that it changes, counted from 1."""
        source, first = self._source()
        start = source.index(self._old)
        begin = first + source[:start].count("\n")
        return begin, begin + self._old.rstrip("\n").count("\n")

    @property
    def module(self) -> Any:
        return importlib.import_module(f"lightning_vram.{self.place.partition(':')[0]}")

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Have the function do the wrong thing, for those as well who have imported it by its name."""
        function = self._function()
        right = function.__code__
        function.__code__ = self._compile()
        try:
            yield
        finally:
            function.__code__ = right

    def _function(self) -> Any:
        found = self.module
        for part in self.place.partition(":")[2].split("."):
            found = vars(found)[part]
        return _bare(found)

    def _source(self) -> tuple[str, int]:
        """The function, its first line counted from 1."""
        lines, first = inspect.getsourcelines(self._function())
        return textwrap.dedent("".join(lines)), first

    @property
    def _old(self) -> str:
        """As it is indented there."""
        source, _ = self._source()
        first = self.old.partition("\n")[0]
        indents = {line[: len(line) - len(line.lstrip())] for line in source.splitlines() if line.strip() == first}
        found = {text for indent in indents if (text := textwrap.indent(self.old, indent)) in source}
        assert len(found) == 1, f"{self.place} has no such lines, or has them twice:\n{self.old}"
        (old,) = found
        assert source.count(old + "\n") == 1, f"{self.place} has these lines twice:\n{self.old}"
        return old

    def _compile(self) -> CodeType:
        source, old = self._source()[0], self._old
        new = textwrap.indent(self.new, old[: len(old) - len(old.lstrip())])
        # `super()` asks for the class in a variable of an outer function.
        name = self.place.rpartition(".")[2].rpartition(":")[2]
        text = f"def outer(__class__):\n{textwrap.indent(source.replace(old, new), '    ')}\n    return {name}"
        namespace: dict[str, Any] = {}
        exec(compile(text, f"<mutation of {self.place}>", "exec"), vars(self.module), namespace)
        return _bare(namespace["outer"](None)).__code__


def _bare(found: Any) -> Any:
    """The function under its decorators."""
    return inspect.unwrap(found.fget if isinstance(found, property) else found)
