"""The ``lightning-vram`` command: a LightningCLI for any module, with the pack's parts at hand.

The only place of the package that prints. Mistakes of the user end in one line and exit code 2; set
``LIGHTNING_VRAM_DEBUG=1`` to see where one was found.
"""

import difflib
import os
import pickle
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning
from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import seed_everything
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console, RenderableType
from typing_extensions import override

from lightning_vram.callbacks.slurm_requeue import SlurmJob, SlurmRequeue, check_job
from lightning_vram.callbacks.vram_monitor import VRAMMonitor
from lightning_vram.commands.checks import check_checkpoint_path
from lightning_vram.commands.estimate import ESTIMATE, EstimateQuestion
from lightning_vram.commands.files import FILE_COMMANDS
from lightning_vram.commands.fit_results import draw_step, find_monitor, read_result
from lightning_vram.commands.parser import DEBUG_VARIABLE, PARSER_MODE, PROGRAM, CommandParser, fail
from lightning_vram.commands.plan import PLAN, PlanQuestion
from lightning_vram.commands.question import Question, QuestionCLI
from lightning_vram.core.processes.rank_errors import CheckpointError
from lightning_vram.early_signals import let_through
from lightning_vram.memory.device.allocator import empty_cache
from lightning_vram.memory.device.allocator_settings import configure_allocator
from lightning_vram.memory.device.out_of_memory import is_out_of_memory
from lightning_vram.precision import LeanMixedPrecision
from lightning_vram.private_names.lightning.cli import method_arguments, read_argument
from lightning_vram.report.comparison import FitResult, comparison_table
from lightning_vram.report.estimate import estimate_memory
from lightning_vram.report.one_line import condense_error
from lightning_vram.report.plan import plan_memory
from lightning_vram.strategies.registration import STRATEGY_NAMES

_FIT_COMMANDS = ("fit", "validate", "test", "predict")
_OWN_PACKAGE = "lightning_vram"
_PART_ARGUMENTS = ("callbacks", "plugins")  # of the Trainer
_SAVES_NO_MEMORY = (VRAMMonitor.__name__, SlurmRequeue.__name__)
_MIN_TABLE_WIDTH, _MAX_TABLE_WIDTH = 100, 1000
# of ours
_SAYS_ALL = (CheckpointError, FileNotFoundError, ModuleNotFoundError, ValueError, pickle.UnpicklingError)


