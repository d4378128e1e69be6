"""Features, combinations of them (schemes), what their steps need, and the result of a search."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from importlib import import_module
from textwrap import indent
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]

from lightning_vram.core.host.memory import margin_bytes
from lightning_vram.estimation.fake_trainer import as_list
from lightning_vram.estimation.step_time import StepTime

Place = Literal["callbacks", "plugins", "strategy"]


class Exactness(IntEnum):
    """How trained weights compare with the baseline."""

    EXACT = 0  # bit-exact
    LOSSLESS = 1  # sums in another order
    ANY = 2  # gradients, moments or frozen weights differ by a bounded error

    @property
    def results(self) -> str:
        """A word for tables."""
        return ("exact", "lossless", "approximate")[self]


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

    def to_code(self) -> str:
        """Return it in Python."""
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in self.init_args.items())})"

    def __str__(self) -> str:
        texts = (
            name if value is True else f"{name}={'+'.join(value) if isinstance(value, list | tuple) else value}"
            for name, value in self.init_args.items()
        )
        return f"{self.name}({', '.join(texts)})" if self.init_args else self.name


@dataclass(frozen=True)
class Scheme:
    """Features in addition to those of the user's Trainer."""

    parts: tuple[Part, ...] = ()  # in the order of the text

    def __add__(self, part: Part) -> "Scheme":
        return Scheme((*self.parts, part))

    def __str__(self) -> str:
        return " + ".join(map(str, self.parts)) or "baseline"

    @property
    def exactness(self) -> Exactness:
        """That of the least exact part."""
        return max((part.exactness for part in self.parts), default=Exactness.EXACT)

    def trainer_kwargs(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments of a Trainer: the user's own, and new objects of the parts."""
        arguments = dict(own)
        for part in self.parts:
            for name in part.replaces:
                arguments.pop(name, None)
            if part.place == "strategy":
                arguments["strategy"] = part.make()
            else:
                arguments[part.place] = [*as_list(arguments.get(part.place)), part.make()]
        return arguments

    def to_code(self) -> str:
        """Return arguments of a Trainer in Python.

        Example:
            >>> Scheme((Part("lightning_vram.MicroBatching", {"size": 4}),)).to_code()
            'callbacks=[MicroBatching(size=4)]'
        """
        texts = [f"{name}=None" for part in self.parts for name in part.replaces]
        for place in dict.fromkeys(part.place for part in self.parts):
            made = ", ".join(part.to_code() for part in self.parts if part.place == place)
            texts.append(f"{place}={made}" if place == "strategy" else f"{place}=[{made}]")
        return ", ".join(texts)

    def to_yaml(self) -> str:
        """Return a section of a configuration for LightningCLI, with a comment for each part.

        Callbacks and plugins are appended (``callbacks+``) to those of earlier files.
        """
        text = "".join(f"  {name}: null  # replaced by {part.name}\n" for part in self.parts for name in part.replaces)
        for place, key in (("strategy", "strategy"), ("plugins", "plugins+"), ("callbacks", "callbacks+")):
            entries = [_text_of(part) for part in self.parts if part.place == place]
            if entries:
                text += "".join([f"  {key}:\n", *entries])
        return f"trainer:\n{text}" if text else "trainer: {}\n"


def _text_of(part: Part) -> str:
    entry: dict[str, Any] = {"class_path": part.class_path}
    if part.init_args:
        entry["init_args"] = dict(part.init_args)
    made = entry if part.place == "strategy" else [entry]
    text: str = yaml.safe_dump(made, sort_keys=False, default_flow_style=False, width=math.inf, allow_unicode=True)
    note = f"# {part.note[:1].upper()}{part.note[1:]}.\n" if part.note else ""
    return indent(note + text, " " * 4)


@dataclass(frozen=True)
class Measured:
    """Memory and time of a step of one configuration."""

    scheme: Scheme  # the configuration that was traced
    needed_bytes: int  # device memory
    activation_bytes: int  # peak of activations
    time: StepTime  # of the step, modelled
    states_bytes: int = 0  # weights, gradients and optimizer state at the peak
    peak: str = ""  # its place, in a few words
    layers: str = ""  # table of the decisions per layer, for a budget
    host_bytes: int = 0  # peak of a strategy on the host of a node

    @property
    def seconds(self) -> float:
        """Modelled step time in seconds."""
        return self.time.seconds


@dataclass(frozen=True)
class Workload:
    """Budgets and batch of a plan."""

    budget_bytes: int  # device memory
    batch_size: int = 0  # N of the batch; 0: unknown
    transfer_bytes_per_s: float = 0.0  # D2H bytes during the forward, for each second of a step
    host_bytes: int | None = None  # host memory of a node; ``None``: unknown

    def fits(self, measured: Measured) -> bool:
        """Whether a step fits device and host."""
        return measured.needed_bytes <= self.budget_bytes and self.fits_host(measured)

    def fits_host(self, measured: Measured) -> bool:
        """Whether it fits the host, including memory that must stay free."""
        return self.host_bytes is None or with_margin(measured.host_bytes) <= self.host_bytes


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    best: Measured | None  # the fastest that fits, if any
    plain: Measured  # the baseline
    tried: tuple[Measured, ...]  # all traced steps, in order

    @property
    def taken(self) -> Measured:
        """The best, or what needs least."""
        return self.best or self.least

    @property
    def least(self) -> Measured:
        """The step that needs least."""
        return min(self.tried, key=lambda measured: measured.needed_bytes)

    def least_of(self, workload: Workload) -> Measured:
        """Return the nearest to fit: if something fits the device, what needs least of the host."""
        for_device = [one for one in self.tried if one.needed_bytes <= workload.budget_bytes]
        return min(for_device, key=lambda measured: measured.host_bytes, default=self.least)

    @property
    def unbeaten(self) -> tuple[Measured, ...]:
        """The Pareto front of memory and time, the fastest first."""
        found: list[Measured] = []
        for one in sorted(self.tried, key=lambda one: (one.seconds, one.needed_bytes)):
            if not found or one.needed_bytes < found[-1].needed_bytes:
                found.append(one)
        return tuple(found)


Measure = Callable[[Scheme], Measured | None]  # traces a step; ``None``: a feature refuses the run


def find_measured(scheme: Scheme, tried: Iterable[Measured]) -> Measured | None:
    """Return the step of a scheme, if it was traced."""
    return next((one for one in tried if one.scheme == scheme), None)


def with_margin(host_bytes: int) -> int:
    """Return the host memory that a run needs, including what must stay free."""
    return host_bytes + margin_bytes(host_bytes)
