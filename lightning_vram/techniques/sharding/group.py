"""A group of parameters whose shards are on the host, and a layer with one, as FSDP2 sees them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_vram.core.host.memory import HostBuffers
from lightning_vram.core.host.transfers import HostWorker, Ticket
from lightning_vram.private_names.fsdp2 import FSDPParamGroup, GroupBase, StateBase
from lightning_vram.private_names.torch import base_of, tree_map_only
from lightning_vram.techniques.sharding.flat_shards import (
    FlatShard,
    Place,
    ShardSteps,
    count_shard_bytes,
    count_taken,
    plan_copies,
    plan_residency,
)
from lightning_vram.techniques.sharding.gathered import make_settable
from lightning_vram.techniques.sharding.parameter import ShardedParameter

Arrival = tuple[ShardedParameter, Tensor]


class GroupOwner(Protocol):
    """Who hears of what happens to a group."""

    home: torch.device  # of the shards that are not on the device
    landing: HostWorker | None  # where gradients come from another device
    pin_memory: bool
    is_split: bool  # whether the shards on the host are split at rest, see FlatShard
    buffers: HostBuffers  # that gradients arrive in

    def called(self, group: "ShardedGroup") -> None:
        """``group`` was gathered for a forward that a backward may follow."""

    def lost(self) -> None:
        """The iteration is given up."""

    def landed(self, group: "ShardedGroup") -> None:
        """Gradients of ``group`` have come, in the thread that received them."""

    def finalized(self, group: "ShardedGroup") -> None:
        """The backward is over for ``group``: all that came has landed."""


class ShardedGroup(GroupBase):
    """Takes the place of the class of FSDP2's object, by :func:`take_over`.

    * Shards come to the device in one copy for each dtype. With one rank, too, on a stream of its own, so that it goes
      on beside the computation of the layer before: FSDP2 would begin it when the layer is needed.
    * Gradients go to the host without anybody waiting for them, and are added to what is there by another thread.
    * A parameter without a gradient on this rank gives zeros to those ranks that have one, rather than have FSDP2
      reduce the gradient of another one with theirs.
    * Whoever gathers the parameters first waits for a step that is writing their shards.
    """

    lanes: list[FlatShard]
    owner: GroupOwner
    home: torch.device  # of its shards
    landing: HostWorker | None  # where its gradients come from another device
    steps: ShardSteps
    present: set[ShardedParameter]  # that had a gradient here, in this backward
    doubtful: list[Arrival]  # of those that had none
    _fetched: torch.Event | None = None
    _landing: Ticket | None = None
    _num_calls: int = 0
    _num_returns: int = 0
    _last_calls: int = 0
    _most_calls: int = 1  # before one backward, in the batches that were looked at
    has_more_calls: bool = False  # in the last backward
    _may_return: bool = False  # was called without a graph, which a reentrant checkpoint makes in the backward

    # --- before a layer is computed ---

    def unshard(self, async_op: bool = False) -> None:  # noqa: FBT001, FBT002 - FSDP2's
        """Fetch the shards, and gather them."""
        is_skipped = not self.unshard_in_backward and self.is_before_backward
        if self.is_sharded and not self.is_gathering and not is_skipped:
            self.steps.wait_for_writes()
            self._choose_width()
            self._fetch(async_op)
        super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        """With one rank FSDP2 reads now what was fetched."""
        is_waiting = self.is_gathering
        if is_waiting and self._fetched is not None:
            # Not the stream of torch.accelerator: to that one an event of torch.cuda is none, and it does not wait.
            self.device_handle.current_stream().wait_event(self._fetched)
        self._fetched = None
        super().wait_for_unshard()
        if is_waiting:
            for lane in self.lanes:
                lane.note_read()

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Count the calls whose gradients will come."""
        is_new = torch.is_grad_enabled() and not self.is_in_forward
        result = super().pre_forward(module, args, kwargs)
        self._num_calls += is_new
        self._may_return |= not torch.is_grad_enabled()
        if is_new:
            self.owner.called(self)
        return result

    def _choose_width(self) -> None:
        # Autocast is off in the backward, and where a user turned it off or calls the module by himself.
        if not self.is_before_backward and not self._num_calls:
            is_autocast = torch.is_autocast_enabled(self.device.type)
            for lane in self.lanes:
                if lane.needs_width:
                    lane.stay_wide()
                lane.widen(is_wide=not is_autocast or lane.is_on_trial)

    def _fetch(self, async_op: bool) -> None:  # noqa: FBT001 - FSDP2's
        stream = self.gather_stream(async_op=async_op)
        if stream is None:
            self._fetch_lanes()
            return
        with self.device_handle.stream(stream):
            self._fetch_lanes()
            self._fetched = stream.record_event() if self.num_shards == 1 else None

    def _fetch_lanes(self) -> None:
        for lane in self.lanes:
            for parameter, shard in zip(lane.parameters, lane.fetch(), strict=True):
                parameter.fetched = shard
        self.steps.guard()

    # --- when its gradients are there ---

    def post_backward(self, *unused: Any) -> None:
        """Reduce the gradients, and send them to the host."""
        self.leave_backward()
        if not self.reduce_grads:
            super().post_backward(*unused)
            return
        self.wait_for_gradients()
        absent = self._fill_in()
        arrivals = self._reduce()
        self._num_returns += 1
        if not arrivals:
            return
        self.doubtful += [arrival for arrival in arrivals if arrival[0] in absent]
        certain = [arrival for arrival in arrivals if arrival[0] not in absent]
        self.present.update(parameter for parameter, _ in certain)
        if self.landing is None:
            with self.device_handle.stream(self.reduce_stream):
                self._land(certain, None)
                self.await_reduce_stream()
        else:
            self._landing = self.landing.submit(partial(self._land, certain, self.reduced_event))

    def finalize_backward(self) -> None:
        """Wait until the gradients are on the host."""
        super().finalize_backward()  # type: ignore[no-untyped-call]
        self.wait_for_gradients()
        self._last_calls, self.has_more_calls = self._num_calls, self._num_calls > self._most_calls
        self._num_calls = self._num_returns = 0
        self._may_return = False
        self.owner.finalized(self)

    def allow_calls(self) -> None:
        """Take as many calls before a backward as there were before the last one for usual."""
        self._most_calls = max(self._most_calls, self._last_calls)

    @property
    def is_complete(self) -> bool:
        """Whether no more gradients will come in this backward."""
        return self._num_returns >= self._num_calls and not self._may_return

    def settle(self, is_present: Callable[[ShardedParameter], bool]) -> None:
        """Decide on parameters without a gradient on this rank: those that have one on another get theirs."""
        doubtful, self.doubtful = self.doubtful, []
        for parameter, gradient in doubtful:
            if is_present(parameter):
                parameter.land(gradient)
        self.present = set()

    def wait_for_gradients(self) -> None:
        """Wait until what was sent has come."""
        landing, self._landing = self._landing, None
        if landing is not None:
            landing.wait()

    def _fill_in(self) -> set[ShardedParameter]:
        """Give zeros to parameters that have no gradient here but may have on another rank."""
        if self.mesh_info.mesh.size() == 1:
            return set()
        absent = set()
        for parameter in self.fsdp_params:
            whole = parameter.whole
            if whole is not None and whole.requires_grad and whole.grad is None:
                whole.grad = torch.zeros(whole.shape, dtype=parameter.gathered_dtype, device=whole.device)
                absent.add(parameter)
        return absent

    def _reduce(self) -> list[Arrival]:
        for parameter, buffer in self._buffers():
            parameter.begin_reduction(buffer)
        try:
            has_peers = self.mesh_info.mesh.size() > 1
            narrow = {lane for lane in self.lanes if has_peers and lane.transfer_dtype.itemsize < 4}
            self.reduce_parts((lane.parameters, torch.float32 if lane in narrow else None) for lane in self.lanes)
        finally:
            sent = [(parameter, parameter.end_reduction()) for parameter in self.fsdp_params]
        return [(parameter, gradient) for parameter, gradient in sent if gradient is not None]

    def _buffers(self) -> Iterable[tuple[ShardedParameter, Tensor | None]]:
        """Where on the host gradients go, side by side."""
        for lane in self.lanes:
            sizes = [parameter.sharded_size.numel() for parameter in lane.parameters]
            lane.release_gradients()
            if self.device == self.home:
                yield from ((parameter, None) for parameter in lane.parameters)
            else:
                flat = self.owner.buffers.take(sum(sizes), lane.transfer_dtype)
                yield from zip(lane.parameters, torch.split(flat, sizes), strict=True)

    def _land(self, arrivals: Sequence[Arrival], event: torch.Event | None) -> None:
        if event is not None:
            event.synchronize()
        for parameter, gradient in arrivals:
            parameter.land(gradient)
        self.owner.landed(self)

    def show_writes(self) -> None:
        """Let streams that gather, of all groups, wait for a step on the device: FSDP2 does in the root's forward."""
        if self.copy_in_stream is not None:
            self.copy_in_stream.wait_stream(self.device_handle.current_stream())

    def given_up(self) -> None:
        """After an error: nothing that was sent is to land."""
        self.owner.lost()
        if self.owner.landing is not None:
            self.owner.landing.drain()
        self._landing, self._fetched = None, None
        self._num_calls = self._num_returns = 0
        self._may_return = False
        self.present, self.doubtful = set(), []