class VRAMCLI(LightningCLI):
    """Fit, validate, test or predict with any LightningModule and LightningDataModule, named by class path.

    ``${...}`` works in and across ``--config`` files and follows overrides on the command line. ``fit`` takes
    ``--compare_with_baseline true``: it trains once more without the features of this package, from the same seed, and
    prints peak memory, time per step and equality of the weights side by side.

    Args:
        kwargs: As for ``LightningCLI``, but for the parser's settings.
    """

    def __init__(self, **kwargs: Any) -> None:
        # Without it, ${model.width} in a file is looked up from the root, where it is fit.model.width.
        set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
        self.is_running = False
        super().__init__(
            parser_class=CommandParser,
            parser_kwargs={
                "parser_mode": PARSER_MODE,
                "prog": PROGRAM,
                "description": "Train in a fraction of the GPU memory. `lightning-vram estimate` computes whether a "
                "run fits a GPU you do not have, `lightning-vram plan` finds features that make it fit, "
                "`lightning-vram calibrate` measures a GPU, `lightning-vram report FILE` prints a recording of "
                "VRAMMonitor, `lightning-vram report --benchmarks FILES` draws benchmarks, `lightning-vram "
                "consolidate FOLDER FILE` converts a sharded checkpoint to one file.",
            },
            save_config_kwargs={"overwrite": True},
            **kwargs,
        )

    @staticmethod
    @override
    def subcommands() -> dict[str, set[str]]:
        return {name: skipped for name, skipped in LightningCLI.subcommands().items() if name in _FIT_COMMANDS}

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
        if "subcommand" in self.config:
            check_checkpoint_path(self.config[self.config.subcommand].get("ckpt_path"))  # Lightning reads it next

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
            if find_monitor(self) is None:
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
        """Compare with a plain fit if asked to. ``LightningCLI`` calls this."""
        if not read_argument(self, "compare_with_baseline"):
            return
        packed, parts = read_result(self), self._own_parts()
        picture = draw_step(self)
        trainer: Namespace = read_argument(self, "trainer")
        for argument in _PART_ARGUMENTS:
            trainer[argument] = [part for part in self._parts(argument) if part not in parts]
        if any(part.class_path.rpartition(".")[2] == LeanMixedPrecision.__name__ for part in parts):
            trainer.precision = self.trainer.precision  # Lightning's own, so that both compute alike
        names = [part.class_path.rpartition(".")[2] for part in parts]
        if self._has_own_strategy():
            names.append("fsdp_offload")
            trainer.strategy = "ddp" if self.trainer.world_size > 1 else "auto"
        plain = self._fit_again()
        if _is_rank_zero():
            console = _console()
            console.print()
            console.print(comparison_table(plain, packed, " and ".join(names)))
            if picture is not None:
                console.print(f"{picture}: picture of the step with lightning_vram.")

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
        del self.trainer, self.model, self.datamodule, self.config_init  # they hold what the plain fit will need
        empty_cache(device)
        seed_everything(read_argument(self, "seed_everything"), workers=True, verbose=False)
        with tempfile.TemporaryDirectory(prefix=f"{PROGRAM}-") as folder:
            read_argument(self, "trainer").default_root_dir = folder  # where no folder is named
            self.instantiate_classes()
            if _is_rank_zero():
                _console().print("Training again without lightning_vram, for comparison ...")
            try:
                self.trainer.fit(**method_arguments(self, "fit"))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                return FitResult(peak=None, seconds_per_batch=None, weights=None)
            return read_result(self)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        args: Arguments after the program's name; ``None`` takes ``sys.argv``.

    Raises:
        SystemExit: With code 2 and one line on stderr if an argument or a configuration is wrong.
    """
    # Raised inside Lightning 2.6 on torch 2.13, once per run; nothing a user can do about it.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
    arguments = list(sys.argv[1:] if args is None else args)
    if arguments and arguments[0] in FILE_COMMANDS:
        _run_on_files(*arguments)
        return
    _check_command(arguments)
    with suppress(RuntimeError):  # called by a program that has used CUDA before
        configure_allocator()
    question = _question(arguments)
    kind: type[VRAMCLI] | type[QuestionCLI] = VRAMCLI if question is None else QuestionCLI
    cli = kind.__new__(kind)  # kept when its __init__, which runs the whole command, raises
    try:
        if question is None:
            cli.__init__(args=None if args is None else arguments)  # type: ignore[misc]
        else:
            cli.__init__(question, arguments[1:])  # type: ignore[misc]
            for part in question.answer():
                _show(part)
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE) or not _is_mistake_of_user(error, is_running=cli.is_running):
            raise
        if isinstance(error, RecursionError):
            fail(f"the configuration is nested too deeply ({DEBUG_VARIABLE}=1 shows where)")
        fail(condense_error(str(error)) + ("" if cli.is_running else f" ({DEBUG_VARIABLE}=1 shows where)"))


def _question(arguments: Sequence[str]) -> Question | None:
    """What is asked of a run, if the command makes none."""
    if arguments[:1] == [ESTIMATE]:
        return EstimateQuestion(estimate_memory)
    return PlanQuestion(plan_memory, arguments[1:]) if arguments[:1] == [PLAN] else None


def _check_command(arguments: Sequence[str]) -> None:
    commands = (*_FIT_COMMANDS, ESTIMATE, PLAN, *FILE_COMMANDS)
    if arguments and (arguments[0].startswith("-") or arguments[0] in commands):
        return
    found = arguments[0] if arguments else ""
    got = f"got {found!r}" if arguments else "got none"
    close = difflib.get_close_matches(found, commands, n=1)
    fail(f"expected a command, one of {', '.join(commands)}, {got}." + (f" Did you mean {close[0]}?" if close else ""))


def _run_on_files(command: str, *args: str) -> None:
    try:
        for part in FILE_COMMANDS[command](args):
            _show(part)
    except (OSError, *_SAYS_ALL) as error:
        if os.environ.get(DEBUG_VARIABLE):
            raise
        fail(condense_error(str(error)))


def _is_mistake_of_user(error: Exception, *, is_running: bool) -> bool:
    """Whether the message says it all: a wrong configuration, not a bug whose traceback is wanted."""
    if isinstance(error, MisconfigurationException | OmegaConfBaseException):
        return True
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename if error.__traceback__ else ""
    if is_running:
        is_own = raised_in.startswith(str(Path(__file__).parent))
        is_lightnings = raised_in.startswith(str(Path(lightning.__file__).parent))  # a checkpoint that is not there
        return (is_own and isinstance(error, _SAYS_ALL)) or (is_lightnings and isinstance(error, FileNotFoundError))
    return isinstance(error, (*_SAYS_ALL, RecursionError, TypeError))


def _is_rank_zero() -> bool:
    return int(getattr(rank_zero_only, "rank", 0)) == 0


def _is_memory_saver(class_path: str) -> bool:
    package, _, name = class_path.rpartition(".")
    return package.split(".")[0] == _OWN_PACKAGE and name not in _SAVES_NO_MEMORY


def _show(result: RenderableType) -> None:
    if isinstance(result, str):
        print(result)
    else:
        _console(result).print(result)


def _console(shown: RenderableType = "") -> Console:
    console = Console()
    if console.is_terminal:
        return console
    # In a log file there is no terminal to ask: a table cut to 80 columns would lose its numbers.
    return Console(width=max(_MIN_TABLE_WIDTH, Console(width=_MAX_TABLE_WIDTH).measure(shown).maximum))
