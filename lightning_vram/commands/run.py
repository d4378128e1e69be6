"""Commands that make the classes of a configuration: ``fit`` and its like, ``estimate``, ``plan``."""

import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

import torch
import yaml  # type: ignore[import-untyped]
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, instantiate_class
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import RenderableType
from typing_extensions import override

import lightning_vram.public_names  # noqa: F401 - registers strategies, and lets classes be found by short names
from lightning_vram.argument_checks import check_choice, check_positive_int
from lightning_vram.callbacks.auto_vram import AutoVRAM
from lightning_vram.callbacks.slurm_requeue import SlurmJob, SlurmRequeue, check_job
from lightning_vram.callbacks.vram_monitor import VRAMMonitor
from lightning_vram.commands.errors import PARSER_MODE, WHERE, CommandParser, is_complete_message, line_for
from lightning_vram.commands.options import DOES_NOT_FIT, ESTIMATE, PLAN, PROGRAM, fail, is_debugging, options_of
from lightning_vram.estimation.estimate import spec_of
from lightning_vram.estimation.fake_trainer import as_list
from lightning_vram.memory.device.accelerators import configure_allocator, empty_cache
from lightning_vram.memory.device.out_of_memory import is_out_of_memory
from lightning_vram.memory.estimate.device_spec import DeviceSpec, find_device
from lightning_vram.memory.estimate.fake_device import UntouchedWeights
from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.memory.units import parse_limit
from lightning_vram.planner.plan import MemoryPlan, PlanError, budget_bytes_of
from lightning_vram.planner.scheme import LEVELS
from lightning_vram.precision import LeanMixedPrecision
from lightning_vram.private_names.lightning import method_arguments, read_argument
from lightning_vram.report.comparison import FitResult, comparison_table
from lightning_vram.report.drawing import check_picture_path
from lightning_vram.report.estimate import estimate_memory, estimate_table
from lightning_vram.report.plan import choices, plan_memory, plan_table
from lightning_vram.report.progress import show_progress
from lightning_vram.startup import let_through
from lightning_vram.strategies.fsdp_offload import STRATEGY_NAMES
from lightning_vram.techniques.sharded_checkpoints import read_values

_Kind = TypeVar("_Kind")
_OWN_PACKAGE = "lightning_vram"
_STRATEGY = "fsdp_offload"
_SAVES_NO_MEMORY = (VRAMMonitor.__name__, SlurmRequeue.__name__)


