"""Train any LightningModule sharded (FSDP2), its parameters and its optimizers on the host."""

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.core.patching import without_fast_path
from lightning_vram.core.ranks import on_all_ranks
from lightning_vram.optimizers.moment_forms import HostState
from lightning_vram.strategies.fsdp_offload.arguments import (
    DeviceBytes,
    Master,
    Offload,
    OffloadPart,
    Shard,
    StateDictType,
    Wrap,
    check_arguments,
    check_cores,
    check_device_bytes,
    check_gradients,
    check_layer_drop,
    check_loss,
    check_module,
    check_run,
    fitting_precision,
)
from lightning_vram.strategies.fsdp_offload.sharded import ShardedStrategy


class FSDPOffloadStrategy(ShardedStrategy):
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
    their gradients back: 6 bytes per weight and step instead of 12. The first batches determine these weights: those
    used several times before a backward, or read in another way, stay in 32 bit. Master weights, optimizer state and
    checkpoints are fp32.

    ``WeightAveraging`` keeps its average as a shard on the host. ``StochasticWeightAveraging``, which copies the
    module, and ``ModelPruning`` are not supported.

    Args:
        offload: Tensors on the host. ``"params"``: parameters, gradients and optimizer state; needs the least device
            memory. ``"optimizer"``: these, and a weight copy on the device (16 bit where possible). ``"none"``:
            sharding only. Or a list: ``["parameters", "gradients", "optimizer"]``, its last two, or ``[]``.
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
        narrow_transfers: Whether mixed precision copies weights in 16 bit. A use of a weight that begins only in later
            batches is not detected; ``False`` copies 32 bit.
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
        checkpoint_io: Not used: this strategy writes its checkpoints itself.
        precision_plugin: See ``accelerator``.

    Raises:
        TypeError: If an argument has a wrong type, or the precision plugin cannot work on shards.
        ValueError: If arguments are out of range or contradict each other. Before training: if the module has no
            parameters, or differs between ranks; if ``wrap`` matches nothing; if an optimizer cannot step on shards; if
            the number of ranks does not suit ``shard="hybrid"``; if ``nvme_path`` is not a folder; if the backend does
            not cover the host; if ``master="split"`` or ``host_state`` does not suit precision or optimizer; or if a
            checkpoint does not match.
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
        offload: Offload | Collection[OffloadPart] = "params",
        device_bytes: DeviceBytes = None,
        master: Master = "fp32",
        host_state: HostState = "fp32",
        shard: Shard = "full",
        wrap: Wrap = "auto",
        min_params: int = 1_000_000,
        data_parallel_replicate_size: int | None = None,
        reshard_after_forward: bool | None = None,
        pin_memory: bool | None = None,
        nvme_path: str | Path | None = None,
        cpu_threads: int | None = None,
        bind_to_numa_node: bool | None = None,
        narrow_transfers: bool = True,
        state_dict_type: StateDictType = "full",
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
        arguments = check_arguments(
            offload=offload,
            device_bytes=device_bytes,
            master=master,
            host_state=host_state,
            shard=shard,
            wrap=wrap,
            min_params=min_params,
            data_parallel_replicate_size=data_parallel_replicate_size,
            reshard_after_forward=reshard_after_forward,
            pin_memory=pin_memory,
            nvme_path=nvme_path,
            cpu_threads=cpu_threads,
            bind_to_numa_node=bind_to_numa_node,
            narrow_transfers=narrow_transfers,
            state_dict_type=state_dict_type,
            async_save=async_save,
            verify=verify,
            init_on_meta=init_on_meta,
            timeout=timeout,
        )
        given = (accelerator, parallel_devices, cluster_environment, checkpoint_io, precision_plugin)
        super().__init__(arguments, process_group_backend, *given)

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
        check_run(trainer, type(self).__name__)
        check_device_bytes(self.arguments.device_bytes, self.root_device, type(self).__name__)
        is_stepping_here = self.arguments.offload != "none" and trainer.state.fn == TrainerFn.FITTING
        if is_stepping_here and self.arguments.cpu_threads is None:
            check_cores(self._num_threads, type(self).__name__)
        module = self.lightning_module
        check_module(module, type(self).__name__)
        check_gradients(module, type(self).__name__)
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
                self._check_states()
                on_all_ranks(lambda: self._attach(trainer), "The optimizers could not be set up")
                self._attach_numbers()
            self.setup_precision_plugin()
        self._turn_off_inference_mode(trainer)

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._has_failed, self._to_load = True, None

    @override
    def teardown(self) -> None:
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        for loop, inference_mode in self._inference_modes.items():
            loop.inference_mode = inference_mode
        self._inference_modes = {}
        try:
            if self._store is not None and not self._has_failed:
                self._store.wait()
            self._unshard()
        finally:
            binding, self._binding = self._binding, None
            if binding is not None:
                binding.undo()
            self.precision_plugin.teardown()
            self.cluster_environment.teardown()
            self.accelerator.teardown()
            self.checkpoint_io.teardown()

    # --- steps ---

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step("training_step", self.precision_plugin.train_step_context, *args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step("validation_step", self.precision_plugin.val_step_context, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step("test_step", self.precision_plugin.test_step_context, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step("predict_step", self.precision_plugin.predict_step_context, *args, **kwargs)

    def _run_step(self, name: str, context: Callable[[], Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a step within the forward of the root, where FSDP2 gathers what no layer gathers for itself."""
        assert self._sharding is not None
        fast_path = nullcontext() if self.root_device.type == "cuda" else without_fast_path()
        with self._named(name), context(), fast_path, self._sharding.inside_step():
            return self.run_in_forward(name, *args, **kwargs)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        check_loss(closure_loss, type(self).__name__)
        with self._named("backward"):
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        with self._named("optimizer step"):
            return super().optimizer_step(optimizer, closure, model, **kwargs)


STRATEGY_NAMES: dict[str, Offload] = {"fsdp_offload": "params", "fsdp_offload_optimizer": "optimizer"}


def register_strategies() -> None:
    """Register the names with Lightning; repeated calls do nothing."""
    for name, offload in STRATEGY_NAMES.items():
        if name not in StrategyRegistry:
            description = f"FSDP2 for any module, with host offload: {offload}"
            StrategyRegistry.register(name, FSDPOffloadStrategy, description, offload=offload)
