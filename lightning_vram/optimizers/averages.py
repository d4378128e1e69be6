"""Averages of weights (EMA, SWA) made of exact float32 weights: of bf16 parameters, or of shards on the host.

PyTorch's ``AveragedModel`` averages what the module holds. Here its own averaging functions, which must be elementwise,
run on exact weights, one part after another.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from lightning_vram.core.host.memory import PART_ELEMENTS
from lightning_vram.core.patching import MethodPatch, replace_by
from lightning_vram.core.tensors.properties import WHOLE_LAYOUT, stored_like
from lightning_vram.optimizers.bf16_weights import LeanParameters
from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.optimizers.step_round import as_sharded
from lightning_vram.private_names.fsdp2 import cut_own_shard, local_shard, own_shard_of
from lightning_vram.private_names.torch import own_parameters
from lightning_vram.techniques.sharding import FlatShard, FullSharding, ShardedGroup

Pairs = Sequence[tuple[Tensor, Tensor]]  # of the average and of the module
Gather = Callable[[nn.Module], dict[str, Any]]
_PREFIX = "module."  # of the names of weights in the state of an AveragedModel


class Average:
    """Moves an ``AveragedModel`` of ``module`` by ``update`` instead of its own method, until :meth:`remove`.

    ``exact``: parameters whose weights are stored elsewhere; others and buffers are averaged as they are.
    """

    def __init__(
        self, average: AveragedModel, module: nn.Module, exact: Set[nn.Parameter], update: Callable[[nn.Module], None]
    ) -> None:
        self.average = average
        averages = dict(zip(module.parameters(), average.module.parameters(), strict=True))
        self._averages = {parameter: own for parameter, own in averages.items() if parameter in exact}
        self._others = {parameter: own for parameter, own in averages.items() if parameter not in exact}
        self._patches = [MethodPatch(average, "update_parameters", replace_by(update))]

    def remove(self) -> None:
        """Let the average update itself again."""
        while self._patches:
            self._patches.pop().remove()

    @torch.no_grad()
    def _move(self, number: Tensor, pairs: Pairs, copied: Pairs = ()) -> None:
        """Move a part of the average of ``number`` models by its own ``update_parameters``; copy buffers."""
        for own, other in copied:
            own.copy_(other)
        if pairs:
            tensors = zip(*pairs, strict=True)
            part, model = (SimpleNamespace(parameters=one.__iter__, buffers=().__iter__) for one in tensors)  # modules
            moved = _Part(average=self.average, module=part, n_averaged=number.clone(), parameters=part.parameters)
            update: Any = type(self.average).update_parameters
            update(moved, model)

    def _list_rest(self, model: nn.Module) -> tuple[Pairs, Pairs]:
        """List the other parameters and buffers: those to be averaged, and those to be copied."""
        module, use_buffers = self.average.module, self.average.use_buffers
        parameters = [(own, parameter) for parameter, own in self._others.items()]
        buffers = list(zip(type(module).buffers(module), model.buffers(), strict=not use_buffers))
        return ([*parameters, *buffers], []) if use_buffers else (parameters, buffers)


class _Part(SimpleNamespace):
    """The ``self`` of ``update_parameters``: a part of ``average``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.average, name)


