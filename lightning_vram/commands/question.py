"""What ``estimate`` and ``plan`` share: they read the files and arguments of ``fit``, and make its classes."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, Protocol

from jsonargparse import Namespace, set_parsing_settings
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, instantiate_class
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import RenderableType
from typing_extensions import override

from lightning_vram.commands.batch import make_batch
from lightning_vram.commands.mistakes import says_all, where
from lightning_vram.commands.offline import NoDownloads
from lightning_vram.commands.options import options_of
from lightning_vram.commands.parser import PARSER_MODE, CommandParser
from lightning_vram.commands.program import PROGRAM
from lightning_vram.estimation.estimate import spec_of
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.known_devices import find_device
from lightning_vram.memory.estimate.untouched import UntouchedWeights
from lightning_vram.memory.units import parse_limit
from lightning_vram.private_names.lightning.cli import QuietlySeeded
from lightning_vram.report.estimate import ProgressDisplay


class Question(Protocol):
    """What is asked of a run, and the answer."""

    name: str
    exit_code: int

    def check(self, config: Namespace, spec: DeviceSpec) -> None:
        """Refuse options before anything is made, which takes long."""

    def ask(self, config: Namespace, module: LightningModule, batch: Any, **arguments: Any) -> None:
        """Find the answer; without a ``batch`` the datamodule or the module makes it. ``arguments`` are of the run."""

    def answer(self) -> Iterable[RenderableType]:
        """Return what is printed; text is printed unchanged."""


class QuestionCLI(QuietlySeeded):
    """Ask instead of fit."""

    def __init__(self, question: Question, args: Sequence[str]) -> None:
        set_parsing_settings(omegaconf_absolute_to_relative_paths=True)  # as for `fit`
        self.is_running = False
        self._question = question
        self._batch: Any = None
        self._device: str | DeviceSpec = ""
        with NoDownloads():
            super().__init__(
                args=list(args),
                run=False,
                save_config_callback=None,
                parser_class=CommandParser,
                parser_kwargs={
                    "parser_mode": PARSER_MODE,
                    "prog": f"{PROGRAM} {question.name}",
                },
            )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name, option in options_of(self._question.name).items():
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
                f"--device is missing: name the GPU to {self._question.name} for, such as --device rtx4090."
            )
        self._device = config.device
        if config.device_memory is not None:
            self._device = _describe(config.device, parse_limit(config.device_memory, "--device_memory"))
        self._question.check(config, spec_of(self._device))
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
                self._question.ask(
                    self.config,
                    self.model,
                    self._batch,
                    datamodule=self.datamodule if self._batch is None else None,
                    device=self._device,
                    trainer=arguments,
                    devices=_either(self.config.devices, _count(arguments["devices"])),
                    num_nodes=_either(self.config.num_nodes, arguments["num_nodes"]),
                    run_callbacks=self.config.run_callbacks,
                    on_progress=on_progress,
                )
        except Exception as error:
            if self._batch is None or says_all(error):
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


def _describe(name: str, memory_bytes: int) -> DeviceSpec:
    """Describe a device of so many bytes: as the known one of that name, if there is one."""
    try:
        return replace(find_device(name), memory_bytes=memory_bytes)
    except ValueError:
        return DeviceSpec(name, memory_bytes)


def _either(given: int | None, of_trainer: int) -> int:
    return of_trainer if given is None else given


def _count(devices: Any) -> int:
    """Read ``trainer.devices``; what stands for those of this machine is one."""
    if isinstance(devices, list):
        return len(devices)
    number = int(devices) if str(devices).isdecimal() else 1
    return max(number, 1)
