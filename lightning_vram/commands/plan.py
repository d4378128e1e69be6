"""The command ``plan``: which parts make the run of a configuration fit, at the least cost?"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import RenderableType

from lightning_vram.commands.parser import PROGRAM
from lightning_vram.commands.question import OPTIONS
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.units import parse_limit
from lightning_vram.planner.plan import budget_bytes_of, level_of
from lightning_vram.report.pictures import check_picture_path
from lightning_vram.report.plan import ShownPlan, plan_table

PLAN = "plan"
_MARK = f"# Made by `{PROGRAM} {PLAN}`. Run: "
_EXAMPLE = "plan.yaml"
_OWN_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "budget": (
        int | float | str | None,
        None,
        "GPU memory the run may use, such as 24GiB, or a share of it, such as 0.5. Default: all of it.",
    ),
    "host_memory": (
        int | str | None,
        None,
        "Host memory of each node, such as 128GiB. Strategies that need more are not used.",
    ),
    "allow": (
        str,
        "exact",
        "Trained weights: exact (bitwise identical), lossless (up to rounding) or any (approximate).",
    ),
    "plot": (
        str | None,
        None,
        "File for the picture of memory against step time: .png, .svg or .pdf. Default: next to the plan.",
    ),
}
_OUTPUT = ("-o", "--output")
_IN_FIT = {"precision": "trainer.precision", "devices": "trainer.devices", "num_nodes": "trainer.num_nodes"}


class PlanQuestion:
    """What would make a run fit, and cost least.

    Args:
        plan_memory: Called with module, batch, the arguments of a question by their names, ``budget``,
            ``host_memory`` and ``allow``.
        args: Arguments of the command, to say how the plan is run.
    """

    name = verb = PLAN
    description = "Find the features that make a run fit a GPU memory budget, with the least overhead."

    def __init__(self, plan_memory: Callable[..., ShownPlan], args: Sequence[str]) -> None:
        self._plan_memory = plan_memory
        self._args = args
        self._plan: ShownPlan | None = None
        self._output: str | None = None
        self._plot: str | None = None

    def add_arguments(self, parser: LightningArgumentParser) -> None:
        """Add what is asked for, and where it is written."""
        for name, (kind, default, text) in _OWN_OPTIONS.items():
            parser.add_argument(f"--{name}", type=kind, default=default, help=text)
        parser.add_argument(*_OUTPUT, type=str | None, default=None, help="YAML file for the plan, such as plan.yaml.")

    def check(self, config: Namespace, spec: DeviceSpec) -> None:
        """Refuse a budget that is none, results that nobody knows, and files that cannot be written."""
        budget_bytes_of("--budget", config.budget, spec)
        if config.host_memory is not None:
            parse_limit(config.host_memory, "--host_memory")
        level_of("--allow", config.allow)
        if config.plot is not None:
            check_picture_path(Path(config.plot))
        if config.output is not None:
            _check_output(Path(config.output), fit_arguments(self._args))

    def ask(self, config: Namespace, module: LightningModule, batch: Any, **arguments: Any) -> None:
        """Plan, draw and write."""
        self._output, self._plot = config.output, config.plot or _beside(config.output)
        given = {name: config[name] for name in ("budget", "host_memory", "allow")}
        self._plan = self._plan_memory(module, batch, **given, **arguments)
        if self._plot is not None:
            self._plan.plot(self._plot)
        if self._output is not None:
            Path(self._output).write_text(self._text(), encoding="utf-8")

    def answer(self) -> Iterator[RenderableType]:
        """Return the table, and the configuration if it was not written to a file."""
        assert self._plan is not None  # it was asked for
        yield plan_table(self._plan)
        if self._plot is not None:
            yield f"\n{self._plot}: picture of memory against step time."
        if self._output is not None:
            yield f"\n{self._output}: the plan. Run: {self._command()}"
        elif self._plan.is_needed:
            yield f"\n{self._text()}\nSave this as {_EXAMPLE}, or add -o {_EXAMPLE}, and run: {self._command()}"

    def _text(self) -> str:
        assert self._plan is not None
        return f"{_MARK}{self._command()}\n{self._plan.to_yaml()}"

    def _command(self) -> str:
        return shlex.join([PROGRAM, "fit", *fit_arguments(self._args), "--config", self._output or _EXAMPLE])


def fit_arguments(args: Sequence[str]) -> list[str]:
    """Return arguments of ``plan`` as ``fit`` takes them.

    Args:
        args: Of ``plan``.
    """
    asked = {*(f"--{name}" for name in (*OPTIONS, *_OWN_OPTIONS)), *_OUTPUT}
    found: list[str] = []
    rest = iter(args)
    for word in rest:
        option, is_joined, value = word.partition("=")
        if option not in asked:
            found.append(word)
            continue
        value = value if is_joined else next(rest, "")
        if option[2:] in _IN_FIT:
            found.append(f"--{_IN_FIT[option[2:]]}={value}")
    return found


def _beside(output: str | None) -> str | None:
    """Return where the picture of a plan goes, if it can be drawn."""
    return None if output is None or find_spec("matplotlib") is None else str(Path(output).with_suffix(".png"))


def _check_output(path: Path, arguments: Sequence[str]) -> None:
    """Refuse to write over what is no plan, or over what this plan adds to."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--output: there is no folder '{path.parent}'.")
    if path.resolve() in (Path(word.removeprefix("--config=")).resolve() for word in arguments):
        raise MisconfigurationException(f"--output={path} is a --config of this plan: remove it there.")
    if path.exists() and (path.is_dir() or not path.read_bytes().startswith(_MARK.encode())):
        raise MisconfigurationException(f"--output={path} exists and is not a plan of {PROGRAM}: name another file.")
