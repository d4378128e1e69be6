"""Choose the encoding of a saved tensor: lossless by what its values are known to be, or lossy where allowed."""

from functools import partial

import torch
from torch import Tensor

from lightning_vram.core.tensors.by_storage import StorageMemo
from lightning_vram.core.tensors.lossy_codecs import LossyFormat, decode, encode
from lightning_vram.techniques.activation_compression.encoded_storage import Encode
from lightning_vram.techniques.activation_compression.lossless_codecs import (
    Encoding,
    narrow_indices,
    pack_mask,
    pack_signs,
    pack_two_values,
)
from lightning_vram.techniques.activation_compression.signs import LearnedSigns, NewActivation
from lightning_vram.techniques.activation_compression.value_notes import ValueNotes


class EncodingChoice:
    """Chooses by the arguments of ``CompressionStage`` and by what ``notes`` knows of values."""

    def __init__(self, notes: ValueNotes, *, lossless: bool, lossy: LossyFormat | None, block_size: int) -> None:
        self._notes = notes
        self._lossless = lossless
        self._lossy = lossy
        self._block_size = block_size
        self.activation = NewActivation()
        self.signs = LearnedSigns()
        self.wholes: StorageMemo[torch.UntypedStorage] = StorageMemo()
        """What is kept as it is: another view of it needs no encoding with a loss."""

    def choose(self, tensor: Tensor, *, is_lossy: bool, is_autograds: bool) -> tuple[Encode | None, str]:
        """Return how ``tensor`` is encoded (``None``: it is not) and the name of the kind.

        ``is_autograds`` is false if another stage hands it on, which may read its values.
        """
        if self._lossless:
            if tensor.dtype is torch.bool:
                return pack_mask, "mask"
            largest = self._notes.largest_index(tensor)
            if largest is not None:
                return partial(narrow_indices, largest=largest), "indices"
            condition = self.activation.find_condition(tensor) if is_autograds else None
            if condition is not None and not self.signs.was_asked(tensor):
                is_worth_it = self.signs.is_worth_it(tensor) or is_lossy  # then nobody else keeps the values
                return (partial(pack_signs, condition=condition) if is_worth_it else None), "signs"
            if self._notes.may_be_two_valued(tensor) and tensor.device.type == "cpu":
                return pack_two_values, "two values"
        if is_lossy and self._lossy is not None and self.wholes.find(tensor, self._notes.watch(tensor)) is None:
            return partial(_encode_lossy, to=self._lossy, block_size=self._block_size), self._lossy
        return None, ""

    def end_run(self) -> None:
        """Forget this run, but for what was learned from it."""
        self.signs.end_run()
        self.wholes.clear()
        self.activation.clear()


def _encode_lossy(numbers: Tensor, to: LossyFormat, block_size: int) -> Encoding:
    dtype, size = numbers.dtype, numbers.numel()
    return Encoding(encode(numbers, to, block_size), lambda pieces: decode(pieces, to, dtype, size))
