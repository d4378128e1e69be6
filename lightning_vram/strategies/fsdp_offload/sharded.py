"""The sharded module of a run and its optimizers on the host, from the setup to the teardown."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from typing_extensions import override

from lightning_vram.core.processes.same_modules import check_same_modules, spread_values
from lightning_vram.core.surgery.shadow import Shadow
from lightning_vram.memory.host.cores import cores_of_rank
from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.strategies.fsdp_offload.checkpointed import CheckpointedStrategy
from lightning_vram.strategies.fsdp_offload.checks import check_master
from lightning_vram.strategies.fsdp_offload.early_steps import may_clip_late, may_step_early
from lightning_vram.strategies.fsdp_offload.stand_ins import clip_on_shards, follow_toggles
from lightning_vram.techniques.mixed_precision import find_narrow_weights, list_islands
from lightning_vram.techniques.sharding import FullSharding, ShardingOptions
from lightning_vram.techniques.sharding.grouping import plan_sharding_groups

_NARROW = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class ShardedStrategy(CheckpointedStrategy):
    """A strategy that shards its module and steps on the shards.

    Args:
        given: See :class:`ConnectedStrategy`.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._sharding: FullSharding | None = None
        self._host_optimizers: HostOptimizers | None = None
        self._stand_ins: list[Shadow] = []
        self._has_failed = False

    def _shard(self, module: nn.Module) -> None:
        arguments = self.arguments
        check_same_modules(module)
        spread_values(module)
        narrow_dtype = None
        if arguments.narrow_transfers and isinstance(self.precision_plugin, MixedPrecision):
            narrow_dtype = _NARROW.get(self.precision_plugin.precision)
        check_master(arguments.master, narrow_dtype, self.precision_plugin.precision, type(self).__name__)
        narrow = find_narrow_weights(module, list_islands(module)) if narrow_dtype is not None else set()
        seed = torch.tensor(torch.initial_seed() % 2**31)
        self._sharding = FullSharding(
            module,
            self.device_mesh,
            plan_sharding_groups(module, arguments.wrap, min_params=arguments.min_params),
            ShardingOptions(
                on_host=arguments.offload != "none",
                is_resident=arguments.offload == "optimizer",
                is_split=arguments.master == "split",
                reshard_after_forward=arguments.reshard_after_forward,
                pin_memory=self._pins_memory,
                narrow_dtype=narrow_dtype,
                narrow={name for name, parameter in module.named_parameters() if parameter in narrow},
                uninitialized_ok=self._to_load is not None,
                seed=int(self.broadcast(seed)),
                num_threads=self._num_threads,
            ),
        )

    def _attach(self, trainer: pl.Trainer) -> None:
        assert self._sharding is not None
        self._host_optimizers = HostOptimizers(
            self._sharding, num_threads=self._num_threads, nvme_path=self.arguments.nvme_path
        )
        self._host_optimizers.attach(self.optimizers)
        self._host_optimizers.may_step_early = lambda optimizer: may_step_early(trainer)
        self._stand_ins = [
            *clip_on_shards(self.precision_plugin, self._host_optimizers, lambda: may_clip_late(trainer)),
            *follow_toggles(trainer.lightning_module, self._sharding),
        ]

    @property
    def _pins_memory(self) -> bool:
        pins = self.arguments.pin_memory
        return self.root_device.type != "cpu" and self.arguments.offload != "none" if pins is None else pins

    @property
    def _num_threads(self) -> int:
        return self.arguments.cpu_threads or cores_of_rank(self.num_processes)

    def _unshard(self) -> None:
        sharding, self._sharding = self._sharding, None
        optimizers, self._host_optimizers = self._host_optimizers, None
        while self._stand_ins:
            self._stand_ins.pop().remove()
        if sharding is None:
            return
        try:
            if optimizers is not None and not self._has_failed:
                optimizers.finish()
        except BaseException:
            self._has_failed = True
            raise
        finally:
            replaced = sharding.remove(make_whole=not self._has_failed or self.world_size == 1)
            if optimizers is not None:
                optimizers.let_go(replaced)

    @override
    def _rest_shards(self) -> None:
        if self._sharding is not None:
            self._sharding.rest_shards()

    @override
    def _finish_steps(self) -> None:
        if self._host_optimizers is not None:
            self._host_optimizers.finish()
