"""Float32 weights as the bf16 ones that travel and the sixteen bits that those lack: four bytes each, to the bit.

A copy of its own for the way to the device would make six. The bf16 weight is the nearest one, halves to even, as any
conversion makes it: 65537 float32 numbers come to each even one, and sixteen bits tell 65536 apart. The one too many,
about one weight of 131072, is in a list.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lightning_vram.core.host.arena import make_host_tensor
from lightning_vram.private_names.torch.dispatch import FakeTensor

PART_ELEMENTS = 2**19
"""Most weights that are split or joined at once, so that what is made of them in between stays in the caches."""
_HALF = 0x8000
_LOWER = 0xFFFF

Part = tuple[int, int]
Odd = tuple[Tensor | None, Tensor]
"""Weights of a part that sixteen bits do not tell apart: which (``None``: all), and their upper halves."""
_NOTHING: Odd = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int16)


class SplitWeights:
    """Some tensors of float32 on the host, one after the other, in parts that are read and written at once.

    Args:
        sizes: Numbers of weights of the tensors.
        pin_memory: Whether to pin what travels.

    Attributes:
        upper: What travels: bf16, flat, to be read only.
        parts: Of each tensor where its parts begin and end, counted in all of them. One without weights has one.
    """

    def __init__(self, sizes: Sequence[int], *, pin_memory: bool) -> None:
        numel = sum(sizes)
        self.upper = make_host_tensor(numel, torch.bfloat16, pin_memory=pin_memory)
        self._lower = make_host_tensor(numel, torch.int16, pin_memory=False)
        self._exceptions: dict[int, Odd] = {}  # by part
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        self.parts = [list(cut_parts(start, start + size)) for start, size in zip(starts, sizes, strict=True)]

    @property
    def nbytes(self) -> int:
        """Memory that all takes."""
        lists = [tensor for pair in self._exceptions.values() for tensor in pair if tensor is not None]
        return sum(tensor.nbytes for tensor in (self.upper, self._lower, *lists))

    def write_all(self, numbers: Tensor) -> None:
        """Take over all weights, flat."""
        for start, stop in self._parts_to_do(numbers):
            self.write((start, stop), numbers[start:stop])

    def read_all(self) -> Tensor:
        """Return all weights, flat, in memory of their own."""
        numbers = torch.empty(self.upper.numel(), dtype=torch.float32, device="cpu")
        for start, stop in self._parts_to_do(numbers):
            self._read((start, stop), numbers[start:stop])
        return numbers

    def _parts_to_do(self, numbers: Tensor) -> list[Part]:
        parts = [part for parts in self.parts for part in parts]
        if isinstance(numbers, FakeTensor):  # nothing is computed, and no part takes more memory than the largest
            return [max(parts, key=lambda part: part[1] - part[0])] if parts else []
        return parts

    def read(self, part: Part) -> Tensor:
        """Return the weights of one part, flat, in memory of their own."""
        numbers = torch.empty(part[1] - part[0], dtype=torch.float32, device="cpu")
        self._read(part, numbers)
        return numbers

    def write(self, part: Part, numbers: Tensor) -> None:
        """Take over the weights of one part, flat."""
        bits, upper = numbers.view(torch.int32), self.upper[slice(*part)]
        upper.copy_(numbers)
        lacking = torch.sub(bits, upper.float().view(torch.int32))
        self._lower[slice(*part)].copy_(lacking)  # a narrowing copy keeps the lower half
        self._exceptions.pop(part[0], None)
        if isinstance(numbers, FakeTensor) or not numbers.numel():
            return
        places = lacking.add_(_HALF).bitwise_right_shift_(16).nonzero().view(-1)  # where it is more than sixteen bits
        if 3 * places.numel() > numbers.numel():  # then all halves are shorter than the list
            self._exceptions[part[0]] = None, bits.bitwise_right_shift(16).to(torch.int16)
        elif places.numel():
            self._exceptions[part[0]] = places.int(), bits[places].bitwise_right_shift_(16).to(torch.int16)

    def pieces(self, part: Part) -> tuple[Tensor, Tensor, Odd]:
        """Return what one part is at rest, to be written to: what travels, what that lacks, and :data:`Odd`."""
        return self.upper[slice(*part)], self._lower[slice(*part)], self._exceptions.get(part[0], _NOTHING)

    def note_odd(self, part: Part, places: Tensor, halves: Tensor) -> None:
        """Take over what is odd of a part whose :meth:`pieces` were written."""
        self._exceptions.pop(part[0], None)
        if places.numel():
            self._exceptions[part[0]] = places, halves
        if 3 * places.numel() > part[1] - part[0]:
            self.write(part, self.read(part))

    def _read(self, part: Part, numbers: Tensor) -> None:
        lower = self._lower[slice(*part)]
        bits = numbers.copy_(self.upper[slice(*part)]).view(torch.int32)
        bits.add_(lower.int())
        if part[0] in self._exceptions and numbers.numel():
            places, halves = self._exceptions[part[0]]
            chosen = slice(None) if places is None else places.long()
            bits[chosen] = halves.int().bitwise_left_shift_(16).bitwise_or_(lower[chosen].int().bitwise_and_(_LOWER))


def cut_parts(start: int, stop: int, most: int | None = None) -> Iterator[Part]:
    """Cut a tensor into parts. Kernels round the end of a vector otherwise than its middle: few bits before it."""
    if start == stop:
        yield start, stop
    most = PART_ELEMENTS if most is None else most
    for first in range(start, stop, most):
        yield first, min(first + most, stop)
