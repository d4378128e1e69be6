"""Parts of the package as a plan names them: a class, its arguments, and how true its results are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from importlib import import_module
from itertools import starmap
from typing import Any, Literal

Place = Literal["callbacks", "plugins", "strategy"]


class Exactness(IntEnum):
    """How the weights of a run with a part compare with those of a run without it."""

    EXACT = 0  # equal to the bit
    LOSSLESS = 1  # equal in exact arithmetic: sums are rounded in another order
    ANY = 2  # gradients, moments or frozen weights differ by a bounded error


LEVELS = {"exact": Exactness.EXACT, "lossless": Exactness.LOSSLESS, "any": Exactness.ANY}


@dataclass(frozen=True)
class Part:
    """One part, as a configuration of LightningCLI has it."""

    class_path: str  # of its class
    init_args: Mapping[str, Any] = field(default_factory=dict)  # what it is made with
    place: Place = "callbacks"  # which argument of the Trainer it belongs to
    exactness: Exactness = Exactness.EXACT  # of its results
    note: str = ""  # what it does, in a few words, for the reader of a plan
    replaces: tuple[str, ...] = ()  # arguments of the Trainer whose place it takes

    @property
    def name(self) -> str:
        """Its class, without the module."""
        return self.class_path.rpartition(".")[2]

    def make(self) -> Any:
        """Make it."""
        module, _, name = self.class_path.rpartition(".")
        return getattr(import_module(module), name)(**self.init_args)

    def __str__(self) -> str:
        arguments = ", ".join(starmap(_short, self.init_args.items()))
        return f"{self.name}({arguments})" if arguments else self.name


def _short(name: str, value: Any) -> str:
    if value is True:
        return name
    return f"{name}={'+'.join(map(str, value)) if isinstance(value, list | tuple) else value}"
