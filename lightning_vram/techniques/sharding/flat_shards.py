"""Flat shards, the optimizer steps that write them, and which of them stay on the device.

A flat shard is a run of parameters' shards in one allocation, so that one copy brings all of them to the device.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_vram.core.host.memory import SplitWeights, make_host_tensor
from lightning_vram.core.host.transfers import Ticket
from lightning_vram.private_names.dispatcher import FakeTensor
from lightning_vram.private_names.fsdp2 import memory_of, own_shard_of, set_own_shard
from lightning_vram.private_names.torch import count_storage_users, num_writes, storage_identity
from lightning_vram.techniques.sharding.parameter import unwatch, upcast, watch


class FlatShard:
    """The shards of some parameters of one FSDP2 group: of one dtype, and of one dtype for transfers.

    Writes past the version counters of tensors, as by fused optimizers and all operators on a ``DTensor``, must be
    followed by :meth:`refresh` or :meth:`touch`.

    Args:
        parameters: FSDP2's own objects. Their memory becomes part of the flat shard.
        dtype: What autocast would cast them to, else their own.
        home: Device that stores them.
        device: Device that computes with them.
        pin_memory: Whether to pin host memory of transfers.
        is_resident: Whether a copy stays on the device.
        is_split: Whether fp32 shards on the host with bf16 transfers are stored as a bf16 half and a remainder. They
            have memory of their own only from :meth:`open` to :meth:`refresh`, and while other code holds it.
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
        self.parameters, self.dtype, self.device = list(parameters), dtype, device
        self.is_fp32 = self.is_on_trial = self.needs_fp32 = False
        self.seen_in_fp32 = False  # written in a step, or computed with in fp32
        self._sizes = [parameter.memory.numel() for parameter in parameters]
        self.numel: int = sum(self._sizes)
        # ``None`` while only ``split`` is stored
        self.shards: Tensor | None = _gather(parameters, self._sizes, home, pin_memory=pin_memory)
        self.own_dtype, self.own_device = self.shards.dtype, self.shards.device
        self.is_split = is_split and (self.own_dtype, dtype) == (torch.float32, torch.bfloat16)
        self.split: SplitWeights | None = None
        self._pin_memory, self._has_sums = pin_memory, False
        self._num_users = self._count_users()
        is_low_precision = self.has_low_precision and home != device and not self.is_split
        self._low_precision = make_host_tensor(self.numel, dtype, pin_memory=pin_memory) if is_low_precision else None
        self.resident = self._make_copy() if is_resident else None
        self.may_grow = True  # whether the copy becomes larger when weights turn out to need fp32, or is dropped
        self._seen = -1  # version of the shards that the copies are of
        self._fetched: torch.Event | None = None
        self._arrived: torch.Event | None = None

    @property
    def has_low_precision(self) -> bool:
        """Whether transfers can have a lower precision than the shards."""
        return self.dtype != self.own_dtype

    @property
    def transfer_dtype(self) -> torch.dtype:
        """Dtype of the current copies to and from the device."""
        return self.own_dtype if self.is_fp32 else self.dtype

    @property
    def _version(self) -> int:
        """Grows with every counted write."""
        flat = 0 if self.shards is None else num_writes(self.shards)
        return flat + sum(map(num_writes, map(memory_of, self.parameters)))

    @property
    def has_copies(self) -> bool:
        """Whether writes to the shards must be propagated."""
        return self._low_precision is not None or self.resident is not None or self.is_split

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients stay on the host in the transfer dtype."""
        return self.is_split and not self._has_sums

    def release_gradients(self) -> None:
        """Upcast 16-bit gradients: others are accumulated into them, or code holds them."""
        for parameter in self.parameters if self.is_split else ():
            gradient = parameter.low_precision_gradient
            if gradient is not None and gradient is parameter.sharded_param.grad:
                self._has_sums = True  # gradients are accumulated: from now on in fp32
            upcast(gradient)

    def set_fp32(self, *, is_fp32: bool) -> None:
        """Choose whether fetches transfer fp32. Parameters gathered in the other dtype must be out of use."""
        if is_fp32 == self.is_fp32 or not self.has_low_precision:
            return
        self.is_fp32 = is_fp32
        for parameter in self.parameters:  # FSDP2 allocates them for the other dtype
            parameter.forget_whole()

    def stay_fp32(self) -> None:
        """Give up low precision. No parameter may be gathered, and no step pending."""
        if not self.has_low_precision:
            return
        self.set_fp32(is_fp32=True)
        self.open()
        self.dtype, self.is_fp32, self._low_precision, self._seen = self.own_dtype, False, None, -1
        self.is_split, self.split = False, None
        if self.resident is not None:
            self.resident = self._make_copy() if self.may_grow else None

    def keep_copy(self) -> None:
        """Keep a copy on the device from now on. No step may be pending, nor device work."""
        self.resident, self._seen = self._make_copy(), -1

    def _make_copy(self) -> Tensor:
        return torch.empty(self.numel, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def open(self) -> None:
        """Join split shards in memory of their own, until :meth:`refresh`."""
        if self.shards is None:
            assert self.split is not None
            self.shards = self.split.read_all()
            for parameter, place in zip(self.parameters, _split(self.shards, self._sizes), strict=True):
                _put(parameter, place)
            self._num_users = self._count_users()
            self.touch()

    def _rest(self) -> Tensor:
        """Split the shards and free them. Returns the half to transfer."""
        assert self.shards is not None
        if self.split is None:
            self.split = SplitWeights(self._sizes, pin_memory=self._pin_memory)
        self.split.write_all(self.shards)
        is_held = self._count_users() > self._num_users and not isinstance(self.shards, FakeTensor)
        if not is_held:  # else that code would read stale values
            nothing = self.shards.new_full((), torch.nan)
            for parameter, size in zip(self.parameters, self._sizes, strict=True):
                _put(parameter, nothing.expand(size))
            self.shards = None
        return self.split.upper

    def _count_users(self) -> int:
        """Count the references to the memory of split shards: FSDP2's, and others."""
        memories = [parameter.memory for parameter in self.parameters if self.is_split]
        return sum(count_storage_users(storage_identity(memory)) for memory in memories)

    @torch.no_grad()
    def refresh(self) -> None:
        """Propagate writes to the copies. Called by one thread at a time."""
        self.wait_for_copies()
        source = self.split.upper if self.shards is None and self.split is not None else self.shards
        assert source is not None
        if self._low_precision is not None:
            source = self._low_precision.copy_(source)
        elif self.is_split and self.shards is not None and not (self.is_on_trial or self.needs_fp32):
            source = self._rest()
        if self.resident is not None:
            with _side_stream(self.device):
                self.resident.copy_(source, non_blocking=True)
                self._arrived = _record(self.device)
        self._seen = self._version

    def note_read(self) -> None:
        """Record that the current stream has, up to here, read the fetched copy."""
        self._fetched = _record(self.device)

    def wait_for_copies(self) -> None:
        """Wait until the device has read shards and copies that another thread is about to write."""
        if self.own_device != self.device or self.has_copies:
            # After a fetch in fp32 nothing has waited for the resident copy.
            for event in (self._fetched, self._arrived):
                if event is not None:
                    event.synchronize()

    def touch(self) -> None:
        """Let the next fetch refresh the copies."""
        self._seen = -1

    @torch.no_grad()
    def fetch(self) -> Iterator[Tensor]:
        """Copy to the device, on its current stream; return one flat read-only shard per parameter."""
        if self.is_split and self.is_fp32:
            self.open()
            self.touch()  # joined for this fetch, split again after it
        elif self.has_copies and self._seen != self._version:
            self.refresh()
        if self.resident is None or self.is_fp32:
            source = self.shards if self._low_precision is None or self.is_fp32 else self._low_precision
            if self.split is not None and not self.is_fp32:
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
    """Move shards into one allocation."""
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
    """Make ``place``, flat, the memory of a shard."""
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


