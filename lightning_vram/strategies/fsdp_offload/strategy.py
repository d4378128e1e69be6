"""Train any LightningModule sharded (FSDP2), its parameters and its optimizers on the host."""

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_vram.core.processes import NumaBinding, bind_to_node_of
from lightning_vram.core.ranks import check_same_modules, on_all_ranks, spread_values
from lightning_vram.memory.host import cores_of_rank
from lightning_vram.optimizers.averages import HostAverage
from lightning_vram.optimizers.host_memory import HostMemory, count_host_needs, count_state_bytes
from lightning_vram.optimizers.moment_forms import FORMS, HostState, describe_unsupported
from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.precision.run import list_averages
from lightning_vram.private_names.dispatcher import detect_fake_mode
from lightning_vram.private_names.lightning import find_trainer
from lightning_vram.strategies.fsdp_offload.arguments import (
    OF_TRAINER,
    Offload,
    check_arguments,
    check_cores,
    check_layer_drop,
    check_master,
    check_module,
    check_run,
    decline_offload,
    fitting_precision,
)
from lightning_vram.strategies.fsdp_offload.base import patch_trainer
from lightning_vram.strategies.fsdp_offload.checkpoints import CheckpointedStrategy
from lightning_vram.techniques.mixed_precision import find_autocast_weights, list_islands
from lightning_vram.techniques.sharding import (
    FirstStepMemory,
    FullSharding,
    ShardingOptions,
    WholeNumbers,
    find_named_weights,
    plan_sharding_groups,
)

