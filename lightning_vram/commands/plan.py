"""The command ``plan``: which features make the run of a configuration fit, with the least overhead?"""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from rich.console import RenderableType

from lightning_vram.commands.options import PLAN, options_of
from lightning_vram.commands.program import DOES_NOT_FIT, PROGRAM, fail
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.units import parse_limit
from lightning_vram.planner.plan import PlanError, budget_bytes_of, level_of
from lightning_vram.report.pictures import check_picture_path
from lightning_vram.report.plan import ShownPlan, plan_memory, plan_table
from lightning_vram.report.values import miss_values, plan_values

_MARK = f"# Made by `{PROGRAM} {PLAN}`. Run: "
_EXAMPLE = "plan.yaml"
_TYPED = {"budget": "budget", "host_memory": "host_memory", "allow": "allow", "strategy": "trainer.strategy"}
_IN_FIT = {"precision": "trainer.precision", "devices": "trainer.devices", "num_nodes": "trainer.num_nodes"}


class PlanQuestion:
    """What would make a run fit, and cost least."""

    name = PLAN

    def __init__(self, args: Sequence[str]) -> None:
        self._args = args
        self._plan: ShownPlan | None = None
        self._miss: PlanError | None = None
        self._output: str | None = None
        self._plot: str | None = None
        self._as_json, self.exit_code = False, 0

    def check(self, config: Namespace, spec: DeviceSpec) -> None:
        """Refuse a wrong budget, an unknown level of results, and files that cannot be written."""
        budget_bytes_of("--budget", _budget(config.budget), spec)
        if config.host_memory is not None:
            parse_limit(config.host_memory, "--host_memory")
        level_of("--allow", config.allow)
        if config.plot is not None:
            check_picture_path(Path(config.plot), has_page=True)
        if config.output is not None:
            _check_output(Path(config.output), fit_arguments(self._args))

    def ask(self, config: Namespace, module: LightningModule, batch: Any, **arguments: Any) -> None:
        """Plan, draw and write. Where nothing fits, keep the error, which names alternatives."""
        self._output, self._plot, self._as_json = config.output, config.plot, config.json
        given = {"budget": _budget(config.budget), "host_memory": config.host_memory, "allow": config.allow}
        try:
            self._plan = plan_memory(module, batch, **given, **arguments)
        except PlanError as error:
            self._miss, self.exit_code = error, DOES_NOT_FIT
            return
        if self._plot is not None:
            self._plan.plot(self._plot)
        if self._output is not None:
            Path(self._output).write_text(self._text(), encoding="utf-8")

    def answer(self) -> Iterator[RenderableType]:
        """Return the table, and the configuration if it was not written to a file; or JSON."""
        if self._miss is not None:
            message = _as_options(str(self._miss))
            if not self._as_json:
                fail(message, DOES_NOT_FIT)
            yield json.dumps({**miss_values(self._miss), "message": message}, indent=2)
            return
        assert self._plan is not None  # it was asked for
        if self._as_json:
            yield json.dumps(plan_values(self._plan), indent=2)
            return
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
    """Return arguments of ``plan`` as ``fit`` takes them."""
    asked = {f"--{name}": option for name, option in options_of(PLAN).items()}
    asked |= {option.short: option for option in asked.values() if option.short}
    found: list[str] = []
    rest = iter(args)
    for word in rest:
        option, is_joined, value = word.partition("=")
        if option not in asked:
            found.append(word)
            continue
        if not is_joined and asked[option].kind is not bool:
            value = next(rest, "")
        if option[2:] in _IN_FIT:
            found.append(f"--{_IN_FIT[option[2:]]}={value}")
    return found


def _budget(text: str | float | None) -> str | float | None:
    """Read a share, as ``0.5``; what else there is has a unit."""
    return float(text) if isinstance(text, str) and re.fullmatch(r"[01]?\.\d*", text) else text


def _as_options(message: str) -> str:
    """Write arguments of Python, as ``budget='20.00GiB'``, as they are typed."""
    return re.sub(
        rf"\b({'|'.join(_TYPED)})='([^']+)'(?: or '([^']+)')?",
        lambda found: f"--{_TYPED[found[1]]} {' or '.join(filter(None, found.groups()[1:]))}",
        message,
    )


def _check_output(path: Path, arguments: Sequence[str]) -> None:
    """Refuse to write over what is no plan, or over what this plan adds to."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--output: there is no folder '{path.parent}'.")
    if path.resolve() in (Path(word.removeprefix("--config=")).resolve() for word in arguments):
        raise MisconfigurationException(f"--output={path} is a --config of this plan: remove it there.")
    if path.exists() and (path.is_dir() or not path.read_bytes().startswith(_MARK.encode())):
        raise MisconfigurationException(f"--output={path} exists and is not a plan of {PROGRAM}: name another file.")
