"""The commands ``estimate`` and ``plan``, which run the classes of a configuration without training."""

import json
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar

import torch
import yaml  # type: ignore[import-untyped]
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, instantiate_class
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import RenderableType
from torch import Tensor
from typing_extensions import override

from lightning_vram.argument_checks import check_choice
from lightning_vram.commands.errors import PARSER_MODE, CommandParser, is_complete_message, where
from lightning_vram.commands.options import DOES_NOT_FIT, ESTIMATE, PLAN, PROGRAM, fail, options_of
from lightning_vram.estimation.estimate import spec_of
from lightning_vram.memory.estimate.device_spec import DeviceSpec, find_device
from lightning_vram.memory.estimate.fake_device import UntouchedWeights
from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.memory.units import parse_limit
from lightning_vram.planner.plan import MemoryPlan, PlanError, budget_bytes_of
from lightning_vram.planner.scheme import LEVELS
from lightning_vram.report.drawing import check_picture_path
from lightning_vram.report.estimate import ShownEstimate, estimate_memory, estimate_table
from lightning_vram.report.plan import ShownPlan, choices, plan_memory, plan_table
from lightning_vram.report.progress import ProgressDisplay

_DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")


def make_batch(shape: Any, dtype: Any = "float32", high: Any = 2) -> Any:
    """Make the tensors of a batch.

    Example:
        >>> images, labels = make_batch([[8, 3, 4, 4], [8]], ["float32", "int64"], high=10)
        >>> images.shape, labels.dtype
        (torch.Size([8, 3, 4, 4]), torch.int64)
    """
    if isinstance(shape, Mapping) and shape:
        return {key: make_batch(shape[key], _part(dtype, key, "dtype"), _part(high, key, "high")) for key in shape}
    if not isinstance(shape, list) or not shape:
        raise ValueError(
            f"batch.shape must be sizes, as in '[8, 3, 224, 224]', or several of them, as in '[[8, 3, 224, 224], [8]]' "
            f"or '{{tokens: [8, 1024]}}', got {shape!r}."
        )
    if all(isinstance(size, list | Mapping) for size in shape):
        made = [make_batch(part, _part(dtype, i, "dtype"), _part(high, i, "high")) for i, part in enumerate(shape)]
        return tuple(made)
    return _make_tensor(shape, dtype, high)


def _make_tensor(shape: list[Any], dtype: Any, high: Any) -> Tensor:
    if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in shape):
        raise ValueError(f"batch.shape must be whole numbers of at least 1, got {shape!r}.")
    if dtype not in _DTYPES:
        raise ValueError(f"batch.dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}.")
    if not isinstance(high, int) or isinstance(high, bool) or high < 1:
        raise ValueError(f"batch.high must be a whole number of at least 1, got {high!r}.")
    kind: torch.dtype = getattr(torch, dtype)
    if kind.is_floating_point or kind is torch.bool:
        return torch.zeros(shape, dtype=kind)
    if high - 1 > torch.iinfo(kind).max:
        raise ValueError(f"batch.high is {high}, more than {dtype} can hold.")
    return torch.randint(high, shape, dtype=kind)


def _part(nest: Any, key: Any, name: str) -> Any:
    """What is said of one tensor: ``nest`` itself, if it is said of all."""
    if not isinstance(nest, list | Mapping):
        return nest
    try:
        return nest[key]
    except (LookupError, TypeError):
        raise ValueError(f"batch.{name} has no entry for tensor {key!r} of batch.shape, got {nest!r}.") from None


class DryRunCommand(ABC):
    """What is asked of a run, and the answer."""

    name: ClassVar[str]
    exit_code = 0

    def __init__(self) -> None:
        self._plot: str | None = None
        self._as_json = False

    def check(self, config: Namespace, spec: DeviceSpec) -> None:
        """Refuse options before anything is made, which takes long."""
        self._as_json, self._plot = config.json, config.plot
        if config.plot is not None:
            check_picture_path(Path(config.plot))

    @abstractmethod
    def ask(self, config: Namespace, module: LightningModule, batch: Any, **arguments: Any) -> None:
        """Find the answer; without a ``batch`` the datamodule or the module makes it. ``arguments`` are of the run."""

    @abstractmethod
    def answer(self) -> Iterator[RenderableType]:
        """Return what is printed; text is printed unchanged."""


