"""Which weights are transferred in 16 bits: those that only autocast reads, of layers called once before a backward.

Then the results are those of 32 bits: autocast casts at each use, and no backward sums gradients of several uses, which
the baseline does in fp32.
"""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lightning_vram.private_names.dispatcher import is_compiled_part
from lightning_vram.private_names.fsdp2 import place_of
from lightning_vram.private_names.torch import current_graph_task_id, own_children, own_parameters
from lightning_vram.techniques.sharding.flat_shards import FlatShard
from lightning_vram.techniques.sharding.group import ShardedGroup
from lightning_vram.techniques.sharding.grouping import follow, iterate_chains
from lightning_vram.techniques.sharding.parameter import ShardedParameter

_FACTS = ("device", "is_meta", "ndim", "requires_grad", "shape")  # of all dtypes the same
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_named_weights(root: nn.Module) -> set[nn.Parameter]:
    """Find the parameters that code of the model's classes names, so that it may see their dtype or round values.

    That is by ``self.layer.weight``, or by ``layer.weight``, for layers in lists. The code of forwards and steps is
    inspected, not run; that of hooks is not.
    """
    found: set[nn.Parameter] = set()
    for module, chain in iterate_chains(root):
        if type(module).__module__.startswith("torch.nn."):
            continue  # it names weights to choose a fast path
        if chain[0] in ("weight", "bias"):
            lists = (child for child in own_children(module).values() if isinstance(child, _CONTAINERS))
            found.update(parameter for child in lists for parameter in child.parameters())
        for (*_, owner), rest in follow(module, chain):
            if not (len(rest) > 1 and rest[1] in _FACTS):
                found.update(p for p in [own_parameters(owner).get(rest[0])] if p is not None)
    return found


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

    Until the end of the first batch that calls layers of a flat shard it is transferred in 32 bits: its gradients must
    be exact in 16. Layers that were not called are counted on. Afterwards, and in compiled code, only calls of groups
    are counted.
    """

    def __init__(self, root: nn.Module, groups: Iterable[ShardedGroup]) -> None:
        compiled = {layer for part in root.modules() if is_compiled_part(part) for layer in part.modules()}
        attention: Any = {part.out_proj: part for part in root.modules() if isinstance(part, nn.MultiheadAttention)}
        self._flat_shards = [(group, flat) for group in groups for flat in group.flat_shards if flat.has_low_precision]
        self._layers: dict[FlatShard, list[LayerCalls]] = {}
        self._used: set[FlatShard] = set()
        for _, flat in self._flat_shards:
            flat.is_on_trial = True
            calls: dict[nn.Module, LayerCalls] = {}
            for parameter in flat.parameters:
                layer = attention.get(owner := place_of(parameter)[0], owner)  # whose forward reads this weight
                parameter.is_counted = layer not in compiled
                if parameter.is_counted:
                    if layer not in calls:
                        calls[layer] = LayerCalls(layer, flat.device)
                    calls[layer].parameters.append(parameter)
            self._layers[flat] = list(calls.values())

    def end_backward(self) -> list[bool]:
        """Return the observations of this rank, for :meth:`decide`."""
        flags = []
        for group, flat in self._flat_shards:
            layers = self._layers[flat]
            num_counted = sum(len(calls.parameters) for calls in layers) if flat.is_on_trial else 0
            is_called_more = group.has_more_calls and num_counted < len(flat.parameters)
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
        flat_shards, self._flat_shards = self._flat_shards, []
        for (group, flat), needs_fp32, is_used in zip(flat_shards, flags[::2], flags[1::2], strict=True):
            if not needs_fp32:
                self._flat_shards.append((group, flat))
                self._used.update([flat] if is_used else [])
                continue
            if not flat.is_on_trial:
                warnings.warn(
                    f"The layer of weight {flat.parameters[0].name!r} was called more often before a backward "
                    "than in earlier batches: in this step its gradients were added in 16 bit. From now on its "
                    "weights are transferred in 32 bit. FSDPOffloadStrategy(narrow_transfers=False) avoids this.",
                    stacklevel=2,
                )
            flat.is_on_trial, flat.needs_fp32 = False, True

    def end_batch(self) -> None:
        """After a batch, transfer flat shards in 16 bit whose layers were called."""
        for group, flat in self._flat_shards:
            if flat.is_on_trial and flat in self._used:
                flat.is_on_trial = False
                group.allow_calls()

    def forget(self) -> None:
        """Drop the calls of a discarded iteration."""
        for calls in (calls for layers in self._layers.values() for calls in layers):
            calls.num_calls = [0, 0]

    def remove(self) -> None:
        """Remove all hooks."""
        for calls in (calls for layers in self._layers.values() for calls in layers):
            calls.handle.remove()