@cache
def _side_stream(device: torch.device) -> Any:
    """A stream for copies that another thread issues."""
    return nullcontext() if device.type == "cpu" else torch.Stream(device)


class ShardSteps:
    """Pending optimizer steps on the shards of one group: code that uses what a step reads or writes waits for it.

    A job that only reads shards, as for an average of weights, blocks writes to them, not the fetch for the next
    forward.
    """

    def __init__(self, flat_shards: Sequence[FlatShard]) -> None:
        self._flat_shards = flat_shards
        self._pending: list[tuple[Ticket, list[Tensor], bool]] = []  # jobs in their order

    def begin(self, ticket: Ticket, watched: Iterable[Tensor], *, is_reader: bool = False) -> None:
        """Block use of the shards and ``watched`` tensors until ``ticket``; a reader writes no shards."""
        if self._pending and self._pending[-1][0].is_done:
            self._end(len(self._pending))  # all: else the list would grow where no step follows
        watched = list(watched)
        self._pending.append((ticket, watched, is_reader))
        watch(watched, self.wait)

    def wait(self) -> None:
        """Wait until the shards are written, and no job reads them."""
        self._end(len(self._pending))

    def wait_for_writes(self) -> None:
        """Wait until the shards are written, before reading them."""
        self._end(max((place for place, (*_, is_reader) in enumerate(self._pending, 1) if not is_reader), default=0))

    def _end(self, count: int) -> None:
        """Wait for the first ``count`` jobs."""
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
            for flat in (flat for flat in self._flat_shards if flat.is_split):
                for parameter in flat.parameters:
                    parameter.watch_gradient()

    def rest(self) -> None:
        """Split shards again that code has read; no step may be pending."""
        for flat in self._flat_shards:
            if flat.is_split and flat.split is not None and flat.shards is not None:
                flat.refresh()

    def touch(self, flat: FlatShard) -> None:
        """Refresh copies after the write that may follow; wait for steps, and until the device has read the shards."""
        self.wait()
        flat.wait_for_copies()
        flat.open()
        flat.touch()


# Transfers of a group in a step. "host": weights twice, gradients once. "copy", on the host with a copy on the device:
# the copy and gradients once. "device", with gradients and optimizer state: none. With AdamW in fp32 that is 12 bytes,
# 8 for 4 on the device, and 0 for 16: copies come first.
Place = Literal["host", "copy", "device"]


def plan_residency(groups: Sequence[tuple[int, int]], budget_bytes: int) -> list[Place]:
    """Choose where each group's shards are stored, by the bytes of its copy, and of all that it has on the device.

    ``groups`` in the order of computation: the steps of the first ones are the last to finish before the next forward,
    so that they come first. One that does not fit is skipped.
    """
    places: list[Any] = ["host"] * len(groups)
    for before, after in (("host", "copy"), ("copy", "device")):
        for index, (copy_bytes, device_bytes) in enumerate(groups):
            num_bytes = copy_bytes if after == "copy" else device_bytes - copy_bytes
            if device_bytes and places[index] == before and num_bytes <= budget_bytes:
                places[index] = after
                budget_bytes -= num_bytes
    return places
