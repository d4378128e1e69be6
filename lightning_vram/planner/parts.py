"""Features in a plan: class, arguments and exactness."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from importlib import import_module
from itertools import starmap
from typing import Any, Literal

Place = Literal["callbacks", "plugins", "strategy"]


class Exactness(IntEnum):
    """How trained weights compare with the baseline."""

    EXACT = 0  # bit-exact
    LOSSLESS = 1  # sums in another order
    ANY = 2  # gradients, moments or frozen weights differ by a bounded error


LEVELS = {"exact": Exactness.EXACT, "lossless": Exactness.LOSSLESS, "any": Exactness.ANY}


@dataclass(frozen=True)
class Part:
    """A feature, as in a configuration of LightningCLI."""

    class_path: str
    init_args: Mapping[str, Any] = field(default_factory=dict)
    place: Place = "callbacks"  # argument of the Trainer
    exactness: Exactness = Exactness.EXACT
    note: str = ""  # what it does, in a few words
    replaces: tuple[str, ...] = ()  # arguments of the Trainer

    @property
    def name(self) -> str:
        """The name of the class."""
        return self.class_path.rpartition(".")[2]

    def make(self) -> Any:
        """Create the object."""
        module, _, name = self.class_path.rpartition(".")
        return getattr(import_module(module), name)(**self.init_args)

    def __str__(self) -> str:
        arguments = ", ".join(starmap(_short, self.init_args.items()))
        return f"{self.name}({arguments})" if arguments else self.name


def _short(name: str, value: Any) -> str:
    if value is True:
        return name
    return f"{name}={'+'.join(map(str, value)) if isinstance(value, list | tuple) else value}"
