"""Lightning without this package: its strategies, precisions, and ways with the batch."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, GradientAccumulationScheduler
from lightning.pytorch.plugins.precision import BitsandbytesPrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from tests.benchmarks.cases import Workload
from tests.benchmarks.peers.installed import needs
from tests.benchmarks.peers.layers import kinds_of_layers, layers_of
from tests.benchmarks.peers.pytorch import CHECKPOINT
from tests.benchmarks.ways import Way

Options = dict[str, Any]
NUM_PARTS = 4


def _own_precision(workload: Workload) -> Options:
    return {"precision": "bf16-mixed"} if workload.autocast == torch.bfloat16 else {}


def _fsdp(workload: Workload, *, is_checkpointed: bool) -> Options:
    kinds = kinds_of_layers(workload)
    options = {"activation_checkpointing_policy": kinds} if is_checkpointed else {}
    return {"strategy": FSDPStrategy(cpu_offload=True, auto_wrap_policy=kinds, **options), **_own_precision(workload)}


class _OnHost(ModelParallelStrategy):
    """With weights on the host: Lightning's own then takes them to the device again, which FSDP2 refuses."""

    def model_to_device(self) -> None:
        pass


class _Shard(Callback):
    """Gives the module the ``configure_model`` that PyTorch's pages on FSDP2 show."""

    def __init__(self, workload: Workload, *, is_checkpointed: bool) -> None:
        is_mixed = workload.autocast == torch.bfloat16
        self._precision = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if is_mixed else MixedPrecisionPolicy()
        self._is_checkpointed = is_checkpointed

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        pl_module.configure_model = MethodType(self._shard, pl_module)  # type: ignore[method-assign]

    def _shard(self, pl_module: Any) -> None:
        options = {
            "mesh": pl_module.device_mesh["data_parallel"],
            "offload_policy": CPUOffloadPolicy(pin_memory=torch.accelerator.is_available()),
            "mp_policy": self._precision,
        }
        if self._is_checkpointed:
            CHECKPOINT.change(pl_module)
        for layer in layers_of(pl_module):
            fully_shard(layer, **options)
        fully_shard(pl_module.net, **options)  # Lightning calls training_step past the hooks on the module itself


def _model_parallel(workload: Workload, *, is_checkpointed: bool) -> Options:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    backend = torch.distributed.get_default_backend_for_device(device)
    strategy = _OnHost(1, 1, process_group_backend=backend)
    return {"strategy": strategy, "callbacks": [_Shard(workload, is_checkpointed=is_checkpointed)]}


class _InParts(Callback):
    """A loader with parts of the batch, and as many more of them."""

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        pl_module.batch = tuple(part[: -(-len(part) // NUM_PARTS)].clone() for part in pl_module.batch)
        pl_module.num_batches *= NUM_PARTS


class Finder(BatchSizeFinder):
    """Gives the module the ``batch_size`` that it looks for, and a loader that goes by it.

    Args:
        workload: Its batch is where larger ones come from: several of it.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__("binsearch", steps_per_trial=2, init_val=1)
        self._workload = workload

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str | None = None) -> None:
        own, device = len(pl_module.batch[0]), pl_module.batch[0].device
        make_loader = pl_module.train_dataloader

        def train_dataloader() -> Any:
            with device:
                several = [self._workload.make_batch() for _ in range(-(-pl_module.batch_size // own))]
            pl_module.batch = tuple(torch.cat(parts)[: pl_module.batch_size] for parts in zip(*several, strict=True))
            return make_loader()

        pl_module.batch_size, pl_module.train_dataloader = 1, train_dataloader
        pl_module.num_batches = 1 << 20  # it stops at the length of the data
        super().setup(trainer, pl_module, stage)


def _accumulate(workload: Workload) -> Options:
    callbacks = [_InParts(), GradientAccumulationScheduler({0: NUM_PARTS})]
    return {"callbacks": callbacks, **_own_precision(workload)}


def find_batch_size(workload: Workload) -> Options:
    """Return a Trainer's options that find the largest batch by running out of memory: ``optimal_batch_size``."""
    return {"callbacks": [Finder(workload)], **_own_precision(workload)}


def _plugin(workload: Workload, make: Callable[[], Any]) -> Options:
    return {"plugins": [make()]}


def _mixed(workload: Workload, precision: str) -> Options:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return {"plugins": [MixedPrecision(precision, device.type)]}


_gpu = needs()
OFFLOAD = tuple(
    Way(
        f"{name}{', checkpointed' * is_checkpointed}",
        "Lightning",
        make_trainer_options=partial(make, is_checkpointed=is_checkpointed),
        why_not=why_not,
    )
    for name, make, why_not in (
        ("FSDPStrategy(cpu_offload=True)", _fsdp, _gpu),
        ("ModelParallelStrategy, CPUOffloadPolicy", _model_parallel, needs(devices=())),
    )
    for is_checkpointed in (False, True)
)
PRECISION = (
    Way('MixedPrecision("bf16-mixed")', "Lightning", make_trainer_options=partial(_mixed, precision="bf16-mixed")),
    Way(
        'MixedPrecision("16-mixed")',
        "Lightning",
        make_trainer_options=partial(_mixed, precision="16-mixed"),
        why_not=_gpu,
    ),
    Way(
        'HalfPrecision("bf16-true")',
        "Lightning",
        make_trainer_options=partial(_plugin, make=partial(HalfPrecision, "bf16-true")),
    ),
    Way(
        'BitsandbytesPrecision("int8-training")',
        "Lightning",
        make_trainer_options=partial(_plugin, make=partial(BitsandbytesPrecision, "int8-training")),
        why_not=needs("bitsandbytes", "bitsandbytes"),
        pip="bitsandbytes",
    ),
)
BATCHES = (
    Way(
        f"GradientAccumulationScheduler({{0: {NUM_PARTS}}}), batches of a quarter",
        "Lightning",
        make_trainer_options=_accumulate,
    ),
    Way(
        'BatchSizeFinder("binsearch")',
        "Lightning",
        make_trainer_options=find_batch_size,
        why_not=needs(why="needs a GPU: it goes on until memory runs out"),
    ),
)