class VRAMCLI(LightningCLI):
    """Fit, validate, test or predict with any LightningModule and LightningDataModule, named by class path.

    ``${...}`` works in and across ``--config`` files and follows overrides on the command line. ``fit`` takes
    ``--compare_with_baseline true``: it trains once more without the features of this package, from the same seed, and
    prints peak memory, time per step and equality of the weights side by side.
    """

    is_running = False

    def __init__(self, arguments: list[str], show: Callable[[RenderableType], None]) -> None:
        self._show = show
        about = "Train in a fraction of the GPU memory."
        super().__init__(
            args=arguments,
            parser_class=CommandParser,
            parser_kwargs={"parser_mode": PARSER_MODE, "prog": PROGRAM, "description": about},
            save_config_kwargs={"overwrite": True},
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--compare_with_baseline",
            type=bool,
            default=False,
            help="After fit, train again without lightning_vram, and print both side by side.",
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)  # without a word about sys.argv
        path = self.config[self.config.subcommand].get("ckpt_path") if "subcommand" in self.config else None
        if path is not None and Path(path).is_file():
            read_values(Path(path), weights_only=True)  # a clear error if it is no checkpoint; Lightning reads it next

    @override
    def before_instantiate_classes(self) -> None:
        check_job(SlurmJob.from_environment())

    @override
    def after_instantiate_classes(self) -> None:
        if self.subcommand == "fit" and read_argument(self, "compare_with_baseline"):
            needs = {
                "a seed for both fits, got seed_everything=false. Give a number.": (
                    read_argument(self, "seed_everything") is not False
                ),
                "a lightning_vram.VRAMMonitor among trainer.callbacks, got none.": _find(self, VRAMMonitor),
                "features of lightning_vram to leave out of trainer.callbacks, trainer.plugins or trainer.strategy, "
                "got none.": _leave_out(deepcopy(read_argument(self, "trainer"))),
            }
            for need, found in needs.items():
                if not found:
                    raise MisconfigurationException(f"compare_with_baseline=true needs {need}")
        if _find(self, SlurmRequeue) is None:
            let_through()
        self.is_running = True

    def after_fit(self) -> None:
        """Compare with the baseline if asked to. ``LightningCLI`` calls this."""
        if not read_argument(self, "compare_with_baseline"):
            return
        optimized, picture = _read_result(self), _draw_step(self)
        trainer: Namespace = read_argument(self, "trainer")
        names = _leave_out(trainer)
        if LeanMixedPrecision.__name__ in names:
            trainer.precision = self.trainer.precision  # Lightning's own, so that both compute alike
        if _STRATEGY in names and self.trainer.world_size > 1:
            trainer.strategy = "ddp"
        baseline = self._fit_again()
        if self.trainer.is_global_zero:
            self._show("")
            self._show(comparison_table(baseline, optimized, " and ".join(names)))
            if picture is not None:
                self._show(f"{picture}: picture of the step with lightning_vram.")

    def _fit_again(self) -> FitResult:
        device = self.trainer.strategy.root_device
        del self.trainer, self.model, self.datamodule, self.config_init  # they hold memory that the baseline needs
        empty_cache(device)
        seed_everything(read_argument(self, "seed_everything"), workers=True, verbose=False)
        with tempfile.TemporaryDirectory(prefix=f"{PROGRAM}-") as folder:
            read_argument(self, "trainer").default_root_dir = folder  # where no folder is named
            self.instantiate_classes()
            if self.trainer.is_global_zero:
                self._show("Training again without lightning_vram, for comparison ...")
            try:
                self.trainer.fit(**method_arguments(self, "fit"))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return FitResult()
            return _read_result(self)


def _leave_out(trainer: Namespace) -> list[str]:
    """Remove what saves memory from the arguments of a Trainer, as far as it is of this package; return the names."""
    names = []
    for argument in ("callbacks", "plugins"):
        parts = as_list(trainer[argument])
        names += [name for name in map(_own_name, parts) if name and name not in _SAVES_NO_MEMORY]
        trainer[argument] = [part for part in parts if _own_name(part) in ("", VRAMMonitor.__name__)]
    strategy = trainer.strategy
    if strategy.lower() in STRATEGY_NAMES if isinstance(strategy, str) else _own_name(strategy):
        names, trainer.strategy = [*names, _STRATEGY], "auto"
    return names


def _own_name(part: Any) -> str:
    """Return the name of a class of this package; empty if it is of another."""
    package, _, name = (part.class_path if isinstance(part, Namespace) else "").rpartition(".")
    return name if package.split(".")[0] == _OWN_PACKAGE else ""


def _find(cli: LightningCLI, kind: type[_Kind]) -> _Kind | None:
    callbacks: list[Callback] = cli.trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)


def _draw_step(cli: LightningCLI) -> Path | None:
    """Draw the step that was tracked, in the log folder of the run."""
    monitor, auto = _find(cli, VRAMMonitor), _find(cli, AutoVRAM)
    if monitor is None or monitor.path is None or monitor.timeline is None or cli.trainer.global_rank:
        return None
    path = Path(cli.trainer.log_dir or ".") / "step.html"
    monitor.plot(path, limit=None if auto is None else auto.budget_bytes)
    return path


def _read_result(cli: LightningCLI) -> FitResult:
    """Return what there is to compare."""
    monitor = _find(cli, VRAMMonitor)
    assert monitor is not None  # see after_instantiate_classes
    weights = {name: tensor.detach().cpu().clone() for name, tensor in cli.model.state_dict().items()}
    return FitResult(monitor.peaks.get("train"), monitor.seconds_per_batch, weights)


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
    for size in shape:
        check_positive_int("batch.shape", size)
    check_choice("batch.dtype", dtype, _DTYPES)
    check_positive_int("batch.high", high)
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


