"""Commands that make the classes of a configuration: ``fit`` and its like, ``estimate``, ``plan``."""

import sys
import tempfile
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from rich.console import RenderableType
from typing_extensions import override

import lightning_vram.public_names  # noqa: F401 - registers strategies, and lets classes be found by short names
from lightning_vram.callbacks.auto_vram import AutoVRAM
from lightning_vram.callbacks.slurm_requeue import SlurmJob, SlurmRequeue, check_job
from lightning_vram.callbacks.vram_monitor import VRAMMonitor
from lightning_vram.commands.dry_run import DryRunCLI
from lightning_vram.commands.errors import PARSER_MODE, CommandParser, is_mistake_of_user, one_line
from lightning_vram.commands.options import ESTIMATE, PLAN, PROGRAM, fail, is_debugging
from lightning_vram.memory.device.accelerators import configure_allocator, empty_cache
from lightning_vram.memory.device.out_of_memory import is_out_of_memory
from lightning_vram.precision import LeanMixedPrecision
from lightning_vram.private_names.lightning import method_arguments, read_argument
from lightning_vram.report.comparison import FitResult, comparison_table
from lightning_vram.startup import let_through
from lightning_vram.strategies.fsdp_offload import STRATEGY_NAMES
from lightning_vram.techniques.sharded_checkpoints import read_values

_OWN_PACKAGE = "lightning_vram"
_PART_ARGUMENTS = ("callbacks", "plugins")  # of the Trainer
_SAVES_NO_MEMORY = (VRAMMonitor.__name__, SlurmRequeue.__name__)


class VRAMCLI(LightningCLI):
    """Fit, validate, test or predict with any LightningModule and LightningDataModule, named by class path.

    ``${...}`` works in and across ``--config`` files and follows overrides on the command line. ``fit`` takes
    ``--compare_with_baseline true``: it trains once more without the features of this package, from the same seed, and
    prints peak memory, time per step and equality of the weights side by side.
    """

    def __init__(self, show: Callable[[RenderableType], None], **kwargs: Any) -> None:
        self._show = show
        # Without it, ${model.width} in a file is looked up from the root, where it is fit.model.width.
        set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
        self.is_running = False
        super().__init__(
            parser_class=CommandParser,
            parser_kwargs={
                "parser_mode": PARSER_MODE,
                "prog": PROGRAM,
                "description": "Train in a fraction of the GPU memory.",
            },
            save_config_kwargs={"overwrite": True},
            **kwargs,
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
        super().parse_arguments(parser, args)
        path = self.config[self.config.subcommand].get("ckpt_path") if "subcommand" in self.config else None
        if path is not None and Path(path).is_file():
            read_values(Path(path), weights_only=True)  # a clear error if it is no checkpoint; Lightning reads it next

    @override
    def before_instantiate_classes(self) -> None:
        check_job(SlurmJob.from_environment())

    @override
    def after_instantiate_classes(self) -> None:
        if self.subcommand == "fit" and read_argument(self, "compare_with_baseline"):
            if read_argument(self, "seed_everything") is False:
                raise MisconfigurationException(
                    "compare_with_baseline=true needs a seed for both fits, got seed_everything=false. Give a number."
                )
            if _find_monitor(self) is None:
                raise MisconfigurationException(
                    "compare_with_baseline=true needs a lightning_vram.VRAMMonitor among trainer.callbacks, got none."
                )
            if not self._own_parts() and not self._has_own_strategy():
                raise MisconfigurationException(
                    "compare_with_baseline=true needs features of lightning_vram to leave out of trainer.callbacks, "
                    "trainer.plugins or trainer.strategy, got none."
                )
        if not any(isinstance(callback, SlurmRequeue) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            let_through()
        self.is_running = True

    def after_fit(self) -> None:
        """Compare with the baseline if asked to. ``LightningCLI`` calls this."""
        if not read_argument(self, "compare_with_baseline"):
            return
        optimized, parts = _read_result(self), self._own_parts()
        picture = _draw_step(self)
        trainer: Namespace = read_argument(self, "trainer")
        for argument in _PART_ARGUMENTS:
            trainer[argument] = [part for part in self._parts(argument) if part not in parts and not _resumes(part)]
        if any(part.class_path.rpartition(".")[2] == LeanMixedPrecision.__name__ for part in parts):
            trainer.precision = self.trainer.precision  # Lightning's own, so that both compute alike
        names = [part.class_path.rpartition(".")[2] for part in parts]
        if self._has_own_strategy():
            names.append("fsdp_offload")
            trainer.strategy = "ddp" if self.trainer.world_size > 1 else "auto"
        baseline = self._fit_again()
        if _is_rank_zero():
            self._show("")
            self._show(comparison_table(baseline, optimized, " and ".join(names)))
            if picture is not None:
                self._show(f"{picture}: picture of the step with lightning_vram.")

    def _parts(self, argument: str) -> list[Any]:
        parts = read_argument(self, "trainer")[argument] or []
        return parts if isinstance(parts, list) else [parts]

    def _own_parts(self) -> list[Namespace]:
        """The memory-saving callbacks and plugins of this package in the configuration."""
        parts = [part for argument in _PART_ARGUMENTS for part in self._parts(argument)]
        return [part for part in parts if isinstance(part, Namespace) and _is_memory_saver(part.class_path)]

    def _has_own_strategy(self) -> bool:
        strategy = read_argument(self, "trainer").strategy
        if isinstance(strategy, str):
            return strategy.lower() in STRATEGY_NAMES
        return isinstance(strategy, Namespace) and strategy.class_path.split(".")[0] == _OWN_PACKAGE

    def _fit_again(self) -> FitResult:
        device = self.trainer.strategy.root_device
        del self.trainer, self.model, self.datamodule, self.config_init  # they hold memory that the baseline needs
        empty_cache(device)
        seed_everything(read_argument(self, "seed_everything"), workers=True, verbose=False)
        with tempfile.TemporaryDirectory(prefix=f"{PROGRAM}-") as folder:
            read_argument(self, "trainer").default_root_dir = folder  # where no folder is named
            self.instantiate_classes()
            if _is_rank_zero():
                self._show("Training again without lightning_vram, for comparison ...")
            try:
                self.trainer.fit(**method_arguments(self, "fit"))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return FitResult(peak=None, seconds_per_batch=None, weights=None)
            return _read_result(self)


def _is_rank_zero() -> bool:
    return int(getattr(rank_zero_only, "rank", 0)) == 0


def _is_memory_saver(class_path: str) -> bool:
    package, _, name = class_path.rpartition(".")
    return package.split(".")[0] == _OWN_PACKAGE and name not in _SAVES_NO_MEMORY


def _resumes(part: Any) -> bool:
    """Whether it is a :class:`SlurmRequeue`, which has had the one fit of this program that it resumes."""
    return isinstance(part, Namespace) and part.class_path.rpartition(".")[2] == SlurmRequeue.__name__


def _find_monitor(cli: LightningCLI) -> VRAMMonitor | None:
    """Return the monitor among the callbacks."""
    callbacks: list[Callback] = cli.trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, VRAMMonitor)), None)


