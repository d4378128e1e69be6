"""Float32 weights split into bf16 weights and a 16-bit remainder."""

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
    """Float32 tensors of these ``sizes`` as bf16 weights and a 16-bit remainder: 4 bytes each, bit-exact.

    A separate bf16 copy to send to the device would make six. The bf16 weight is the nearest one, halves to even, as in
    any conversion: 65537 float32 numbers round to each even one, and sixteen bits distinguish 65536. The one too many,
    about one weight of 131072, is in a list. ``upper`` is the flat bf16 tensor that is sent, to be read only; ``parts``
    are the ranges of each tensor that are read and written at once, counted over all of them. An empty tensor has one.
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
        """Memory of everything."""
        lists = [tensor for pair in self._exceptions.values() for tensor in pair if tensor is not None]
        return sum(tensor.nbytes for tensor in (self.upper, self._lower, *lists))

    def write_all(self, numbers: Tensor) -> None:
        """Set all weights from a flat tensor."""
        for start, stop in self._parts_to_do(numbers):
            self.write((start, stop), numbers[start:stop])

    def read_all(self) -> Tensor:
        """Return all weights, flat, in new memory."""
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
        """Return the weights of one part, flat, in new memory."""
        numbers = torch.empty(part[1] - part[0], dtype=torch.float32, device="cpu")
        self._read(part, numbers)
        return numbers

    def write(self, part: Part, numbers: Tensor) -> None:
        """Set the weights of one part from a flat tensor."""
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
        """Return the memory of one part, to be written to: bf16 weights, remainders, and :data:`Odd`."""
        return self.upper[slice(*part)], self._lower[slice(*part)], self._exceptions.get(part[0], _NOTHING)

    def note_odd(self, part: Part, places: Tensor, halves: Tensor) -> None:
        """Set the odd weights of a part whose :meth:`pieces` were written."""
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
    """Cut a tensor into parts. Kernels round the end of a vector differently from its middle: few bits before it."""
    if start == stop:
        yield start, stop
    most = PART_ELEMENTS if most is None else most
    for first in range(start, stop, most):
        yield first, min(first + most, stop)