_LOW_PRECISION = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class FSDPOffloadStrategy(CheckpointedStrategy):
    """Train models larger than GPU memory: weights, gradients and optimizer state stay on the host (FSDP2).

    Also known as CPU offload, ZeRO-Offload (Ren et al., 2021) or ZeRO-3 with offload; with ``nvme_path`` as
    ZeRO-Infinity (Rajbhandari et al., 2021). Registered as ``"fsdp_offload"``, and with ``offload="optimizer"`` as
    ``"fsdp_offload_optimizer"``, for any number of devices and nodes. The module stays unchanged: the strategy wraps
    its layers by itself. A ``configure_model`` that shards layers is honoured. After ``fit`` the module is whole on
    every rank, unless it was on the meta device or the run failed on several ranks.

    Results on one device are exact, in fp32 and with ``precision="bf16-mixed"``, if the baseline's optimizer runs the
    same kernel on the same kind of device. Results on several devices are lossless: gradients are summed in another
    order.

    Optimizers step on the host, on the shards of each rank, in a thread of their own: layer by layer in the backward if
    no code reads gradients afterwards, otherwise during the next forward. A callback with hooks after the backward that
    leaves gradients alone can declare it with the attribute ``uses_gradients = False``; one that reads gradients
    without such hooks needs ``True``. Reading a parameter, gradient or optimizer state blocks until the pending step
    has finished. Writes to ``optimizer.state`` and to weights take effect as in the baseline; all ranks must write the
    same weights.

    Element-wise optimizers of ``torch.optim`` use the kernel that you name: ``fused=True``, ``foreach=True`` or
    ``foreach=False``. If you name none, they use the fused kernel, the fastest on the host; the baseline then uses
    another one, which rounds differently. Other optimizers step while everything else waits, on whole tensors on one
    device and on sharded tensors on several.

    Mixed precision is that of :class:`~lightning_vram.LeanMixedPrecision`, also for ``precision="bf16-mixed"``. Weights
    that autocast casts at every use (linear layers, convolutions, attention) are copied to the device in 16 bit, and
    their gradients back: 6 bytes per weight and step instead of 12. Weights that code of the model names, and those of
    layers that are called several times before a backward, or without autocast, stay in 32 bit; the first batch is
    computed in 32 bit, and counts the calls. Master weights, optimizer state and checkpoints are fp32.

    On a GPU that shares memory with the CPU (GB10, Jetson), offloading frees nothing: with one warning the strategy
    runs with ``offload="none"``, unless you set ``nvme_path``, ``master`` or ``host_state``.

    ``WeightAveraging`` keeps its average as a shard on the host. ``StochasticWeightAveraging``, which copies the
    module, and ``ModelPruning`` are not supported.

    Args:
        offload: Tensors on the host. ``"params"``: parameters, gradients and optimizer state; needs the least device
            memory. ``"optimizer"``: these, and a weight copy on the device (16 bit where possible). ``"none"``:
            sharding only.
        device_bytes: Device memory of each rank that may hold what ``"params"`` would offload: copies of weights first,
            then weights with gradients and optimizer state, counted as for AdamW. All-gathered layers and activations
            are extra. Bytes, text such as ``"8GiB"``, or a share of the total from ``0.0`` to ``1.0``. ``"auto"``:
            copies, in the memory that the first step leaves free. ``None``: as ``offload`` defines.
        master: Form of fp32 weights on the host if they are copied as bf16; both forms give the same results.
            ``"fp32"``: fp32 and a bf16 copy, 18 bytes per weight with gradients and AdamW's state. ``"split"``: a bf16
            half and a 16-bit remainder, and 16-bit gradients without gradient accumulation: 14 bytes. Reading a weight
            joins its halves.
        host_state: Form of the moments of Adam, AdamW, Adamax, NAdam and RAdam on the host; each step computes in fp32.
            ``"bf16"``: stochastic rounding, reproducible from seed and step; saves 4 bytes per weight. ``"8bit"``,
            ``"4bit"``: quantized in blocks of 128; save 6 and 7 bytes, also for SGD and Lion. ``"fp32"``: unchanged.
            Checkpoints load into every form.
        shard: ``"full"``: all-gather each layer for its computation (ZeRO-3). ``"grad_op"``: layers stay whole between
            forward and backward (ZeRO-2). ``"hybrid"``: shard within groups of ranks, replicate across groups.
        wrap: Layers that are all-gathered together. ``"auto"``: the blocks that a model repeats or declares; small
            blocks are merged. Or classes, class names, or a function of a module's name and the module.
        min_params: Smallest number of parameters in a group of ``wrap="auto"``.
        data_parallel_replicate_size: Number of groups for ``shard="hybrid"``. ``None``: the number of nodes.
        reshard_after_forward: Whether layers are freed between forward and backward. ``None``: as ``shard`` defines.
        pin_memory: Whether host memory is pinned, so that copies overlap with computation. ``None``: if there is a GPU.
        nvme_path: Folder on a fast local disk for optimizer state, streamed through a few buffers. ``None``: host
            memory.
        cpu_threads: Threads of an optimizer step. ``None``: the cores of this rank, independent of ``OMP_NUM_THREADS``.
        bind_to_numa_node: Whether threads and host memory of a rank are bound to the NUMA node of its device during
            ``fit``. ``None``: if every node of the machine has a rank.
        narrow_transfers: Whether mixed precision copies weights in 16 bit. Uses of a weight by hooks, if no gradient
            shows them, are not detected; ``False`` copies 32 bit. Writing to such a weight in a step is an error.
        state_dict_type: ``"full"``: checkpoints are single files, as in the baseline. ``"sharded"``: folders that all
            ranks write. Both load with either setting, on any number of ranks.
        async_save: Whether checkpoints are written in the background, from a copy on the host.
        verify: Whether checksums of a checkpoint are verified before it is loaded. Reads it once more; ranks share
            that.
        init_on_meta: Whether ``configure_model`` creates layers on the meta device. They are materialized group by
            group, by ``reset_parameters``, transformers' ``_init_weights``, or from the checkpoint.
        timeout: Seconds, or a ``timedelta``, that ranks wait for each other before :exc:`LostPeerError`.
        process_group_backend: As for ``torch.distributed``. ``None``: gloo on the host and NCCL between GPUs.
        accelerator: Set by the Trainer, as are the arguments below.
        parallel_devices: See ``accelerator``.
        cluster_environment: See ``accelerator``.
        checkpoint_io: Used for remote checkpoints only.
        precision_plugin: See ``accelerator``.

    Raises:
        TypeError: If an argument has a wrong type, or the precision plugin cannot work on shards.
        ValueError: If arguments are out of range or contradict each other. Before training: if the module differs
            between ranks; if ``wrap`` matches nothing; if an optimizer cannot step on shards; if the number of ranks
            does not suit ``shard="hybrid"``; if ``nvme_path`` is not a folder; if ``master="split"`` or ``host_state``
            does not suit precision or optimizer; or if a checkpoint does not match.
        MisconfigurationException: Before training, if a callback prunes weights, or averages them in an unsupported
            way.
        OffloadError: Before training, if host memory or the disk at ``nvme_path`` is too small, with the bytes needed
            and alternatives.
        LostPeerError: During training, if another rank died or hangs.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import FSDPOffloadStrategy
        >>> strategy = FSDPOffloadStrategy(offload="optimizer", state_dict_type="sharded")
        >>> trainer = pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, logger=False)
    """

    def __init__(  # noqa: PLR0913 - set by name in configuration files
        self,
        *,
        offload: Offload = "params",
        device_bytes: int | float | str | None = None,
        master: Literal["fp32", "split"] = "fp32",
        host_state: HostState = "fp32",
        shard: Literal["full", "grad_op", "hybrid"] = "full",
        wrap: str | Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool] = "auto",
        min_params: int = 1_000_000,
        data_parallel_replicate_size: int | None = None,
        reshard_after_forward: bool | None = None,
        pin_memory: bool | None = None,
        nvme_path: str | Path | None = None,
        cpu_threads: int | None = None,
        bind_to_numa_node: bool | None = None,
        narrow_transfers: bool = True,
        state_dict_type: Literal["full", "sharded"] = "full",
        async_save: bool = False,
        verify: bool = True,
        init_on_meta: bool = False,
        timeout: timedelta | float = timedelta(minutes=10),
        process_group_backend: str | None = None,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        given = locals()
        super().__init__(check_arguments(FSDPOffloadStrategy.__init__, given), *(given[name] for name in OF_TRAINER))
        # Form of all moments, set by MomentsInBF16 or LowBitOptimizer before the setup; ``None``: as ``host_state``.
        self.moments: HostState | None = None
        self._undo = ExitStack()  # of what a run has changed outside of its module
        self._has_failed = False
        self._check_memory: Callable[[dict[str, int]], None] | None = None  # until the optimizers are set up
        self._host_needs: dict[str, int] = {}  # bytes by kind
        self._binding: NumaBinding | None = None

    def make_again(self) -> "FSDPOffloadStrategy":
        """Return a new strategy with the same arguments, not attached to a Trainer."""
        return FSDPOffloadStrategy(**vars(self.arguments))

    @override
    def choose_precision(self, plugin: Precision) -> Precision:
        return fitting_precision(plugin, type(self).__name__)

    # --- setup and teardown ---

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        on_meta = self.arguments.init_on_meta if empty_init is None else empty_init
        with torch.device("meta") if on_meta else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self._has_failed = False
        self.accelerator.setup(trainer)
        decline_offload(self.arguments, self.root_device)
        check_run(trainer, self.root_device, self.arguments.device_bytes, type(self).__name__)
        is_stepping_here = self.arguments.offload != "none" and trainer.state.fn == TrainerFn.FITTING
        if is_stepping_here and self.arguments.cpu_threads is None:
            check_cores(self._num_threads, type(self).__name__)
        module = self.lightning_module
        check_module(module, type(self).__name__)
        check_layer_drop(module, self.world_size, type(self).__name__)
        with self._named("setup"):
            self.model = self.precision_plugin.convert_module(self.sync_layers(module))
            if is_stepping_here:
                self._bind_to_numa_node()
            self._shard(module, is_stepping_here=is_stepping_here)
            self._load_module(module)
            self.barrier()
            if trainer.state.fn == TrainerFn.FITTING:
                self.reset_optimizers()
                self.setup_optimizers(trainer)
                self._check_optimizer_memory()
                on_all_ranks(lambda: self._attach(trainer), "The optimizers could not be set up")
                if detect_fake_mode() is None:  # estimates have no other ranks
                    self._undo.callback(WholeNumbers(self.arguments.timeout).remove)
            self.setup_precision_plugin()
        # FSDP2 reuses tensors in later steps, which inference mode forbids.
        fit_loop = trainer.fit_loop.epoch_loop.val_loop
        for loop in (fit_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
            self._undo.callback(setattr, loop, "inference_mode", loop.inference_mode)
            loop.inference_mode = False

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._has_failed, self._to_load = True, None

    @override
    def teardown(self) -> None:
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        try:
            self._undo.close()
            if self._store is not None and not self._has_failed:
                self._store.wait()
            self._unshard()
        finally:
            self._binding = None
            self.precision_plugin.teardown()
            self.cluster_environment.teardown()
            self.accelerator.teardown()
            self.checkpoint_io.teardown()

    def _shard(self, module: pl.LightningModule, *, is_stepping_here: bool) -> None:
        arguments = self.arguments
        check_same_modules(module)
        spread_values(module)
        low_precision_dtype = None
        if arguments.narrow_transfers and isinstance(self.precision_plugin, MixedPrecision):
            low_precision_dtype = _LOW_PRECISION.get(self.precision_plugin.precision)
        check_master(arguments.master, low_precision_dtype, self.precision_plugin.precision, type(self).__name__)
        cast = set()
        if low_precision_dtype is not None:
            cast = find_autocast_weights(module, list_islands(module)) - find_named_weights(module)
        names = {name for name, parameter in module.named_parameters() if parameter in cast}
        plan = plan_sharding_groups(module, arguments.wrap, min_params=arguments.min_params)
        if is_stepping_here:
            self._check_host_memory(module, names, low_precision_dtype)
        self._sharding = FullSharding(
            module,
            self.device_mesh,
            plan,
            ShardingOptions(
                on_host=arguments.offload != "none",
                is_resident=arguments.offload == "optimizer",
                device_bytes=0 if isinstance(arguments.device_bytes, str) else arguments.device_bytes,  # "auto"
                is_split=arguments.master == "split",
                reshard_after_forward=arguments.reshard_after_forward,
                pin_memory=self._pins_memory,
                low_precision_dtype=low_precision_dtype,
                low_precision=names,
                uninitialized_ok=self._to_load is not None,
                seed=int(self.broadcast(torch.tensor(torch.initial_seed() % 2**31))),
                num_threads=self._num_threads,
            ),
        )
        for _, average in list_averages(find_trainer(module), module):
            self._averages.append(HostAverage(average, module, self._sharding, self._gather_state))

    def _check_host_memory(
        self, module: pl.LightningModule, cast: set[str], low_precision_dtype: torch.dtype | None
    ) -> None:
        """Refuse a module that exceeds host memory, except in estimates for other machines."""
        self._host_needs = {}
        if self.arguments.device_bytes is not None:  # some of it will be on the device
            return
        # Gradients have 32 bits in the first batches, split or not.
        copied = cast if self.root_device.type != "cpu" and self.arguments.master != "split" else ()
        num_shards = self.device_mesh.size(-1)
        averages = [average.module for _, average in list_averages(find_trainer(module), module)]
        self._host_needs = count_host_needs(module, num_shards, copied, low_precision_dtype, averages)
        if detect_fake_mode() is None:
            memory = HostMemory(module, self.optimizers, averages, may_swap=not self._pins_memory)
            self._check_memory = partial(memory.check, name=type(self).__name__)
            self._check_memory(self._host_needs)

    def _check_optimizer_memory(self) -> None:
        """Refuse optimizer state that exceeds host memory with the rest."""
        assert self._sharding is not None
        check, self._check_memory = self._check_memory, None
        if self._host_needs and self.arguments.nvme_path is None:
            states = count_state_bytes(self.optimizers, self._sharding.shards, FORMS.get(self._host_state))
            self._host_needs["optimizer state"] = states
        if check is not None:
            check(self._host_needs)

    @property
    def host_bytes(self) -> int:
        """Host memory of this rank between steps, as counted at the setup; 0 with ``device_bytes``."""
        return sum(self._host_needs.values())

    def _attach(self, trainer: pl.Trainer) -> None:
        assert self._sharding is not None
        self._host_optimizers = HostOptimizers(
            self._sharding,
            num_threads=self._num_threads,
            nvme_path=self.arguments.nvme_path,
            form=FORMS.get(self._host_state),
            is_form_everywhere=self.moments is not None,
        )
        self._host_optimizers.attach(self.optimizers)
        if self._host_optimizers.unheld:
            name = f"fsdp_offload (moments in {self._host_state})"
            rank_zero_info(describe_unsupported(name, self._host_optimizers.unheld, self._sharding.module))
        for average in self._averages:
            average.optimizers = self._host_optimizers
        if self.arguments.device_bytes == "auto":
            self._first_step = FirstStepMemory(self._sharding, self.optimizers)
        for patch in patch_trainer(trainer, self._host_optimizers, self._sharding):
            self._undo.callback(patch.remove)

    @property
    def _host_state(self) -> HostState:
        return self.moments or self.arguments.host_state

    @property
    def _pins_memory(self) -> bool:
        pins = self.arguments.pin_memory
        return self.root_device.type != "cpu" and self.arguments.offload != "none" if pins is None else pins

    @property
    def _num_threads(self) -> int:
        cores = cores_of_rank(self.num_processes) if self._binding is None else self._binding.num_threads
        return self.arguments.cpu_threads or cores

    def _bind_to_numa_node(self) -> None:
        wanted = self.arguments.bind_to_numa_node
        if wanted is False or detect_fake_mode() is not None:
            return
        self._binding = bind_to_node_of(self.root_device, self.num_processes, idle_nodes_ok=wanted is True)
        if self._binding is not None:
            self._undo.callback(self._binding.undo)
            rank_zero_info(self._binding.description)

    def _unshard(self) -> None:
        sharding, self._sharding = self._sharding, None
        optimizers, self._host_optimizers = self._host_optimizers, None
        self._first_step = None
        if sharding is None:
            self._remove_averages(make_whole=False)
            return
        try:
            if optimizers is not None and not self._has_failed:
                optimizers.finish()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            make_whole = not self._has_failed or self.world_size == 1
            replaced = sharding.remove(make_whole=make_whole)
            self._remove_averages(make_whole=make_whole)
            if optimizers is not None:
                optimizers.let_go(replaced)

    @override
    def model_to_device(self) -> None:
        """Do nothing: sharding has placed parameters and buffers."""


STRATEGY_NAMES: dict[str, Offload] = {"fsdp_offload": "params", "fsdp_offload_optimizer": "optimizer"}


def register_strategies() -> None:
    """Register the names with Lightning; repeated calls do nothing."""
    for name, offload in STRATEGY_NAMES.items():
        if name not in StrategyRegistry:
            description = f"FSDP2 for any module, with host offload: {offload}"
            StrategyRegistry.register(name, FSDPOffloadStrategy, description, offload=offload)