def _draw_step(cli: LightningCLI) -> Path | None:
    """Draw the step that was tracked, in the log folder of the run."""
    monitor = _find_monitor(cli)
    if monitor is None or monitor.path is None or monitor.timeline is None or cli.trainer.global_rank:
        return None
    auto = next((callback for callback in cli.trainer.callbacks if isinstance(callback, AutoVRAM)), None)  # type: ignore[attr-defined]
    path = Path(cli.trainer.log_dir or ".") / "step.html"
    monitor.plot(path, limit=None if auto is None else auto.budget_bytes)
    return path


def _read_result(cli: LightningCLI) -> FitResult:
    """Return what there is to compare."""
    monitor = _find_monitor(cli)
    weights = {name: tensor.detach().cpu().clone() for name, tensor in cli.model.state_dict().items()}
    if monitor is None:
        return FitResult(peak=None, seconds_per_batch=None, weights=weights)
    return FitResult(monitor.peaks.get("train"), monitor.seconds_per_batch, weights)


def run(arguments: list[str], show: Callable[[RenderableType], None], *, is_process: bool) -> None:
    """Run a command; ``is_process``: with the arguments of this process, which launchers start again."""
    # Raised inside Lightning 2.6 on torch 2.13, once per run; nothing a user can do about it.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    with suppress(RuntimeError):  # called by a program that has used CUDA before
        configure_allocator()
    is_dry = arguments[:1] in ([ESTIMATE], [PLAN])
    cli: Any = (DryRunCLI if is_dry else VRAMCLI).__new__(DryRunCLI if is_dry else VRAMCLI)
    try:  # `cli` is kept when its __init__, which runs the whole command, raises
        if not is_dry:
            cli.__init__(show, args=None if is_process else arguments)
            return
        with redirect_stdout(sys.stderr):  # what the user's code prints is no part of the answer
            cli.__init__(arguments[0], arguments[1:])
        for part in cli.answer:
            show(part)
    except Exception as error:
        if is_debugging() or not is_mistake_of_user(error, is_running=cli.is_running):
            raise
        fail(one_line(error))
    if cli.exit_code:
        raise SystemExit(cli.exit_code)