class ViewProofState(StateBase):
    """Takes the place of the class of FSDP2's object.

    FSDP2 gathers a layer's parameters for the backward in a hook on its output. Where that is a view, as that of a
    linear layer on more than two dimensions, an operator in place makes a new one without the hook; the tensor that
    is viewed keeps its own.
    """

    def find_hooked(self, output: Any) -> Any:
        """Return ``output`` with what is viewed in place of the views."""
        return tree_map_only(Tensor, _hold, output)


def _hold(tensor: Tensor) -> Tensor:
    base = base_of(tensor)
    if base is None or not base.requires_grad or base.is_leaf:  # a parameter would collect hooks
        return tensor
    return base


def take_over(
    group: FSDPParamGroup, owner: GroupOwner, dtype_of: Callable[[Any], torch.dtype | None], place: Place
) -> ShardedGroup:
    """Make a :class:`ShardedGroup` of FSDP2's object.

    Args:
        group: Whose shards are on the host.
        owner: Hears of it.
        dtype_of: What autocast casts a parameter (FSDP2's object) to; ``None``: it does not.
        place: Where the shards are to be, on the device only if FSDP2 has put them there.
    """
    host: Any = group
    host.__class__ = ShardedGroup
    host.owner, host.present, host.doubtful = owner, set(), []
    host.home, host.landing = (host.device, None) if place == "device" else (owner.home, owner.landing)

    def key(parameter: Any) -> tuple[str, str, bool]:
        # Adapters are read in ways that need 32 bit; the frozen weights beside them are not.
        own = parameter.sharded_param.dtype
        return str(own), str(dtype_of(parameter) or own), parameter.sharded_param.requires_grad

    host.lanes = []
    host.steps = ShardSteps(host.lanes)
    for parameter in host.fsdp_params:
        parameter.__class__ = ShardedParameter
    for (_, _, is_trained), alike in groupby(sorted(host.fsdp_params, key=key), key):
        parameters = list(alike)
        dtype = dtype_of(parameters[0]) or parameters[0].sharded_param.dtype
        kinds = {"is_resident": place == "copy", "is_split": place != "device" and (owner.is_split or not is_trained)}
        lane = FlatShard(parameters, dtype, host.home, host.device, pin_memory=owner.pin_memory, **kinds)
        host.lanes.append(lane)
        for parameter in parameters:
            parameter.begin(lane, partial(host.steps.touch, lane))
            parameter.read_gradient = partial(host.steps.read_gradient, parameter)
        make_settable(parameter.sharded_param for parameter in parameters)
    host.lanes.sort(key=lambda lane: lane.numel)  # the computation waits for all but the last to be reduced
    return host  # type: ignore[no-any-return]