class DryRunCLI(LightningCLI):
    """Ask instead of fit: ``estimate`` or ``plan``, by ``name``."""

    answer: Sequence[RenderableType] = ()  # what is printed; text is printed unchanged
    exit_code = 0
    is_running = False
    _batch: Any = None
    _device: str | DeviceSpec = ""

    def __init__(self, name: str, args: list[str]) -> None:
        self._name, self._args = name, args
        super().__init__(
            args=args,
            run=False,
            save_config_callback=None,
            parser_class=CommandParser,
            parser_kwargs={"parser_mode": PARSER_MODE, "prog": f"{PROGRAM} {name}"},
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name, option in options_of(self._name).items():
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
                f"--device is missing: name the GPU to {self._name} for, such as --device rtx4090."
            )
        self._device = config.device
        if config.device_memory is not None:
            memory_bytes = parse_limit(config.device_memory, "--device_memory")
            try:
                self._device = replace(find_device(config.device), memory_bytes=memory_bytes)
            except ValueError:  # it is in no list
                self._device = DeviceSpec(config.device, memory_bytes)
        spec = spec_of(self._device)
        if self._name == PLAN:
            _check_plan(config, spec, self._args)
        if config.plot is not None:
            check_picture_path(Path(config.plot))
        if config.batch.shape is not None:
            self._batch = make_batch(config.batch.shape, config.batch.dtype, config.batch.high)
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
        trainer: dict[str, Any] = self.trainer  # type: ignore[assignment]
        config = self.config
        devices, given = config.devices, trainer["devices"]
        if devices is None:  # what stands for those of this machine is one
            devices = len(given) if isinstance(given, list) else max(1, int(given) if str(given).isdecimal() else 1)
        try:
            with show_progress() as on_progress:
                self.answer, self.exit_code = (_plan if self._name == PLAN else _estimate)(
                    config,
                    module=self.model,
                    batch=self._batch,
                    datamodule=self.datamodule if self._batch is None else None,
                    device=self._device,
                    trainer=trainer,
                    devices=devices,
                    num_nodes=trainer["num_nodes"] if config.num_nodes is None else config.num_nodes,
                    run_callbacks=config.run_callbacks,
                    on_progress=on_progress,
                )
        except Exception as error:
            if self._batch is None or is_complete_message(error):
                raise
            raise MisconfigurationException(
                f"the step fails on the batch of --batch.shape: {type(error).__name__}: {error}. Check --batch.shape, "
                "--batch.dtype and --batch.high: token ids need --batch.dtype int64 and --batch.high with the size of "
                f"the vocabulary.{WHERE}"
            ) from error

    def _make_optimizers_late(self) -> None:
        """Let the optimizer of a configuration be that of whichever copy of the module is asked for it."""
        optimizer, scheduler = self.config_init.get("optimizer"), self.config_init.get("lr_scheduler")
        if not optimizer:
            return

        def configure_optimizers(module: Any) -> Any:
            made = instantiate_class(module.parameters(), optimizer)
            return self.configure_optimizers(module, made, instantiate_class(made, scheduler) if scheduler else None)

        self.model.configure_optimizers = MethodType(configure_optimizers, self.model)


_OF_ESTIMATE = (
    *("fits", "needed_bytes", "context_bytes", "reserved_bytes", "allocated_bytes", "peak_bytes", "host_bytes"),
    *("world_size", "batch_size", "max_batch_size", "max_sequence_length"),
)


def _estimate_values(estimate: MemoryEstimate) -> dict[str, Any]:
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


_Answer = tuple[list[RenderableType], int]  # with the exit code


def _estimate(config: Namespace, **arguments: Any) -> _Answer:
    estimate = estimate_memory(**arguments)
    exit_code = 0 if estimate.fits else DOES_NOT_FIT
    if config.plot is not None:
        estimate.plot(config.plot)
    if config.json:
        return [json.dumps(_estimate_values(estimate), indent=2)], exit_code
    drawn = "" if config.plot is None else f"\n{config.plot}: picture of the step."
    return [estimate_table(estimate), *filter(None, [drawn])], exit_code


_MARK = f"# Made by `{PROGRAM} {PLAN}`: a --config for `{PROGRAM} fit`, after your own.\n"