class DryRunCLI(LightningCLI):
    """Ask instead of fit."""

    def __init__(self, command: DryRunCommand, args: Sequence[str]) -> None:
        set_parsing_settings(omegaconf_absolute_to_relative_paths=True)  # as for `fit`
        self.is_running = False
        self._command = command
        self._batch: Any = None
        self._device: str | DeviceSpec = ""
        super().__init__(
            args=list(args),
            run=False,
            save_config_callback=None,
            parser_class=CommandParser,
            parser_kwargs={"parser_mode": PARSER_MODE, "prog": f"{PROGRAM} {command.name}"},
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name, option in options_of(self._command.name).items():
            if option.kind is bool:
                parser.add_argument(*option.names(name), action="store_true")
            else:
                parser.add_argument(*option.names(name), type=option.kind, default=option.default)
        # Those of `fit` that mean nothing here: its files are taken as they are.
        parser.add_method_arguments(Trainer, "fit", skip=set(LightningCLI.subcommands()["fit"]))
        parser.add_argument("--compare_with_baseline", type=bool, default=False, help="Of `fit`, ignored here.")

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)  # without a word about sys.argv

    @override
    def before_instantiate_classes(self) -> None:
        config = self.config
        if config.device is None:
            raise MisconfigurationException(
                f"--device is missing: name the GPU to {self._command.name} for, such as --device rtx4090."
            )
        self._device = config.device
        if config.device_memory is not None:
            self._device = _describe_device(config.device, parse_limit(config.device_memory, "--device_memory"))
        self._command.check(config, spec_of(self._device))
        if config.batch.shape is not None:
            self._batch = make_batch(config.batch.shape, config.batch.dtype, config.batch.high)
        if config.precision is not None:
            config.trainer.precision = config.precision
        self.trainer_class = dict  # type: ignore[assignment]  # called with the arguments of a Trainer, which is all we want

    @override
    def instantiate_classes(self) -> None:
        with UntouchedWeights():  # a model that needs a GPU of 80 GB is made on a laptop
            super().instantiate_classes()
        self._make_optimizers_late()

    @override
    def after_instantiate_classes(self) -> None:
        if self._batch is None and self.datamodule is None and not is_overridden("train_dataloader", self.model):
            raise MisconfigurationException(
                "there is no batch: name a datamodule (--data), or give shapes, such as --batch.shape "
                "'[8, 3, 224, 224]', with --batch.dtype and, for integers, --batch.high."
            )
        self.is_running = True
        arguments: dict[str, Any] = self.trainer  # type: ignore[assignment]
        try:
            with ProgressDisplay() as on_progress:
                self._command.ask(
                    self.config,
                    self.model,
                    self._batch,
                    datamodule=self.datamodule if self._batch is None else None,
                    device=self._device,
                    trainer=arguments,
                    devices=_either(self.config.devices, _count_devices(arguments["devices"])),
                    num_nodes=_either(self.config.num_nodes, arguments["num_nodes"]),
                    run_callbacks=self.config.run_callbacks,
                    on_progress=on_progress,
                )
        except Exception as error:
            if self._batch is None or is_complete_message(error):
                raise
            raise MisconfigurationException(
                f"the step fails on the batch of --batch.shape: {type(error).__name__}: {error}. Check --batch.shape, "
                "--batch.dtype and --batch.high: token ids need --batch.dtype int64 and --batch.high with the size of "
                f"the vocabulary.{where(error)}"
            ) from error

    def _make_optimizers_late(self) -> None:
        """Let the optimizer of a configuration be that of whichever copy of the module is asked for it."""
        optimizer, scheduler = self.config_init.get("optimizer"), self.config_init.get("lr_scheduler")
        if not optimizer:
            return

        def configure_optimizers(module: LightningModule) -> Any:
            made = instantiate_class(module.parameters(), optimizer)
            return self.configure_optimizers(module, made, instantiate_class(made, scheduler) if scheduler else None)

        self.model.configure_optimizers = MethodType(configure_optimizers, self.model)


def _describe_device(name: str, memory_bytes: int) -> DeviceSpec:
    """Describe a device of so many bytes: as the known one of that name, if there is one."""
    try:
        return replace(find_device(name), memory_bytes=memory_bytes)
    except ValueError:
        return DeviceSpec(name, memory_bytes)


def _either(given: int | None, of_trainer: int) -> int:
    return of_trainer if given is None else given


def _count_devices(devices: Any) -> int:
    """Read ``trainer.devices``; what stands for those of this machine is one."""
    if isinstance(devices, list):
        return len(devices)
    number = int(devices) if str(devices).isdecimal() else 1
    return max(number, 1)


