"""A sharded average of weights (EMA, SWA) on the host, updated in the thread that steps the weights.

PyTorch's ``AveragedModel`` is a whole copy of the module. Here each rank averages its shards: 4 bytes of host memory
per fp32 parameter, divided by the ranks, and none on the device. Parts are small enough for the caches.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from lightning_vram.core.host.memory import PART_ELEMENTS
from lightning_vram.core.host.transfers import Ticket
from lightning_vram.core.patching import MethodPatch, replace_by
from lightning_vram.core.tensors.properties import WHOLE_LAYOUT, stored_like
from lightning_vram.optimizers.on_host.optimizers import HostOptimizers
from lightning_vram.optimizers.step_round import as_sharded, move_average
from lightning_vram.private_names.fsdp2 import cut_own_shard, local_shard, own_shard_of
from lightning_vram.private_names.torch import own_parameters
from lightning_vram.techniques.sharding import FlatShard, FullSharding, ShardedGroup

Gather = Callable[[nn.Module], dict[str, Any]]
_PREFIX = "module."  # of the names of weights in the state of an AveragedModel


class HostAverage:
    """Makes the parameters of an ``AveragedModel`` shards on the host, until :meth:`remove`.

    ``update_parameters`` runs the averaging functions of its class, which must be elementwise, on parts of shards,
    after the step of their group. Reading an averaged parameter blocks until it is written.

    ``is_copy``: the average equals the module, so that shards of the module have its values. ``gather`` makes the state
    of a sharded module, for a checkpoint.
    """

    def __init__(
        self, average: AveragedModel, module: nn.Module, sharding: FullSharding, *, is_copy: bool, gather: Gather
    ) -> None:
        self.average = average
        self.optimizers: HostOptimizers | None = None  # whose thread updates it; ``None``: update at once
        self._sharding, self._gather = sharding, gather
        self._rest: Ticket | None = None  # of unsharded tensors
        average.to("cpu")
        pairs = list(zip(average.module.parameters(), module.parameters(), strict=True))
        made = {
            whole: _make_shard(whole, shard, is_copy=is_copy) for whole, shard in pairs if isinstance(shard, DTensor)
        }
        self._shards = {shard: made[whole] for whole, shard in pairs if whole in made}
        self._unsharded = [(whole, parameter) for whole, parameter in pairs if whole not in made]
        _replace(average.module, made)
        self._patches = [
            MethodPatch(average, "update_parameters", replace_by(self.update)),
            MethodPatch(average, "state_dict", partial(partial, self._read_state)),
            *(MethodPatch(average.module, name, self._settle_first) for name in ("parameters", "buffers")),
        ]

    def update(self, model: nn.Module) -> None:
        """Begin to update the average with the weights after the current steps, and the buffers of ``model``."""
        self._reshard()
        number = self.average.n_averaged.clone()
        for group in self._sharding.groups:
            weights = [parameter.sharded_param for parameter in group.fsdp_params]
            watched = [*weights, *(self._shards[weight] for weight in weights)]
            self._begin(partial(self._move, group, number), group, watched)
        self._begin_rest(model, number)
        if self.optimizers is not None:
            self.optimizers.arrange_by_forward()
        self.average.n_averaged += 1
        self._sharding.gather_root()

    def remove(self, *, make_whole: bool) -> None:
        """Remove the patches, after all steps; ``make_whole``: gather the parameters (a collective)."""
        while self._patches:
            self._patches.pop().remove()
        if make_whole:
            _replace(self.average.module, {shard: _make_whole(shard) for shard in self._shards.values()})
        self._shards = {}

    def _begin(self, job: Callable[[], None], group: ShardedGroup | None, watched: Iterable[Tensor]) -> Ticket | None:
        if self.optimizers is None:
            job()
            return None
        return self.optimizers.work_beside(job, group, watched, is_reader=True)

    @torch.no_grad()
    def _move(self, group: ShardedGroup, number: Tensor) -> None:
        ours: list[Tensor] = []
        theirs: list[Tensor] = []

        def update() -> None:
            if ours:
                move_average(self.average, number, (ours, ()), (theirs, ()))
            ours.clear()
            theirs.clear()

        for flat_shard in group.flat_shards:
            for place, parameter in enumerate(flat_shard.parameters):
                for average, weights in _cut(flat_shard, place, own_shard_of(self._shards[parameter.sharded_param])):
                    ours.append(average)
                    theirs.append(weights)
                    if sum(one.numel() for one in ours) >= PART_ELEMENTS:
                        update()
        update()

    def _begin_rest(self, model: nn.Module, number: Tensor) -> None:
        """Update with unsharded scalars and buffers, copied now: the next forward may write to them."""
        weights, buffers = [_copy(weight) for _, weight in self._unsharded], [_copy(one) for one in model.buffers()]
        if not weights and not buffers:
            return
        device = self._sharding.device
        event = None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()
        self._rest = self._begin(partial(self._move_rest, weights, buffers, number, event), None, ())

    @torch.no_grad()
    def _move_rest(
        self, weights: list[Tensor], buffers: list[Tensor], number: Tensor, event: torch.Event | None
    ) -> None:
        if event is not None:
            event.synchronize()
        averages = [average for average, _ in self._unsharded]
        move_average(self.average, number, (averages, self._buffers), (weights, buffers))

    def _wait_for_rest(self) -> None:
        """Wait for scalars and buffers; reading a shard waits by itself."""
        rest, self._rest = self._rest, None
        if rest is not None:
            rest.wait()

    @property
    def _buffers(self) -> list[Tensor]:
        return list(type(self.average.module).buffers(self.average.module))

    def _reshard(self) -> None:
        """Reshard the module, with what was written to gathered parameters."""
        for group in self._sharding.groups:
            group.forget_whole()

    def _settle_first(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """Patch for code that reads the average and the module together."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._reshard()
            self._sharding.gather_root()
            self._wait_for_rest()
            return inner(*args, **kwargs)

        return call

    def _read_state(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return ``state_dict`` with parameters in the form of checkpoints. A collective."""
        self._wait_for_rest()
        state = {key: value for key, value in inner(*args, **kwargs).items() if not key.startswith(_PREFIX)}
        return state | {_PREFIX + key: value for key, value in self._gather(self.average.module).items()}


def _cut(flat_shard: FlatShard, place: int, average: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut average and weights of a shard into parts."""
    if flat_shard.shards is None:  # split between steps
        assert flat_shard.split is not None
        flat, parts = average.view(-1), flat_shard.split.parts[place]
        for start, stop in parts:
            ours = flat[start - parts[0][0] : stop - parts[0][0]]  # the end may be padding of FSDP2
            if ours.numel():
                yield ours, flat_shard.split.read((start, stop))[: ours.numel()]
        return
    weights = own_shard_of(flat_shard.parameters[place].sharded_param)
    if weights.numel() > PART_ELEMENTS:
        yield from zip(
            torch.split(average.view(-1), PART_ELEMENTS), torch.split(weights.view(-1), PART_ELEMENTS), strict=True
        )
    elif weights.numel():
        yield average, weights


@torch.no_grad()
def _make_shard(whole: nn.Parameter, shard: Any, *, is_copy: bool) -> nn.Parameter:
    own = own_shard_of(shard)
    local = torch.empty(own.shape, dtype=whole.dtype, device="cpu")
    local.copy_(own if is_copy else cut_own_shard(whole, shard))
    made = nn.Parameter(as_sharded(local, shard, own.shape), requires_grad=whole.requires_grad)
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


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host, without waiting for it."""
    return tensor.detach().to("cpu", non_blocking=True, copy=True)