def _check_plan(config: Namespace, spec: DeviceSpec, args: Sequence[str]) -> None:
    """Refuse options before anything is made, which takes long."""
    budget_bytes_of("--budget", _budget(config.budget), spec)
    if config.host_memory is not None:
        parse_limit(config.host_memory, "--host_memory")
    check_choice("--allow", config.allow, LEVELS)
    if config.output is not None:
        _check_output(Path(config.output), re.findall(r"(?:--config|-c)[= ](\S+)", " ".join(args)))


def _plan(config: Namespace, **arguments: Any) -> _Answer:
    """Plan, draw and write. Where nothing fits, the error names alternatives."""
    given = {"budget": _budget(config.budget), "host_memory": config.host_memory, "allow": config.allow}
    try:
        plan = plan_memory(**given, **arguments)
    except PlanError as error:
        message = str(error)
        if not config.json:
            fail(message, DOES_NOT_FIT)
        least = {"minimum_bytes": error.minimum_bytes, "minimum": str(error.least.scheme)}
        return [json.dumps({"fits": False, **least, "message": message}, indent=2)], DOES_NOT_FIT
    text = f"{_MARK}{plan.to_yaml()}"
    command = f"{PROGRAM} fit ... --config {config.output or 'plan.yaml'}"
    answer: list[RenderableType] = [plan_table(plan)]
    if config.plot is not None:
        plan.plot(config.plot)
        answer.append(f"\n{config.plot}: picture of memory against step time.")
    if config.output is not None:
        Path(config.output).write_text(text, encoding="utf-8")
        answer.append(f"\n{config.output}: the plan. Run: {command}")
    elif plan.is_needed:
        answer.append(f"\n{text}\nSave this as plan.yaml, or add -o plan.yaml, and run: {command}")
    return [json.dumps(_plan_values(plan), indent=2)] if config.json else answer, 0


def _plan_values(plan: MemoryPlan) -> dict[str, Any]:
    """Return the plan, its configuration, and the other choices of its table."""
    return {
        "fits": True,
        **{name: getattr(plan, name) for name in ("is_needed", "budget_bytes", "host_bytes", "step_time_ratio")},
        "device": plan.device.name,
        "needed_bytes": plan.peak_bytes,
        "config": yaml.safe_load(plan.to_yaml()),
        "choices": [asdict(choice) for choice in choices(plan)],
    }


def _budget(text: str | float | None) -> str | float | None:
    """Read a share, as ``0.5``; what else there is has a unit."""
    return float(text) if isinstance(text, str) and re.fullmatch(r"[01]?\.\d*", text) else text


def _check_output(path: Path, files: Sequence[str]) -> None:
    """Refuse to write over what is no plan, or over what this plan adds to."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--output: there is no folder '{path.parent}'.")
    if path.resolve() in (Path(file).resolve() for file in files):
        raise MisconfigurationException(f"--output={path} is a --config of this plan: remove it there.")
    if path.exists() and (path.is_dir() or not path.read_bytes().startswith(_MARK.encode())):
        raise MisconfigurationException(f"--output={path} exists and is not a plan of {PROGRAM}: name another file.")


def run(arguments: list[str], show: Callable[[RenderableType], None]) -> None:
    """Run a command."""
    # Raised inside Lightning 2.6 on torch 2.13, once per run; nothing a user can do about it.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    with suppress(RuntimeError):  # called by a program that has used CUDA before
        configure_allocator()
    # Without it, ${model.width} in a file is looked up from the root, where it is fit.model.width.
    set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
    kind: Any = DryRunCLI if arguments[:1] in ([ESTIMATE], [PLAN]) else VRAMCLI
    cli = kind.__new__(kind)
    try:  # `cli` is kept when its __init__, which runs the whole command, raises
        if kind is VRAMCLI:
            cli.__init__(arguments, show)
            return
        with redirect_stdout(sys.stderr):  # what the user's code prints is no part of the answer
            cli.__init__(arguments[0], arguments[1:])
        for part in cli.answer:
            show(part)
    except Exception as error:
        line = None if is_debugging() else line_for(error, is_running=cli.is_running)
        if line is None:
            raise
        fail(line)
    if cli.exit_code:
        raise SystemExit(cli.exit_code)
