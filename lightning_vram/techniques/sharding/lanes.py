"""Shards that are alike, one after the other in memory: one copy brings all of them to where they are computed with."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.host.arena import make_host_tensor
from lightning_vram.private_names.torch.dispatch import FakeTensor
from lightning_vram.private_names.torch.tensors import local_part_of, num_writes, set_local_part


class ShardLane:
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

    Attributes:
        resident: That copy; ``None``: there is none.
        may_take: Asked before the copy takes so many more bytes, as where weights turn out to need 32 bit; else it is
            given up. May be set.
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        dtype: torch.dtype,
        home: torch.device,
        device: torch.device,
        *,
        pin_memory: bool,
        is_resident: bool,
    ) -> None:
        self.parameters = list(parameters)
        self.dtype = dtype
        self.is_wide = False
        self.is_on_trial = self.needs_width = False
        self.device = device
        self._sizes = [parameter.memory.numel() for parameter in parameters]
        self.shards = _gather(parameters, self._sizes, home, pin_memory=pin_memory)
        is_narrow = dtype != self.shards.dtype and home != device
        self._narrow = make_host_tensor(self.shards.numel(), dtype, pin_memory=pin_memory) if is_narrow else None
        self.resident = self._make_copy() if is_resident else None
        self.may_take: Callable[[int], bool] = lambda num_bytes: True
        self._seen = -1  # version of the shards that the copies are of
        self._fetched: torch.Event | None = None
        self._arrived: torch.Event | None = None

    @property
    def has_narrow_dtype(self) -> bool:
        """Whether there are two dtypes."""
        return self.dtype != self.shards.dtype

    @property
    def transfer_dtype(self) -> torch.dtype:
        """Of what is copied to the device now, and back."""
        return self.shards.dtype if self.is_wide else self.dtype

    @property
    def _version(self) -> int:
        """Grows with every write that is counted."""
        return num_writes(self.shards) + sum(num_writes(parameter.memory) for parameter in self.parameters)

    @property
    def has_copies(self) -> bool:
        """Whether what is written to the shards has to be taken over somewhere."""
        return self._narrow is not None or self.resident is not None

    @property
    def host_bytes(self) -> int:
        """Memory of the shards, and of their copy that is on the way."""
        return sum(tensor.nbytes for tensor in (self.shards, self._narrow) if tensor is not None)

    def widen(self, *, is_wide: bool) -> None:
        """Choose whether the next fetch is of the shards as they are.

        What was gathered in the other dtype must no longer be in use.
        """
        if is_wide == self.is_wide or self.dtype == self.shards.dtype:
            return
        self.is_wide = is_wide
        for parameter in self.parameters:  # FSDP2 makes them again
            parameter.forget_whole()

    def stay_wide(self) -> None:
        """Give the narrow dtype up. What was gathered must no longer be in use, and no step be under way."""
        if not self.has_narrow_dtype:
            return
        self.widen(is_wide=True)
        self.dtype, self.is_wide, self._narrow, self._seen = self.shards.dtype, False, None, -1
        if self.resident is not None:
            is_kept = self.may_take(self.shards.nbytes - self.resident.nbytes)
            self.resident = self._make_copy() if is_kept else None

    def keep_copy(self) -> None:
        """Have a copy stay on the device from now on. No step may be under way, nor work of the device."""
        if self.resident is None:
            self.resident, self._seen = self._make_copy(), -1

    def _make_copy(self) -> Tensor:
        return torch.empty(self.shards.numel(), dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over into the copies what was written to the shards. Called by one thread at a time."""
        self.wait_for_copies()
        source = self.shards
        if self._narrow is not None:
            source = self._narrow.copy_(self.shards)
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
        if self.shards.device != self.device or self.has_copies:
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
        if self.has_copies and self._seen != self._version:
            self.refresh()
        if self.resident is None or self.is_wide:
            source = self.shards if self._narrow is None or self.is_wide else self._narrow
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
        old = local_part_of(parameter.sharded_param)
        length = old.shape[0] if old.numel() else 0
        parameter.memory = place
        local = place.view(parameter.padded_sharded_param_size).narrow(0, 0, length)
        set_local_part(parameter.sharded_param, local.view(old.shape))
    return shards


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
