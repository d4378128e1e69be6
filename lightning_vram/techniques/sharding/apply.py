"""Shard a module over ranks with FSDP2, its shards on the host or on the device, and undo it."""

import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.optim import Optimizer

from lightning_vram.core.host.memory import HostBuffers
from lightning_vram.core.host.transfers import HostWorker
from lightning_vram.core.patching import mixin_for, remove_mixin
from lightning_vram.core.tensors.properties import sharded_modules
from lightning_vram.memory.device.accelerators import PeakWatch, current_kind, free_device_bytes, has_cache, total_bytes
from lightning_vram.private_names import fsdp2
from lightning_vram.private_names.dispatcher import is_compiled_part
from lightning_vram.private_names.torch import current_graph_task_id
from lightning_vram.techniques.sharding.flat_shards import FlatShard, Place, plan_residency
from lightning_vram.techniques.sharding.group import ShardedGroup, take_over
from lightning_vram.techniques.sharding.grouping import ShardingPlan
from lightning_vram.techniques.sharding.materialization import has_meta, materialize
from lightning_vram.techniques.sharding.parameter import ShardedParameter, disown
from lightning_vram.techniques.sharding.removal import WholeParameters


@dataclass(frozen=True)
class ShardingOptions:
    """How shards are stored."""

    on_host: bool = True  # shards and their gradients
    is_resident: bool = False  # a copy of the shards stays on the device
    # Device memory of each rank for what would be on the host: copies of shards first, then shards with gradients and
    # optimizer state. A float is a share of all that; None: as is_resident.
    device_bytes: int | float | None = None
    is_split: bool = False  # fp32 shards with bf16 transfers as bf16 half and remainder; frozen ones always are
    reshard_after_forward: bool = True  # free layers between forward and backward
    pin_memory: bool = False
    low_precision_dtype: torch.dtype | None = None  # what autocast casts weights to; None: nothing
    low_precision: Collection[str] = field(default_factory=frozenset)  # names of these weights
    uninitialized_ok: bool = False  # meta layers without an initializer become zeros
    seed: int = 0  # of values of meta layers, the same on all ranks
    num_threads: int = 1  # that accumulate gradients on the host


