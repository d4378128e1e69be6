"""The sharded module of a run, and its optimizers on the host."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.core.patching import MethodPatch
from lightning_vram.core.processes import NumaBinding, bind_to_node_of
from lightning_vram.core.ranks import check_same_modules, spread_values
from lightning_vram.memory.host import cores_of_rank
from lightning_vram.memory.units import format_bytes
from lightning_vram.optimizers.averages import HostAverage
from lightning_vram.optimizers.moment_forms import FORMS, HostState, describe_unsupported
from lightning_vram.optimizers.on_host import HostMemory, HostNeeds, HostOptimizers, add_states, count_host_needs
from lightning_vram.precision.run import list_averages
from lightning_vram.private_names.dispatcher import detect_fake_mode
from lightning_vram.private_names.lightning import find_trainer
from lightning_vram.strategies.fsdp_offload.arguments import check_master
from lightning_vram.strategies.fsdp_offload.checkpointed import CheckpointedStrategy
from lightning_vram.strategies.fsdp_offload.patches import (
    EarlySteps,
    clip_on_shards,
    follow_toggles,
    log_numbers,
    may_clip_late,
)
from lightning_vram.techniques.mixed_precision import find_autocast_weights, list_islands
from lightning_vram.techniques.sharding import (
    FirstStepMemory,
    FullSharding,
    ShardingOptions,
    WholeNumbers,
    find_named_weights,
    plan_sharding_groups,
)

_LOOPS = ("validate_loop", "test_loop", "predict_loop")
_LOW_PRECISION = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class ShardedStrategy(CheckpointedStrategy):
    """A strategy that shards its module, and steps on the shards."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # Form of all moments, set by MomentsInBF16 or LowBitOptimizer before the setup; ``None``: as ``host_state``.
        self.moments: HostState | None = None
        self._sharding: FullSharding | None = None
        self._host_optimizers: HostOptimizers | None = None
        self._patches: list[MethodPatch | WholeNumbers] = []
        self._has_failed = False
        self._host_memory: HostMemory | None = None  # until the optimizers are set up
        self._host_needs = HostNeeds()
        self._binding: NumaBinding | None = None
        self._first_step: FirstStepMemory | None = None  # for device_bytes="auto", until it is measured
        self._inference_modes: dict[Any, bool] = {}

    def _shard(self, module: pl.LightningModule, *, is_stepping_here: bool) -> None:
        arguments = self.arguments
        check_same_modules(module)
        spread_values(module)
        low_precision_dtype = None
        if arguments.narrow_transfers and isinstance(self.precision_plugin, MixedPrecision):
            low_precision_dtype = _LOW_PRECISION.get(self.precision_plugin.precision)
        check_master(arguments.master, low_precision_dtype, self.precision_plugin.precision, type(self).__name__)
        cast = find_autocast_weights(module, list_islands(module)) if low_precision_dtype is not None else set()
        cast -= find_named_weights(module)
        names = {name for name, parameter in module.named_parameters() if parameter in cast}
        plan = plan_sharding_groups(module, arguments.wrap, min_params=arguments.min_params)
        strided = [name for name, parameter in module.named_parameters() if not parameter.is_contiguous()]
        if strided:
            rank_zero_info(
                f"fsdp_offload stores {len(strided)} parameters contiguously until the run ends, for example "
                f"{strided[0]}; channels_last convolutions still compute in channels_last."
            )
        if is_stepping_here:
            self._check_host_memory(module, names, low_precision_dtype)
        seed = torch.tensor(torch.initial_seed() % 2**31)
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
                seed=int(self.broadcast(seed)),
                num_threads=self._num_threads,
            ),
        )
        for _, average in list_averages(find_trainer(module), module):
            self._averages.append(HostAverage(average, module, self._sharding, self._gather_state))

    def _check_host_memory(
        self, module: pl.LightningModule, cast: set[str], low_precision_dtype: torch.dtype | None
    ) -> None:
        """Refuse a module that exceeds host memory, except in estimates for other machines."""
        self._host_needs = HostNeeds()
        if self.arguments.device_bytes is not None:  # some of it will be on the device
            return
        has_copies = self.root_device.type != "cpu" and self.arguments.master != "split"
        copied = cast if has_copies else ()  # gradients have 32 bits in the first batches, split or not
        num_shards = self.device_mesh.size(-1)
        averages = [average.module for _, average in list_averages(find_trainer(module), module)]
        self._host_needs = count_host_needs(module, num_shards, copied, low_precision_dtype, averages)
        if detect_fake_mode() is None:
            self._host_memory = HostMemory(module, self.optimizers, averages, may_swap=not self._pins_memory)
            self._host_memory.check(self._host_needs, **self._memory_options)

    def _check_states(self) -> None:
        """Refuse optimizer states that exceed host memory with the rest."""
        memory, self._host_memory = self._host_memory, None
        if not self._host_needs.total:
            return
        assert self._sharding is not None
        if self.arguments.nvme_path is None:
            form = FORMS.get(self._host_state)
            self._host_needs = add_states(self._host_needs, self.optimizers, self._sharding.shards, form)
        if memory is not None:
            memory.check(self._host_needs, **self._memory_options)

    @property
    def host_bytes(self) -> int:
        """Host memory of this rank between steps, as counted at the setup; 0 with ``device_bytes``."""
        return self._host_needs.total

    @property
    def _memory_options(self) -> dict[str, Any]:
        return {"name": type(self).__name__, "is_spread": self.arguments.shard != "hybrid"}

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
        self._host_optimizers.may_step_early = EarlySteps(trainer)
        self._patches = [
            *clip_on_shards(self.precision_plugin, self._host_optimizers, lambda: may_clip_late(trainer)),
            *follow_toggles(trainer.lightning_module, self._sharding),
            log_numbers(trainer.lightning_module),
        ]

    def _attach_numbers(self) -> None:
        if detect_fake_mode() is None:  # estimates have no other ranks
            self._patches.append(WholeNumbers(self.arguments.timeout))

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

    def _turn_off_inference_mode(self, trainer: pl.Trainer) -> None:
        """FSDP2 reuses tensors in later steps, which inference mode forbids."""
        loops = [getattr(trainer, name) for name in _LOOPS] + [trainer.fit_loop.epoch_loop.val_loop]
        self._inference_modes = {loop: loop.inference_mode for loop in loops}
        for loop in loops:
            loop.inference_mode = False

    def _bind_to_numa_node(self) -> None:
        wanted = self.arguments.bind_to_numa_node
        if wanted is False or detect_fake_mode() is not None:
            return
        self._binding = bind_to_node_of(self.root_device, self.num_processes, idle_nodes_ok=wanted is True)
        if self._binding is not None:
            rank_zero_info(self._binding.description)

    def _unshard(self) -> None:
        sharding, self._sharding = self._sharding, None
        optimizers, self._host_optimizers = self._host_optimizers, None
        self._first_step = None
        while self._patches:
            self._patches.pop().remove()
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
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        num_bytes = self._first_step.note_step(optimizer) if self._first_step is not None else None
        if num_bytes is not None:
            self._first_step = None
            rank_zero_info(f"fsdp_offload keeps a copy of weights on the device, {format_bytes(num_bytes)} on rank 0.")
        return result

    @override
    def _rest_shards(self) -> None:
        for group in self._sharding.groups if self._sharding is not None else ():
            if group.is_sharded:
                group.steps.rest()

    @override
    def model_to_device(self) -> None:
        """Do nothing: sharding has placed parameters and buffers."""

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        super().load_model_state_dict(checkpoint, strict)
        if self._sharding is not None:  # a tuner restores its start
            self._load_module(self._sharding.module)

    @override
    def _finish_steps(self) -> None:
        if self._host_optimizers is not None:
            self._host_optimizers.finish()
