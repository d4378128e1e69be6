"""Shards that are alike, one after the other in memory: one copy brings all of them to where they are computed with."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_vram.core.host.memory import SplitWeights, make_host_tensor
from lightning_vram.core.host.transfers import Ticket
from lightning_vram.private_names.dispatcher import FakeTensor
from lightning_vram.private_names.fsdp2 import own_shard_of, set_own_shard
from lightning_vram.private_names.torch import count_storage_users, num_writes, storage_identity
from lightning_vram.techniques.sharding.gathered import unwatch, watch


class FlatShard:
    """The shards of some parameters of one FSDP2 group, with one dtype at rest and one on the way.

    What is written to the shards has to be followed by :meth:`refresh` or :meth:`touch`, where it goes past the version
    counters of tensors: as fused optimizers do, and every operator on a ``DTensor``.

    Args:
        parameters: FSDP2's own objects, of one dtype. Their memory moves into that of the lane.
        dtype: What autocast would cast them to; theirs if it would not.
        home: Where they are at rest.
        device: Where they are computed with.
        pin_memory: Whether to pin what is copied from there and to there.
        is_resident: Whether a copy of the shards stays on the device.
        is_split: Whether float32 shards on the host that travel as bf16 are at rest as those and what they lack: they
            have memory of their own only from :meth:`open` to :meth:`refresh`, and while somebody holds it.

    Attributes:
        shards: Side by side; ``None`` at rest.
        split: What they are then.
        resident: That copy; ``None``: there is none.
        may_take: Asked before the copy takes so many more bytes, as where weights turn out to need 32 bit; else it is
            given up. May be set.
    """

    def __init__(  # noqa: PLR0913 - one caller
        self,
        parameters: Sequence[Any],
        dtype: torch.dtype,
        home: torch.device,
        device: torch.device,
        *,
        pin_memory: bool,
        is_resident: bool,
        is_split: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        self.dtype = dtype
        self.is_wide = False
        self.is_on_trial = self.needs_width = False
        self.device = device
        self._sizes = [parameter.memory.numel() for parameter in parameters]
        self.numel: int = sum(self._sizes)
        shards = _gather(parameters, self._sizes, home, pin_memory=pin_memory)
        self.shards: Tensor | None = shards
        self.own_dtype, self.own_device = shards.dtype, shards.device
        self.is_split = is_split and (self.own_dtype, dtype) == (torch.float32, torch.bfloat16)
        self.split: SplitWeights | None = None
        self._pin_memory = pin_memory
        self._num_users = self._count_users()
        self._has_sums = False
        is_low_precision = self.has_narrow_dtype and home != device and not self.is_split
        self._narrow = make_host_tensor(self.numel, dtype, pin_memory=pin_memory) if is_low_precision else None
        self.resident = self._make_copy() if is_resident else None
        self.may_take: Callable[[int], bool] = lambda num_bytes: True
        self._seen = -1  # version of the shards that the copies are of
        self._fetched: torch.Event | None = None
        self._arrived: torch.Event | None = None

    @property
    def has_narrow_dtype(self) -> bool:
        """Whether there are two dtypes."""
        return self.dtype != self.own_dtype

    @property
    def transfer_dtype(self) -> torch.dtype:
        """Of what is copied to the device now, and back."""
        return self.own_dtype if self.is_wide else self.dtype

    @property
    def _version(self) -> int:
        """Grows with every write that is counted."""
        flat = 0 if self.shards is None else num_writes(self.shards)
        return flat + sum(num_writes(parameter.memory) for parameter in self.parameters)

    @property
    def has_copies(self) -> bool:
        """Whether what is written to the shards has to be taken over somewhere."""
        return self._narrow is not None or self.resident is not None or self.is_split

    @property
    def is_joined(self) -> bool:
        """Whether shards that can be at rest are not."""
        return self.is_split and self.split is not None and self.shards is not None

    @property
    def host_bytes(self) -> int:
        """Memory of the shards, and of their copy that is on the way."""
        return sum(tensor.nbytes for tensor in (self.shards, self._narrow, self.split) if tensor is not None)

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay on the host in the dtype in which they came."""
        return self.is_split and not self._has_sums

    def release_gradients(self) -> None:
        """Let gradients that others are added to, or that somebody still has, no longer be kept in 16 bit."""
        for parameter in self.parameters if self.is_split else ():
            kept = parameter.kept_gradient
            if kept is not None and kept is parameter.sharded_param.grad:
                self._has_sums = True  # more than one comes before a step: from now on
            parameter.widen_gradient()

    def widen(self, *, is_wide: bool) -> None:
        """Choose whether the next fetch is of the shards as they are.

        What was gathered in the other dtype must no longer be in use.
        """
        if is_wide == self.is_wide or not self.has_narrow_dtype:
            return
        self.is_wide = is_wide
        for parameter in self.parameters:  # FSDP2 makes them again
            parameter.forget_whole()

    def stay_wide(self) -> None:
        """Give the narrow dtype up. What was gathered must no longer be in use, and no step be under way."""
        if not self.has_narrow_dtype:
            return
        self.widen(is_wide=True)
        self.open()
        self.dtype, self.is_wide, self._narrow, self._seen = self.own_dtype, False, None, -1
        self.is_split, self.split = False, None
        if self.resident is not None:
            is_kept = self.may_take(self.numel * self.dtype.itemsize - self.resident.nbytes)
            self.resident = self._make_copy() if is_kept else None

    def keep_copy(self) -> None:
        """Have a copy stay on the device from now on. No step may be under way, nor work of the device."""
        if self.resident is None:
            self.resident, self._seen = self._make_copy(), -1

    def _make_copy(self) -> Tensor:
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def open(self) -> None:
        """Have the shards in memory of their own, for whoever reads or writes them until they are at rest again."""
        if self.shards is None:
            assert self.split is not None
            self.shards = self.split.read_all()
            for parameter, place in zip(self.parameters, _split(self.shards, self._sizes), strict=True):
                _put(parameter, place)
            self._num_users = self._count_users()
            self.touch()

    def _rest(self) -> Tensor:
        """Take over the shards into what they are at rest, and free them. Returns what travels."""
        assert self.shards is not None
        if self.split is None:
            self.split = SplitWeights(self._sizes, pin_memory=self._pin_memory)
        self.split.write_all(self.shards)
        is_held = self._count_users() > self._num_users and not isinstance(self.shards, FakeTensor)
        if not is_held:  # else somebody would read what is no longer the weight
            nothing = self.shards.new_full((), torch.nan)
            for parameter, size in zip(self.parameters, self._sizes, strict=True):
                _put(parameter, nothing.expand(size))
            self.shards = None
        return self.split.upper

    def _count_users(self) -> int:
        """Of the memory of shards: what FSDP2 has, and what others do."""
        memories = [parameter.memory for parameter in self.parameters if self.is_split]
        return sum(count_storage_users(storage_identity(memory)) for memory in memories)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over into the copies what was written to the shards. Called by one thread at a time."""
        self.wait_for_copies()
        source = self.split.upper if self.shards is None and self.split is not None else self.shards
        assert source is not None
        if self._narrow is not None:
            source = self._narrow.copy_(source)
        elif self.is_split and self.shards is not None and not (self.is_on_trial or self.needs_width):
            source = self._rest()
        if self.resident is not None:
            with _side_stream(self.device):
                self.resident.copy_(source, non_blocking=True)
                self._arrived = _record(self.device)
        self._seen = self._version

    def note_read(self) -> None:
        """Note that the current stream, when it gets there, has read what was fetched."""
        self._fetched = _record(self.device)

    def wait_for_copies(self) -> None:
        """Wait until the device has read what another thread is to write: shards on the host, copies anywhere."""
        if self.own_device != self.device or self.has_copies:
            # Where weights were fetched as they are, nobody has waited for what came to the resident copy.
            for event in (self._fetched, self._arrived):
                if event is not None:
                    event.synchronize()

    def touch(self) -> None:
        """Have the next fetch take over what is in the shards then."""
        self._seen = -1

    @torch.no_grad()
    def fetch(self) -> Iterator[Tensor]:
        """Copy all to the device, on its current stream.

        Returns:
            For each parameter its shard there, flat, to be read only.
        """
        if self.is_split and self.is_wide:
            self.open()
            self.touch()  # what was opened for this is to rest after it
        elif self.has_copies and self._seen != self._version:
            self.refresh()
        if self.resident is None or self.is_wide:
            source = self.shards if self._narrow is None or self.is_wide else self._narrow
            if self.split is not None and not self.is_wide:
                source = self.split.upper
            assert source is not None
            flat = source.to(self.device, self.transfer_dtype, non_blocking=True)
        else:
            flat = self.resident
            if self._arrived is not None:
                torch.accelerator.current_stream().wait_event(self._arrived)
        self._fetched = _record(self.device)
        return iter(torch.split(flat, self._sizes))


def _gather(parameters: Iterable[Any], sizes: Sequence[int], home: torch.device, *, pin_memory: bool) -> Tensor:
    """Move shards into memory of their own, one after the other."""
    dtypes = {parameter.memory.dtype for parameter in parameters}
    assert len(dtypes) == 1, dtypes
    dtype, numel = dtypes.pop(), sum(sizes)
    if home.type == "cpu":
        shards = make_host_tensor(numel, dtype, pin_memory=pin_memory)
    else:
        shards = torch.empty(numel, dtype=dtype, device=home)
    for parameter, place in zip(parameters, _split(shards, sizes), strict=True):
        place.copy_(parameter.memory)
        _put(parameter, place)
    return shards


def _put(parameter: Any, place: Tensor) -> None:
    """Let ``place``, flat, be the memory of a shard."""
    old = own_shard_of(parameter.sharded_param)
    length = old.shape[0] if old.numel() else 0
    parameter.memory = place
    local = place.view(parameter.padded_sharded_param_size).narrow(0, 0, length)
    set_own_shard(parameter.sharded_param, local.view(old.shape))


def _split(shards: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """Cut ``shards``. On the host each part begins a storage: a ``DTensor`` over an offset cannot be deepcopied."""
    if shards.device.type != "cpu" or isinstance(shards, FakeTensor):
        yield from torch.split(shards, list(sizes))
        return
    memory, start = shards.untyped_storage(), shards.storage_offset() * shards.itemsize
    for size in sizes:
        stop = start + size * shards.itemsize
        yield torch.empty(0, dtype=shards.dtype).set_(memory[start:stop])
        start = stop


def _record(device: torch.device) -> torch.Event | None:
    return None if device.type == "cpu" else torch.accelerator.current_stream().record_event()


_streams: dict[torch.device, Any] = {}


def _side_stream(device: torch.device) -> Any:
    """A stream of its own for copies that another thread issues."""
    if device.type == "cpu":
        return torch.no_grad()
    if device not in _streams:
        _streams[device] = torch.Stream(device)
    return _streams[device]


# Steps that go on beside the training: whoever wants to read what one writes waits for it.
#
# What only reads the shards, as an average of weights does, is waited for by who may write to them, and by who wants
# what comes of it; not by a fetch for the next forward.


class ShardSteps:
    """Of the shards of one group."""

    def __init__(self, lanes: Sequence[FlatShard]) -> None:
        self._lanes = lanes
        self._pending: list[tuple[Ticket, list[Tensor], bool]] = []  # jobs in their order
        self._reader: int | None = None  # the thread that reads for a step

    def begin(self, ticket: Ticket, watched: Iterable[Tensor], *, is_reader: bool = False) -> None:
        """Note that ``watched`` tensors are not to be used until ``ticket`` is done.

        Args:
            ticket: Of a job that is done after those before.
            watched: What it uses.
            is_reader: Whether it leaves the shards as they are.
        """
        if self._pending and self._pending[-1][0].is_done:
            self._end(len(self._pending))  # all: else there would be more and more where nobody steps
        watched = list(watched)
        for lane in self._lanes:
            if lane.is_split:  # all of it comes to rest
                watched += [parameter.sharded_param for parameter in lane.parameters]
        self._pending.append((ticket, watched, is_reader))
        watch(watched, self.wait)

    def wait(self) -> None:
        """Wait until the shards are written, and nobody reads them."""
        self._end(len(self._pending))

    def wait_for_writes(self) -> None:
        """Wait until the shards are written, before reading them."""
        self._end(max((place for place, (*_, is_reader) in enumerate(self._pending, 1) if not is_reader), default=0))

    def _end(self, count: int) -> None:
        """Wait for the first of the pending jobs."""
        ended, self._pending = self._pending[:count], self._pending[count:]
        if not ended:
            return
        try:
            ended[-1][0].wait()
        finally:
            for _, watched, _ in ended:
                unwatch(watched)
            for _, watched, _ in self._pending:
                watch(watched, self.wait)
            self.guard()

    def guard(self) -> None:
        """Hear of it when somebody gets hold of a shard, who may write to it: see :meth:`touch`."""
        for lane in self._lanes:
            if lane.has_copies or lane.own_device != lane.device:
                watch((parameter.sharded_param for parameter in lane.parameters), partial(self.touch, lane))
            for parameter in lane.parameters if lane.is_split else ():
                parameter.watch_gradient()

    def rest(self) -> None:
        """Free the memory that split shards were joined in for somebody who has read them; no step is under way."""
        joined = [lane for lane in self._lanes if lane.is_joined]
        for lane in joined:
            lane.refresh()
        if joined:
            self.guard()

    def touch(self, lane: FlatShard) -> None:
        """Have copies of the shards in ``lane`` made again, once those are written; first the device has read them."""
        self.wait()
        if not self._is_reading_for_step:
            lane.wait_for_copies()
            lane.open()
        lane.touch()

    def read_gradient(self, parameter: Any) -> None:
        """Have what is kept in 16 bit in the dtype of the shard; not for a step, which needs a part at a time.

        No step is reading it beside this: whoever comes to a gradient of such a step waits in :meth:`wait` first.
        """
        if not self._is_reading_for_step:
            parameter.widen_gradient()

    @property
    def _is_reading_for_step(self) -> bool:
        return self._reader == threading.get_ident()

    @contextmanager
    def reading_for_step(self) -> Iterator[None]:
        """Who gets hold of shards meanwhile writes in another thread, which waits: this one need not."""
        self._reader = threading.get_ident()
        try:
            yield
        finally:
            self._reader = None


# Which shards stay on the device, within so many bytes: those that save most on the bus for each of them.
#
# What crosses the bus for a weight in a step of one micro-batch, which gathers it for the forward and for the backward:
#
# * at home on the host: the weight twice, its gradient once;
# * with a copy on the device: the copy is renewed once, the gradient sent once. A frozen weight has neither;
# * at home on the device, with its gradient and the states of its optimizer: nothing.
#
# With AdamW in float32 these are 12, 8 for 4 bytes on the device, and 0 for 16: copies come first.

Place = Literal["host", "copy", "device"]
"""Where the shards of a group are: on the host, there with a copy on the device, or on the device alone."""

_NUM_FETCHES = 2  # for the forward and for the backward
_NUM_HELD = 4  # weight, gradient and the two moments of AdamW, all in the dtype of the weight


@dataclass(frozen=True)
class ShardBytes:
    """What shards of one group take and what crosses the bus for them in a step, on one rank.

    Attributes:
        copy_bytes: On the device, of a copy.
        device_bytes: On the device, of weights, gradients and moments.
        sent_bytes: Over the bus, from and to the host.
        sent_with_copy_bytes: Over the bus, where there is a copy.
    """

    copy_bytes: int
    device_bytes: int
    sent_bytes: int
    sent_with_copy_bytes: int


def count_shard_bytes(shards: Iterable[tuple[int, torch.dtype, torch.dtype, bool]]) -> ShardBytes:
    """Count for shards of one group, each given as its numbers, dtype, dtype on the bus, and whether it is trained."""
    copied = held = sent = sent_with_copy = 0
    for numel, dtype, bus_dtype, is_trained in shards:
        one = numel * bus_dtype.itemsize
        copied += one
        held += numel * dtype.itemsize * (_NUM_HELD if is_trained else 1)
        sent += one * (_NUM_FETCHES + is_trained)
        sent_with_copy += 2 * one * is_trained
    return ShardBytes(copied, held, sent, sent_with_copy)


def plan_residency(groups: Sequence[ShardBytes], budget_bytes: int) -> list[Place]:
    """Choose where the shards of each group are.

    Greedy, by the bytes saved on the bus for each byte on the device; at equal gain the groups that come first: their
    steps are the last to be done before the next forward. What does not fit is passed over, for what comes behind it.
    A larger budget never takes fewer bytes, nor saves less.

    Args:
        groups: In the order in which they are computed.
        budget_bytes: Of the device.
    """
    steps = []  # gain for each byte, group, what for, bytes, and where the group has to be before
    for index, group in enumerate(groups):
        if not group.device_bytes:
            continue
        direct = group.sent_bytes / group.device_bytes
        first = (group.sent_bytes - group.sent_with_copy_bytes) / group.copy_bytes
        if first > direct:
            rest = group.device_bytes - group.copy_bytes
            steps.append((first, index, "copy", group.copy_bytes, "host"))
            steps.append((group.sent_with_copy_bytes / max(rest, 1), index, "device", rest, "copy"))
        else:
            steps.append((direct, index, "device", group.device_bytes, "host"))
    places: list[Any] = ["host"] * len(groups)
    for _, index, place, num_bytes, before in sorted(steps, key=lambda step: -step[0]):
        if places[index] == before and num_bytes <= budget_bytes:
            places[index] = place
            budget_bytes -= num_bytes
    return places


def plan_copies(copy_bytes: Sequence[int], budget_bytes: int) -> list[bool]:
    """Choose of which groups a copy stays on the device: those that come first, as far as they fit."""
    chosen = []
    for num_bytes in copy_bytes:
        chosen.append(num_bytes <= budget_bytes)
        budget_bytes -= num_bytes * chosen[-1]
    return chosen


def count_taken(groups: Iterable[ShardBytes], places: Iterable[Place]) -> int:
    """Return the bytes of the device that a plan takes."""
    pairs = zip(groups, places, strict=True)
    return sum({"host": 0, "copy": group.copy_bytes, "device": group.device_bytes}[place] for group, place in pairs)