class FullSharding:
    """Shards ``module``, on the host or the meta device, in place, until :meth:`remove`.

    Meta layers are materialized group by group, so that at most one group is whole. Layers that are already sharded
    stay as they are. ``mesh``: of one dimension, or of two, replicas and shards.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, plan: ShardingPlan, options: ShardingOptions) -> None:
        self.module, self.mesh = module, mesh
        self.device = _device_of(mesh.device_type)
        self.home = torch.device("cpu") if options.on_host else self.device  # of shards not on the accelerator
        self.options = options
        self.buffers = HostBuffers(pin_memory=options.pin_memory)
        self.landing = HostWorker("landing gradients", options.num_threads) if options.on_host else None
        self.groups: list[ShardedGroup] = []  # in the order of the module
        self.on_landed: Callable[[ShardedGroup], None] | None = None  # by another thread: gradients are on the host
        self.is_inside = False  # whether a whole training step runs within the root's forward
        self._whole = WholeParameters(module)
        self._sharded: dict[nn.Module, Place] = {}
        self.shards: Mapping[nn.Parameter, nn.Parameter] = self._whole.shards  # of the parameters before
        self._trial = LowPrecisionTrial(module, ())
        replicated = self._replicate(plan)
        try:
            parts = [[module.get_submodule(name) for name in names] for names in (*plan.groups, ("",))]
            for modules, place in zip(parts, self._plan_places(parts, replicated), strict=True):
                self._shard(modules, replicated, place)
            self._take_over()
            for part in module.modules() if mesh.size() == 1 else ():
                vars(part).pop(fsdp2.RANKS_MARK, None)  # for which transformers skip no layers (LayerDrop)
        except BaseException:
            self.remove()
            raise
        self._used = UsedParameters(self.groups, replicated, mesh)
        self._trial = LowPrecisionTrial(module, self.groups)

    @contextmanager
    def inside_step(self) -> Generator[None, None, None]:
        """The root's forward runs a whole training step, which may contain backwards and optimizer steps."""
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False
            for group in fsdp2.groups_of(self.module) if not torch.is_grad_enabled() else ():
                group.forget_whole()  # writes after a validation must not round parameters in 16 bits
        self._trial.end_batch()  # if there was a backward in it

    # --- called by groups ---

    def called(self, group: ShardedGroup) -> None:
        """``group`` was gathered for a forward."""
        fsdp2.end_backward_once(self.module)
        self._used.note(group)

    def lost(self) -> None:
        """The iteration was discarded."""
        self._used.order = 0
        self._trial.forget()

    def finalized(self, group: ShardedGroup) -> None:
        """The backward is over for ``group``."""
        if group is self.groups[-1]:
            self.buffers.end_backward()
            self._trial.decide(self._used.settle(self._trial.end_backward()))
            if not self.is_inside:
                self._trial.end_batch()
            self.gather_root()

    def gather_root(self) -> None:
        """Within the root's forward, gather parameters outside all groups again, which are needed at once."""
        if self.is_inside:
            for group in [group for group in self.groups if group.home.type != "cpu"][:1]:
                group.show_writes()
            for group in fsdp2.groups_of(self.module):
                group.unshard()
                group.wait_for_unshard()

    # --- called by optimizers and strategies ---

    def agree_on_gradients(self) -> None:
        """Update ``requires_grad`` of gathered parameters to that of their shards."""
        for group in self.groups:
            for parameter in group.fsdp_params:
                parameter.agree_on_gradient()

    def wait_for_steps(self) -> None:
        """Wait until no step writes a shard."""
        for group in self.groups:
            group.steps.wait()

    def keep_copies(self, device_bytes: int) -> int:
        """Keep copies of shards on the device from now on, as far as they fit; return their bytes."""
        self.wait_for_steps()
        taken_bytes = 0
        for group in (group for group in self.groups if group.landing is not None):
            missing = [flat for flat in group.flat_shards if flat.resident is None]
            num_bytes = sum(flat.numel * flat.dtype.itemsize for flat in missing)
            if num_bytes <= device_bytes - taken_bytes:
                taken_bytes += num_bytes
                for flat in missing:
                    flat.keep_copy()
        if taken_bytes and torch.accelerator.is_available():
            # Another stream will write to memory that the computation has just freed.
            torch.accelerator.synchronize()
        return taken_bytes

    def remove(self, *, make_whole: bool = True) -> dict[nn.Parameter, nn.Parameter]:
        """Restore the module with its current values; return the parameters by the shards they replace.

        ``make_whole``: gather the parameters, a collective. Otherwise, or if they were on the meta device, they stay
        sharded.
        """
        if self.landing is not None:
            self.landing.drain()
        for group in self.groups:
            with suppress(Exception):  # of a failed step; it is raised where steps are finished
                group.steps.wait()
        self._trial.remove()
        replaced = self._restore() if make_whole and self._whole.can_restore else {}
        if self.landing is not None:
            self.landing.stop()
        self.buffers.close()
        return replaced

    def _restore(self) -> dict[nn.Parameter, nn.Parameter]:
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        # Not self.groups: after an early error some are still FSDP2's own.
        for group in {group: None for module in self._sharded for group in fsdp2.groups_of(module)}:
            if isinstance(group, ShardedGroup):
                group.forget_whole()
            replaced |= self._whole.restore(group)
        for shard in replaced:
            disown(shard)
        for module in self._sharded:
            fsdp2.remove_hooks(module)
            remove_mixin(module, FSDPModule)
        self._whole.restore_rest()
        return replaced

    def _replicate(self, plan: ShardingPlan) -> list[nn.Parameter]:
        """Keep scalars and empty parameters, which FSDP2 cannot shard, whole on the device."""
        parameters = {id(p): p for p in (self.module.get_parameter(name) for name in plan.replicated)}
        for parameter in parameters.values():
            if not parameter.is_meta:
                parameter.data = parameter.data.to(self.device)
        return list(parameters.values())

    def _plan_places(self, parts: list[list[nn.Module]], replicated: list[nn.Parameter]) -> list[Place]:
        """Choose where shards are stored. The forward begins with the root, the last part."""
        options, num_shards = self.options, self.mesh.size(-1)
        if not options.on_host or options.device_bytes is None:
            return ["device" if not options.on_host else "copy" if options.is_resident else "host"] * len(parts)
        low_precision = {p for name, p in self.module.named_parameters() if name in options.low_precision}
        claimed = {*replicated, *(p for part in sharded_modules(self.module) for p in part.parameters())}
        needs = []
        for modules in parts:  # a parameter belongs to the first that has it
            ours = dict.fromkeys(p for module in modules for p in module.parameters() if p not in claimed)
            claimed.update(ours)
            copy_bytes = device_bytes = 0
            for p in ours:
                size = -(-p.shape[0] // num_shards) * (p.numel() // p.shape[0])  # padded
                copy_bytes += size * ((options.low_precision_dtype if p in low_precision else None) or p.dtype).itemsize
                device_bytes += size * p.dtype.itemsize * (_NUM_HELD if p.requires_grad else 1)
            needs.append((copy_bytes, device_bytes))
        is_share = isinstance(options.device_bytes, float)
        budget_bytes = options.device_bytes * (sum(num_bytes for _, num_bytes in needs) if is_share else 1)
        root, *others = plan_residency([needs[-1], *needs[:-1]], int(budget_bytes))
        return [*others, root]

    def _shard(self, modules: list[nn.Module], replicated: list[nn.Parameter], place: Place) -> None:
        options = self.options
        if all(isinstance(module, FSDPModule) for module in modules):
            return
        for module in modules:
            if has_meta(module):
                materialize(module, seed=options.seed, model=self.module, uninitialized_ok=options.uninitialized_ok)
            fsdp2.prepare_class(type(module), mixin_for)
        self._whole.make_contiguous(modules)
        fully_shard(
            modules if len(modules) > 1 else modules[0],
            mesh=self.mesh,
            # Parameters left in the root are needed again at once.
            reshard_after_forward=None if modules == [self.module] else options.reshard_after_forward,
            offload_policy=OffloadPolicy() if place == "device" else CPUOffloadPolicy(pin_memory=False),
            ignored_params=set(replicated),
        )
        self._sharded.update(dict.fromkeys(modules, place))
        self._whole.release(modules)

    def _take_over(self) -> None:
        options = self.options
        low_precision = {p for name, p in self.module.named_parameters() if name in options.low_precision}

        def dtype_of(parameter: Any) -> torch.dtype | None:
            return options.low_precision_dtype if parameter.sharded_param in low_precision else None

        for part in (part for part in self.module.modules() if part in self._sharded):
            fsdp2.state_of(part).__class__ = fsdp2.ViewProofState
            for group in fsdp2.groups_of(part):
                if not isinstance(group, ShardedGroup):
                    self.groups.append(take_over(group, self, dtype_of, self._sharded[part]))
        if self.landing is not None and all(group.landing is None for group in self.groups):
            self.landing.stop()
            self.landing, self.home = None, self.device


_NUM_HELD = 4  # weight, gradient and the two moments of AdamW, all in the dtype of the weight
_MARGIN = 10  # 1/10 of device memory stays free: later batches may be larger


class FirstStepMemory:
    """Measures the first step of all ``optimizers`` on one rank, to fill the memory that it leaves free with copies."""

    def __init__(self, sharding: FullSharding, optimizers: Iterable[Optimizer]) -> None:
        self._sharding = sharding
        self._waiting = {id(optimizer) for optimizer in optimizers}
        self._watch = PeakWatch(sharding.device) if has_cache(sharding.device) else None
        if self._watch is not None:
            self._watch.restart()

    def note_step(self, optimizer: Optimizer) -> int | None:
        """After the last optimizer's first step, keep copies and return their bytes; otherwise ``None``."""
        is_first = id(optimizer) in self._waiting
        self._waiting.discard(id(optimizer))
        if not is_first or self._waiting or self._watch is None:
            return None
        device, now = self._sharding.device, self._watch.read()
        was_more_bytes = now.peak_allocated_bytes - now.allocated_bytes
        free_bytes = (free_device_bytes(device) or 0) - was_more_bytes - total_bytes(device) // _MARGIN
        return self._sharding.keep_copies(max(0, free_bytes))


def _device_of(kind: str) -> torch.device:
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


_OTHER_ORDER = (
    "Another rank called other sharded layers than this one, or in another order: FSDP2 all-gathers each layer on all "
    "ranks at once, and mixed them up. Make all ranks call the same layers (LayerDrop: use the same seed), or pass the "
    "class of the module that contains these layers as `wrap`."
)


class UsedParameters:
    """Which parameters have a gradient on any rank; averages those of ``replicated`` ones, whole on each rank."""

    def __init__(self, groups: Iterable[ShardedGroup], replicated: Sequence[nn.Parameter], mesh: DeviceMesh) -> None:
        self._groups = list(groups)
        self._sharded = [parameter for group in self._groups for parameter in group.fsdp_params]
        self._replicated = replicated
        self._num_ranks = mesh.size()
        self.order = 0  # digest of the sequence of gathered groups

    def note(self, group: ShardedGroup) -> None:
        """Record that a group was gathered for a forward."""
        self.order = (self.order * 1_000_003 + self._groups.index(group) + 1) % 2**61

    def settle(self, noted: Sequence[bool] = ()) -> list[bool]:
        """Give every parameter the gradient it would have on one rank. A collective, except on one rank.

        ``noted``: further flags; returns for each whether any rank has set it.
        """
        order, self.order = self.order, 0
        if self._num_ranks == 1:
            for group in self._groups:
                group.present = set()
            return list(noted)
        present = {parameter for group in self._groups for parameter in group.present}
        flags = [parameter in present for parameter in self._sharded]
        flags += [parameter.grad is not None for parameter in self._replicated]
        has_host = any("cpu" in part or part == "gloo" for part in dist.get_backend_config().split(","))
        device = _device_of("cpu" if has_host else current_kind())
        used = torch.tensor([order, -order, *noted, *flags], dtype=torch.int64, device=device)
        dist.all_reduce(used, op=dist.ReduceOp.MAX)
        largest, smallest, *rest = used.tolist()
        is_noted, is_used = rest[: len(noted)], rest[len(noted) :]
        if largest != -smallest:
            raise RuntimeError(_OTHER_ORDER)
        somewhere = {parameter for parameter, flag in zip(self._sharded, is_used, strict=False) if flag}
        for group in self._groups:
            group.settle(somewhere.__contains__)
        for parameter, flag in zip(self._replicated, is_used[len(self._sharded) :], strict=True):
            if flag:
                self._average(parameter)
        return [bool(flag) for flag in is_noted]

    @torch.no_grad()
    def _average(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        mean = parameter.grad.double()
        dist.all_reduce(mean)
        parameter.grad.copy_(mean / self._num_ranks)


# Which weights are transferred in 16 bits: those that only autocast reads, of layers called once before a backward.
# Then the results are those of 32 bits: autocast casts at each use, and no backward sums gradients of several uses,
# which the baseline does in fp32.
class LayerCalls:
    """Calls of one layer, until the end of the first backward after one."""

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self.parameters: list[ShardedParameter] = []
        self._device_type = device.type
        self.is_used = self._is_plain = False  # called; called without autocast
        self.num_calls = [0, 0]  # before the backward, and in it, where checkpoints compute again
        self.handle = layer.register_forward_pre_hook(self._note)

    def _note(self, *unused: object) -> None:
        self.is_used = True
        self._is_plain |= not torch.is_autocast_enabled(self._device_type)
        self.num_calls[current_graph_task_id() != -1] += torch.is_grad_enabled()

    _note.only_tells = True  # type: ignore[attr-defined] # layers with it may be tiled

    @property
    def needs_fp32(self) -> bool:
        """Whether 16 bits would change the results."""
        is_summed = max(self.num_calls) > 1 and any(parameter.wants_gradient for parameter in self.parameters)
        return self._is_plain or is_summed


class LowPrecisionTrial:
    """Decides which flat shards that autocast would cast are transferred in 16 bits, by calls of layers in a batch.

    Until the end of the first batch that calls its layers it is transferred in 32 bits: its gradients must be exact in
    16. Layers that were not called are counted on. Afterwards, and in compiled code, only calls of groups are counted.
    """

    def __init__(self, root: nn.Module, groups: Iterable[ShardedGroup]) -> None:
        compiled = {layer for part in root.modules() if is_compiled_part(part) for layer in part.modules()}
        attention: Any = {part.out_proj: part for part in root.modules() if isinstance(part, nn.MultiheadAttention)}
        self._layers: dict[FlatShard, list[LayerCalls]] = {}
        self._used: set[FlatShard] = set()
        for flat in (flat for group in groups for flat in group.flat_shards if flat.has_low_precision):
            flat.is_on_trial = True
            calls: dict[nn.Module, LayerCalls] = {}
            for parameter in flat.parameters:
                layer = attention.get(owner := fsdp2.place_of(parameter)[0], owner)  # whose forward reads this weight
                parameter.is_counted = layer not in compiled
                if parameter.is_counted:
                    if layer not in calls:
                        calls[layer] = LayerCalls(layer, flat.device)
                    calls[layer].parameters.append(parameter)
            self._layers[flat] = list(calls.values())

    def end_backward(self) -> list[bool]:
        """Return the observations of this rank, for :meth:`decide`."""
        flags = []
        for flat, layers in self._layers.items():
            num_counted = sum(len(calls.parameters) for calls in layers) if flat.is_on_trial else 0
            is_called_more = flat.parameters[0].group.has_more_calls and num_counted < len(flat.parameters)
            flags.append(flat.seen_in_fp32 or is_called_more or any(calls.needs_fp32 for calls in layers))
            flags.append(not layers or any(calls.is_used for calls in layers))
            for calls in layers:
                calls.num_calls = [0, 0]
                if calls.is_used:
                    calls.handle.remove()
            self._layers[flat] = [calls for calls in layers if not calls.is_used]
        return flags

    def decide(self, flags: Sequence[bool]) -> None:
        """Transfer flat shards in fp32 from now on, by the flags of :meth:`end_backward` on any rank."""
        for flat, needs_fp32, is_used in zip(list(self._layers), flags[::2], flags[1::2], strict=True):
            self._used.update([flat] if is_used else [])
            if not needs_fp32:
                continue
            for calls in self._layers.pop(flat):
                calls.handle.remove()
            if not flat.is_on_trial:
                warnings.warn(
                    f"The layer of weight {flat.parameters[0].name!r} was called more often before a backward "
                    "than in earlier batches: in this step its gradients were added in 16 bit. "
                    "FSDPOffloadStrategy(narrow_transfers=False) avoids this.",
                    stacklevel=2,
                )
            flat.is_on_trial, flat.needs_fp32 = False, True

    def end_batch(self) -> None:
        """After a batch, transfer flat shards in 16 bit whose layers were called."""
        for flat in self._layers:
            if flat.is_on_trial and flat in self._used:
                flat.is_on_trial = False
                flat.parameters[0].group.allow_calls()

    def forget(self) -> None:
        """Drop the calls of a discarded iteration."""
        for calls in (calls for layers in self._layers.values() for calls in layers):
            calls.num_calls = [0, 0]

    def remove(self) -> None:
        """Remove all hooks."""
        for calls in (calls for layers in self._layers.values() for calls in layers):
            calls.handle.remove()