class LeanAverage(Average):
    """An average in fp32, made of the module before its conversion to bf16. Swaps with the module by :meth:`swap`."""

    def __init__(self, average: AveragedModel, module: nn.Module, lean: LeanParameters) -> None:
        super().__init__(average, module, lean.parameters(), self.update)
        self._lean = lean
        self._take_back: list[Callable[[], None]] = []  # of weights that are swapped now
        for own in chain(self._averages.values(), self._others.values()):
            if own.dtype is torch.bfloat16:
                own.data = own.data.float()

    def update(self, model: nn.Module) -> None:
        """Move the average."""
        number = self.average.n_averaged.clone()
        for parameters, values in self._lean.exact_weights():
            self._move(number, [(self._averages[one], value) for one, value in zip(parameters, values, strict=True)])
        self._move(number, *self._list_rest(model))
        self.average.n_averaged += 1

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Swap weights and average; the next call swaps them back."""
        undo, self._take_back = self._take_back, []
        for parameters, values in self._lean.exact_weights():
            if not undo:
                self._take_back.append(self._lean.lend({one: self._averages[one] for one in parameters}))
            for parameter, value in zip(parameters, values, strict=True):
                self._averages[parameter].copy_(value)
        for take_back in undo:
            take_back()
        for own, other in chain(*self._list_rest(model)):
            saved = own.clone()
            own.copy_(other)
            other.copy_(saved)

    @torch.no_grad()
    def put(self, model: nn.Module) -> None:
        """Copy the average to the module."""
        self._lean.lend(self._averages)
        for own, other in chain(*self._list_rest(model)):
            other.copy_(own)


class HostAverage(Average):
    """An average sharded as the module is, on the host: 4 bytes per fp32 parameter, divided by the ranks.

    It moves in the thread that steps the weights, in parts small enough for the caches; reading one waits for that.
    ``gather`` makes the state of a sharded module, for a checkpoint.
    """

    optimizers: HostOptimizers  # to be set before the first update

    def __init__(self, average: AveragedModel, module: nn.Module, sharding: FullSharding, gather: Gather) -> None:
        self._sharding, self._gather = sharding, gather
        pairs = list(zip(average.to("cpu").module.parameters(), module.parameters(), strict=True))
        made = {own: _make_shard(average, own, shard) for own, shard in pairs if isinstance(shard, DTensor)}
        _replace(average.module, made)
        super().__init__(average, module, {shard for own, shard in pairs if own in made}, self.update)
        self._patches.append(MethodPatch(average, "state_dict", partial(partial, self._read_state)))
        for name in ("parameters", "buffers"):
            self._patches.append(MethodPatch(average.module, name, partial(partial, self._reshard_first)))

    def update(self, model: nn.Module) -> None:
        """Begin to move the average towards the weights after the current steps."""
        self._reshard()
        number = self.average.n_averaged.clone()
        for group in self._sharding.groups:
            weights = [parameter.sharded_param for parameter in group.fsdp_params]
            watched = [*weights, *(self._averages[weight] for weight in weights)]
            self.optimizers.work_beside(partial(self._move_group, number, group), group, watched, is_reader=True)
        averaged, copied = self._list_rest(model)
        self._move(number, [(own, other.detach().cpu()) for own, other in averaged], copied)
        self.optimizers.arrange_by_forward()
        self.average.n_averaged += 1
        self._sharding.gather_root()

    def remove(self, *, make_whole: bool = True) -> None:
        """Remove the patches, after all steps; ``make_whole``: gather the parameters (a collective)."""
        super().remove()
        if make_whole:
            _replace(self.average.module, {shard: _make_whole(shard) for shard in self._averages.values()})

    @torch.no_grad()
    def _move_group(self, number: Tensor, group: ShardedGroup) -> None:
        pairs: list[tuple[Tensor, Tensor]] = []
        for pair in chain.from_iterable(map(self._cut, group.flat_shards)):
            pairs.append(pair)
            if sum(own.numel() for own, _ in pairs) >= PART_ELEMENTS:
                self._move(number, pairs)
                pairs.clear()
        self._move(number, pairs)

    def _cut(self, flat_shard: FlatShard) -> Iterator[tuple[Tensor, Tensor]]:
        """Cut averages and weights of a flat shard into parts."""
        for place, parameter in enumerate(flat_shard.parameters):
            average: Any = own_shard_of(self._averages[parameter.sharded_param]).view(-1)
            if flat_shard.shards is not None:
                weights: Any = own_shard_of(parameter.sharded_param).view(-1)
                yield from zip(average.split(PART_ELEMENTS), weights.split(PART_ELEMENTS), strict=True)
                continue
            assert flat_shard.split is not None  # split between steps
            parts = flat_shard.split.parts[place]
            for start, stop in parts:
                own = average[start - parts[0][0] : stop - parts[0][0]]  # the end may be padding of FSDP2
                yield own, flat_shard.split.read((start, stop))[: own.numel()]

    def _reshard(self) -> None:
        """Reshard the module, with what was written to gathered parameters."""
        for group in self._sharding.groups:
            group.forget_whole()

    def _reshard_first(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Patch for code that reads the average and the module together. Reading a shard waits by itself."""
        self._reshard()
        self._sharding.gather_root()
        return inner(*args, **kwargs)

    def _read_state(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return ``state_dict`` with parameters in the form of checkpoints. A collective."""
        state = self._reshard_first(inner, *args, **kwargs)
        rest = {key: value for key, value in state.items() if not key.startswith(_PREFIX)}
        return rest | {_PREFIX + key: value for key, value in self._gather(self.average.module).items()}


@torch.no_grad()
def _make_shard(average: AveragedModel, whole: nn.Parameter, shard: Any) -> nn.Parameter:
    """Cut a shard. Before the first update the average equals the module, of which one rank's values are spread."""
    values = cut_own_shard(whole, shard) if average.n_averaged else own_shard_of(shard)
    local = torch.empty(values.shape, dtype=whole.dtype, device="cpu").copy_(values)
    made = nn.Parameter(as_sharded(local, shard, local.shape), requires_grad=whole.requires_grad)
    vars(made)[WHOLE_LAYOUT] = whole.to("meta")
    return made


@torch.no_grad()
def _make_whole(shard: Any) -> nn.Parameter:
    whole = local_shard(shard) if shard.device_mesh.size() == 1 else shard.full_tensor()
    whole = stored_like(whole.detach().cpu(), getattr(shard, WHOLE_LAYOUT))
    return nn.Parameter(whole, requires_grad=shard.requires_grad)


def _replace(module: nn.Module, others: dict[nn.Parameter, nn.Parameter]) -> None:
    for part in module.modules():
        for key, parameter in own_parameters(part).items():
            if parameter in others:
                own_parameters(part)[key] = others[parameter]