_OF_ESTIMATE = (
    *("fits", "needed_bytes", "context_bytes", "reserved_bytes", "allocated_bytes", "peak_bytes", "host_bytes"),
    *("world_size", "batch_size", "max_batch_size", "max_sequence_length"),
)


def estimate_values(estimate: MemoryEstimate) -> dict[str, Any]:
    """Return whether a run fits, its totals, and what uses memory at the peak."""
    return {
        "device": estimate.device.name,
        "memory_bytes": estimate.device.memory_bytes,
        **{name: getattr(estimate, name) for name in _OF_ESTIMATE},
        "peak_operator": estimate.peak_op,
        "by_category": {str(name): size for name, size in estimate.by_category.items()},
        "by_phase": {str(name): size for name, size in estimate.by_phase.items()},
        "by_module": dict(estimate.by_module),
        "notes": list(estimate.notes),
    }


def plan_values(plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan, its configuration, and the other choices of its table."""
    return {
        "fits": True,
        "is_needed": plan.is_needed,
        "device": plan.device.name,
        "budget_bytes": plan.budget_bytes,
        "needed_bytes": plan.peak_bytes,
        "host_bytes": plan.host_bytes,
        "step_time_ratio": plan.step_time_ratio,
        "config": yaml.safe_load(plan.to_yaml()),
        "choices": [asdict(choice) for choice in choices(plan)],
    }


def no_plan_values(error: PlanError) -> dict[str, Any]:
    """Return the minimum that was found, and the message with alternatives."""
    return {
        "fits": False,
        "minimum_bytes": error.minimum_bytes,
        "minimum": str(error.least.scheme),
        "message": str(error),
    }


class EstimateCommand(DryRunCommand):
    """Whether a run fits."""

    name = ESTIMATE
    _estimate: ShownEstimate

    @override
    def ask(self, config: Namespace, module: LightningModule, batch: Any, **arguments: Any) -> None:
        self._estimate = estimate_memory(module, batch, **arguments)
        self.exit_code = 0 if self._estimate.fits else DOES_NOT_FIT
        if self._plot is not None:
            self._estimate.plot(self._plot)

    @override
    def answer(self) -> Iterator[RenderableType]:
        if self._as_json:
            yield json.dumps(estimate_values(self._estimate), indent=2)
            return
        yield estimate_table(self._estimate)
        if self._plot is not None:
            yield f"\n{self._plot}: picture of the step."


_MARK = f"# Made by `{PROGRAM} {PLAN}`. Run: "
_EXAMPLE = "plan.yaml"
_TYPED = {"budget": "budget", "host_memory": "host_memory", "allow": "allow", "strategy": "trainer.strategy"}
_IN_FIT = {"precision": "trainer.precision", "devices": "trainer.devices", "num_nodes": "trainer.num_nodes"}


class PlanCommand(DryRunCommand):
    """What would make a run fit, and cost least."""

    name = PLAN
    _plan: ShownPlan

    def __init__(self, args: Sequence[str]) -> None:
        super().__init__()
        self._args = args
        self._error: PlanError | None = None
        self._output: str | None = None

    @override
    def check(self, config: Namespace, spec: DeviceSpec) -> None:
        budget_bytes_of("--budget", _budget(config.budget), spec)
        if config.host_memory is not None:
            parse_limit(config.host_memory, "--host_memory")
        check_choice("--allow", config.allow, LEVELS)
        super().check(config, spec)
        if config.output is not None:
            _check_output(Path(config.output), fit_arguments(self._args))

    @override
    def ask(self, config: Namespace, module: LightningModule, batch: Any, **arguments: Any) -> None:
        """Plan, draw and write. Where nothing fits, keep the error, which names alternatives."""
        self._output = config.output
        given = {"budget": _budget(config.budget), "host_memory": config.host_memory, "allow": config.allow}
        try:
            self._plan = plan_memory(module, batch, **given, **arguments)
        except PlanError as error:
            self._error, self.exit_code = error, DOES_NOT_FIT
            return
        if self._plot is not None:
            self._plan.plot(self._plot)
        if self._output is not None:
            Path(self._output).write_text(self._text(), encoding="utf-8")

    @override
    def answer(self) -> Iterator[RenderableType]:
        if self._error is not None:
            message = _as_options(str(self._error))
            if not self._as_json:
                fail(message, DOES_NOT_FIT)
            yield json.dumps({**no_plan_values(self._error), "message": message}, indent=2)
            return
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
