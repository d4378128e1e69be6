"""Train any LightningModule sharded (FSDP2), its parameters and its optimizers on the host."""

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.core.processes.rank_errors import on_all_ranks
from lightning_vram.core.surgery.held_setting import without_fast_path
from lightning_vram.optimizers.stepping import HostState
from lightning_vram.strategies.fsdp_offload.arguments import (
    DeviceBytes,
    Master,
    Offload,
    OffloadPart,
    Shard,
    StateDictType,
    Wrap,
    check_arguments,
)
from lightning_vram.strategies.fsdp_offload.checks import (
    check_cores,
    check_gradients,
    check_layer_drop,
    check_loss,
    check_module,
    check_room,
    check_run,
    fitting_precision,
)
from lightning_vram.strategies.fsdp_offload.sharded import ShardedStrategy


class FSDPOffloadStrategy(ShardedStrategy):
    """Trains any LightningModule sharded over its devices (FSDP2), and keeps on the host what is not computed with.

    Registered as ``"fsdp_offload"``, and with ``offload="optimizer"`` as ``"fsdp_offload_optimizer"``, on any number of
    devices and nodes. Nothing in the module has to change: layers are grouped automatically, a ``configure_model`` is
    honoured, also one that shards layers itself. With one device the weights are to the bit those of a plain run whose
    optimizer uses the same kernel, in float32 and with ``precision="bf16-mixed"``; with several they are so up to the
    order in which gradients are summed.

    Optimizers step on the host, on the shards of each rank, in a thread of their own: in the backward, layer by layer,
    where nothing looks at gradients afterwards; otherwise beside the next forward. A callback with hooks after the
    backward that leave gradients alone says so by its attribute ``uses_gradients = False``; one that needs them without
    such hooks says ``True``. Reading a parameter, a gradient or a state waits for the step that writes it. What
    ``optimizer.state`` shows is what the next step uses, wherever states are kept and also if your code wrote it.

    Optimizers of ``torch.optim`` that step each element by itself use the kernel that you name: with ``fused=True``,
    ``foreach=True`` or ``foreach=False`` on the CPU the weights are to the bit the plain ones. Where you name none, as
    in ``AdamW(parameters)``, they use the fused one, which is the fastest on the host, and a plain run another: both
    differ by roundings. Others step on whole tensors on one device, on sharded ones on several; everything waits then.

    Mixed precision is :class:`~lightning_vram.LeanMixedPrecision`'s, whether given as ``precision="bf16-mixed"`` or as
    a plugin. Weights that autocast casts at every use, of linear layers, convolutions and attention, are then sent to
    the device in 16 bit, and their gradients back: 6 bytes per weight and step, where FSDP2 sends 12. The first batches
    prove which: weights that are used several times before a backward, or read in another way, stay in 32 bit. Master
    weights, states and checkpoints are float32.

    What code writes to weights by hand counts as in a plain run; on several ranks each has to write the same.

    After ``fit`` the module is what it was, whole on every rank, unless it was on the meta device or the run failed on
    several ranks. The average of Lightning's ``WeightAveraging`` is a shard on the host, moved in the thread of the
    steps. Not for ``StochasticWeightAveraging``, which copies the module, nor for ``ModelPruning``.

    Args:
        offload: What is on the host. ``"params"``: parameters, gradients and states of optimizers, least memory of the
            device. ``"optimizer"``: the same, but a copy of the shards stays on the device, in 16 bit where they are
            sent so: fastest. ``"none"``: nothing, FSDP2 alone. Or a list of what is: ``"parameters"``, ``"gradients"``
            and ``"optimizer"``, the last two, or nothing.
        device_bytes: Of each rank's device, for what ``"params"`` has on the host: as much as fits stays there, copies
            of weights first, then weights with gradients and states, counted as AdamW's. What is gathered and computed
            comes on top. Bytes, text such as ``"8GiB"``, or a share of all of it, ``0.0`` to ``1.0``. ``"auto"``:
            copies, as far as the first step leaves room. ``None``: as ``offload`` says.
        master: What float32 weights that are sent as bf16 are on the host, to the same bits. ``"fp32"``: themselves and
            a copy to send, 18 bytes per weight with gradients and AdamW's states. ``"split"``: the bf16 weights and
            the 16 bit that those lack, and gradients in 16 bit where one comes for each step: 14. They are joined
            where somebody reads them, and a part at a time for a step.
        host_state: Moments of Adam, AdamW, Adamax, NAdam and RAdam on the host, float32 in each step. ``"bf16"``:
            rounded at random, 4 bytes per weight less, as the same seed and step round alike. ``"8bit"``, ``"4bit"``:
            with a scale for each 128, 6 or 7 less, of SGD and Lion, too. ``"fp32"``: themselves. Checkpoints load
            whatever this is.
        shard: ``"full"``: layers are gathered when they are computed. ``"grad_op"``: they stay whole between forward
            and backward. ``"hybrid"``: sharded within groups of ranks, the same in each group.
        wrap: Which layers are gathered together. ``"auto"``: the blocks a model repeats or declares, small ones put
            together. Or classes or names of classes. Or a function of a module's name and the module.
        min_params: Parameters that ``"auto"`` wants in a group.
        data_parallel_replicate_size: Number of groups for ``shard="hybrid"``; as many as nodes by default.
        reshard_after_forward: Whether layers are given up between forward and backward. Follows ``shard`` by default.
        pin_memory: Whether the host memory is pinned, so that copies go on beside the computation. By default it is,
            with a GPU.
        nvme_path: Folder on a fast local disk, where states of optimizers are kept instead of in host memory; they are
            streamed through a few buffers in each step.
        cpu_threads: Threads of a step. By default the cores of this rank, however ``OMP_NUM_THREADS`` is set.
        bind_to_numa_node: Whether the threads of a rank, and so the host memory they make, are on the NUMA node of its
            device during a fit. By default they are where each node of the machine has a rank.
        narrow_transfers: Whether mixed precision sends 16 bit where it can. What only later batches do with a weight is
            not seen.
        state_dict_type: ``"full"``: checkpoints are single files, those of a plain run. ``"sharded"``: folders to which
            each rank writes its part. Both are loaded, whatever this is, on any number of ranks.
        async_save: Whether checkpoints are written beside the training, from a copy on the host.
        verify: Whether checkpoints are compared with their checksums before they are loaded, which reads them once
            more; the ranks share that.
        init_on_meta: Whether ``configure_model`` makes layers without memory, which get their values group by group, by
            their ``reset_parameters`` or transformers' ``_init_weights``, or from the checkpoint.
        timeout: How long ranks wait for each other: seconds, or a ``timedelta``. Then the error says who waited where.
        process_group_backend: As for ``torch.distributed``; by default gloo on the host and NCCL between GPUs.
        accelerator: Set by the Trainer, and so are those that follow.
        parallel_devices: See ``accelerator``.
        cluster_environment: See ``accelerator``.
        checkpoint_io: Not used: this strategy writes its checkpoints itself.
        precision_plugin: See ``accelerator``.

    Raises:
        TypeError: If an argument has a wrong type, or the precision plugin cannot work on shards.
        ValueError: If arguments are out of range or contradict each other. Before training: if the module has no
            parameters, or others on another rank, ``wrap`` matches nothing, an optimizer cannot step on shards, the
            ranks cannot be divided as ``shard="hybrid"`` wants it, ``nvme_path`` is no folder, the backend has nothing
            for the host, weights that are to be split do not travel as bf16, moments have no such form as
            ``host_state``, or a checkpoint does not fit.
        MisconfigurationException: Before training, if a callback prunes weights, or averages them in another way.
        OffloadError: Before training, if there is no room at ``nvme_path``, or the host has less memory than weights,
            gradients and states need: with the bytes by kind, and what would fit.
        LostPeerError: In training, if another rank died or hangs.

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
        """Return another one of the same arguments, which no Trainer has set anything of."""
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
        check_room(self.arguments.device_bytes, self.root_device, type(self).__name__)
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
        self._turn_on_inference_mode()
        try:
            if self._store is not None and not self._has_failed:
                self._store.wait()
            self._unshard()
        finally:
            self._undo_binding()
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