class DeviceShare:
    """Of one sharded module, on one rank."""

    def __init__(self) -> None:
        self._spare_bytes = 0  # that were given and not taken

    def plan(
        self,
        parts: Sequence[Sequence[nn.Module]],
        replicated: Iterable[nn.Parameter],
        dtypes: Mapping[nn.Parameter, torch.dtype | None],
        num_shards: int,
        device_bytes: float,
    ) -> list[Place]:
        """Choose where shards are, before there are any.

        Args:
            parts: Modules that are sharded together, in the order of sharding, the root last: a parameter is of the
                first that has it. The forward begins with the root.
            replicated: Parameters that are not sharded.
            dtypes: What some are sent as; others are sent as they are.
            num_shards: Of each parameter.
            device_bytes: That may be taken; a ``float`` is a share of what all would take.
        """
        claimed = {id(parameter) for parameter in replicated}
        claimed |= {
            id(parameter)
            for modules in parts
            for module in modules
            for part in module.modules()
            if isinstance(part, FSDPModule)  # sharded already, it stays as it is
            for parameter in part.parameters()
        }
        needs = []
        for modules in parts:
            ours = {id(p): p for module in modules for p in module.parameters() if id(p) not in claimed}
            claimed |= ours.keys()
            sizes = (-(-p.shape[0] // num_shards) * (p.numel() // p.shape[0]) for p in ours.values())  # padded
            kinds = ((p.dtype, dtypes.get(p) or p.dtype, p.requires_grad) for p in ours.values())
            needs.append(count_shard_bytes([(size, *kind) for size, kind in zip(sizes, kinds, strict=True)]))
        is_share = isinstance(device_bytes, float)
        budget_bytes = int(device_bytes * sum(need.device_bytes for need in needs) if is_share else device_bytes)
        *others, root = needs
        root_place, *places = plan_residency([root, *others], budget_bytes)
        self._spare_bytes = budget_bytes - count_taken(needs, [*places, root_place])
        return [*places, root_place]

    def limit(self, groups: Sequence[ShardedGroup]) -> None:
        """Have the lanes of ``groups`` ask before their copies take more bytes than planned."""
        for lane in (lane for group in groups for lane in group.lanes):
            lane.may_take = self._may_take

    def _may_take(self, num_bytes: int) -> bool:
        """Take more bytes, if they are there."""
        is_there = num_bytes <= self._spare_bytes
        self._spare_bytes -= num_bytes * is_there
        return is_there

    def keep_copies(self, groups: Sequence[ShardedGroup], device_bytes: int) -> int:
        """Have copies of shards stay on the device from now on, as far as they fit, and return their bytes.

        No step may be under way.
        """
        lanes = [
            [lane for lane in group.lanes if lane.resident is None] for group in groups if group.landing is not None
        ]
        sizes = [sum(lane.numel * lane.dtype.itemsize for lane in one) for one in lanes]
        chosen = plan_copies(sizes, device_bytes)
        taken_bytes = sum(size for size, is_chosen in zip(sizes, chosen, strict=True) if is_chosen)
        self._spare_bytes = device_bytes - taken_bytes
        for lane in (lane for one, is_chosen in zip(lanes, chosen, strict=True) if is_chosen for lane in one):
            lane.keep_copy()
        self.limit(groups)
        if any(chosen) and torch.accelerator.is_available():
            # Another stream is to write to memory that the computation has just left.
            torch.accelerator.synchronize()
        return taken_bytes
