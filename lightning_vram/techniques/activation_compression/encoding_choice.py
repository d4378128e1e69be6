"""Choose an encoding for each saved tensor, and decide which may be stored with an error."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.core.hooks import is_exact_only
from lightning_vram.core.layers import LayerSelection, RunningLayers
from lightning_vram.core.tensors.codecs import LOSSY_FORMATS, LossyFormat, decode, encode, encoded_itemsize
from lightning_vram.core.tensors.properties import ByStorage, StorageMemo, version_of
from lightning_vram.private_names.dispatcher import without_dispatch
from lightning_vram.private_names.torch import base_of, has_own_result, innermost_hooks, is_view
from lightning_vram.techniques.activation_compression.encoded_storage import (
    Encode,
    Encoding,
    pack_mask,
    pack_signs,
    pack_two_values,
    shrink_indices,
)
from lightning_vram.techniques.activation_compression.value_notes import ValueNotes

_DTYPES = frozenset([torch.float64, torch.float32, torch.float16, torch.bfloat16])


def check_compression(lossy: object, layers: object, block_size: object, min_bytes: object) -> None:
    """Raise ``TypeError`` or ``ValueError`` if ``CompressionStage`` does not take these."""
    if lossy is not None and lossy not in LOSSY_FORMATS:
        raise ValueError(f"CompressionStage(lossy) must be 'bf16', 'fp8', 'int8' or None, got {lossy!r}.")
    if layers is not None and lossy is None:
        raise ValueError(
            "CompressionStage(layers) needs a lossy format, got lossy=None. "
            "Set lossy to 'bf16', 'fp8' or 'int8', or leave layers out."
        )
    if not isinstance(layers, LayerSelection | None):
        for layer in layers if isinstance(layers, Sequence) else [layers]:
            if not isinstance(layer, nn.Module):
                raise TypeError(
                    "CompressionStage(layers) must be modules, such as select_layers() finds them by name, "
                    f"got {layer!r} of type {type(layer).__name__}."
                )
    check_positive_int("CompressionStage(block_size)", block_size)
    if not isinstance(min_bytes, int) or isinstance(min_bytes, bool):
        raise TypeError(
            f"CompressionStage(min_bytes) must be an int, got {min_bytes!r} of type {type(min_bytes).__name__}."
        )
    if min_bytes < 0:
        raise ValueError(f"CompressionStage(min_bytes) must not be negative, got {min_bytes}.")


class LossyPermission:
    """Which tensors may be stored lossy, apart from their values: those saved in ``layers``; ``None``: everywhere."""

    def __init__(self, lossy: LossyFormat, layers: LayerSelection | Sequence[nn.Module] | None, min_bytes: int) -> None:
        self._itemsize = encoded_itemsize(lossy)
        self._layers = RunningLayers(_modules_of(layers)) if layers is not None else None
        self._min_bytes = min_bytes

    def watching(self) -> AbstractContextManager[None]:
        """Know which layers run inside the block."""
        return self._layers.watching() if self._layers is not None else nullcontext()

    @property
    def is_inside(self) -> bool:
        """Whether one of the layers is running in this thread."""
        return self._layers is None or self._layers.is_inside

    def allows(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, which is being saved, may get an error, unless its values forbid it."""
        if is_exact_only() or not self.is_inside or not tensor.requires_grad:
            return False
        base = base_of(tensor) if is_view(tensor) else None
        if (tensor if base is None else base).is_leaf:
            return False  # somebody else keeps its memory alive
        is_number = tensor.dtype in _DTYPES and tensor.dtype.itemsize > self._itemsize
        return is_number and tensor.nbytes >= self._min_bytes and tensor.shape[-1:] != (1,)


def is_checkpoint(frame: FrameType | None) -> bool:
    """Whether what ``frame`` saves is the input of a checkpoint of PyTorch, which runs its layer again on it."""
    if frame is not None and frame.f_globals.get("__name__") == "torch.autograd.function":
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "torch.utils.checkpoint"


def _modules_of(layers: LayerSelection | Sequence[nn.Module]) -> list[nn.Module]:
    if not isinstance(layers, LayerSelection):
        return list(layers)
    modules: list[nn.Module] = []
    for layer in layers.layers:
        modules += list(layer.module.children())[slice(*layer.span)] if layer.span is not None else [layer.module]
    return modules


# Of ReLU's own result its backward needs the signs only, but the convolution behind it saves the same tensor for its
# values. It is ReLU's own save if and only if the node of the graph that made the tensor has not got its saved result
# yet: that lasts from the moment the node is made to the end of this very save, and nobody else's code runs in between.
# What is computed without a graph, or in a ``torch.autograd.Function``, has no such node. A save that failed with an
# error that somebody caught leaves such a node behind for good: so the operator must have been the last activation to
# run, with the hooks of the stage that is asked set, and not have been asked about.
#
# Where what follows saves the values as well, the signs are kept in vain: that is learned from run to run. A wrong
# guess costs bytes, as many as plain autograd would have kept, and never a gradient.

# By type of the node: what its backward asks of the saved result, NaN included.
#   relu:         threshold_backward(grad, result, 0)         -> 0 where result <= 0
#   leaky_relu_:  leaky_relu_backward(grad, result, slope)    -> grad where result > 0
_Condition = Callable[[Tensor], Tensor]


@cache
def _find_nodes() -> dict[type, _Condition]:
    with torch.inference_mode(mode=False), torch.enable_grad(), without_dispatch():  # once per process, seen by nobody
        zero = torch.zeros(1, device="cpu", requires_grad=True)
        relu, leaky_relu = F.relu(zero).grad_fn, F.leaky_relu_(zero * 1).grad_fn
    assert relu is not None
    assert leaky_relu is not None
    return {type(relu): lambda result: (result <= 0).logical_not_(), type(leaky_relu): lambda result: result > 0}


class NewActivation:
    """Knows the result that an activation is about to save."""

    def __init__(self) -> None:
        _find_nodes()  # now: later a mode and hooks are set
        self._result: weakref.ref[torch.UntypedStorage] | None = None

    def note(self, result: Tensor, pack: Callable[[Tensor], Any]) -> None:
        """Note ``result``, just made, if autograd will call ``pack`` for it."""
        hooks = innermost_hooks()
        is_ours = hooks is not None and hooks[0] == pack
        self._result = weakref.ref(result.untyped_storage()) if is_ours else None

    def clear(self) -> None:
        """Forget it."""
        self._result = None

    def find_condition(self, tensor: Tensor) -> _Condition | None:
        """Return where the backward must find a positive number, if the noted activation now saves ``tensor`` first."""
        result = self._result() if self._result is not None else None
        if result is None or result is not tensor.untyped_storage():
            return None
        self._result = None
        if is_view(tensor):  # an activation that overwrites a view has another node in front of its own
            return None
        node = tensor.grad_fn
        condition = _find_nodes().get(type(node))
        return condition if condition is not None and not has_own_result(node) else None


_Place = tuple[int, torch.Size]  # number of the save of signs in a run, and its shape


class LearnedSigns:
    """Remembers, from run to run, the places where the signs were given up."""

    def __init__(self) -> None:
        self._in_vain: set[_Place] = set()
        self._now_in_vain: set[_Place] = set()
        self._asked: ByStorage[tuple[int, _Place]] = ByStorage()  # of this run: version and place
        self._num_saves = 0

    def was_asked(self, tensor: Tensor) -> bool:
        """Whether the signs of ``tensor``, as it is now, were wanted before: that save failed, and this is another."""
        return self._find(tensor) is not None

    def is_worth_it(self, tensor: Tensor) -> bool:
        """Whether to keep the signs of ``tensor``, which an activation is saving; to be asked once for each."""
        self._num_saves += 1
        place = self._num_saves, tensor.shape
        self._asked.note(tensor, (version_of(tensor), place))
        return place not in self._in_vain

    def note_values(self, tensor: Tensor) -> None:
        """Note that somebody saves ``tensor``, and wants its values."""
        place = self._find(tensor)
        if place is not None:
            self._now_in_vain.add(place)

    def end_run(self) -> None:
        """Use what was learned from now on."""
        self._in_vain, self._now_in_vain = self._now_in_vain, set()
        self._asked.clear()
        self._num_saves = 0

    def _find(self, tensor: Tensor) -> _Place | None:
        asked = self._asked.find(tensor)
        return asked[1] if asked is not None and asked[0] == version_of(tensor) else None


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
        """Return encoding and kind of ``tensor``; ``is_autograds``: not from a stage, which may read its values."""
        if self._lossless:
            if tensor.dtype is torch.bool:
                return pack_mask, "mask"
            largest = self._notes.largest_index(tensor)
            if largest is not None:
                return partial(shrink_indices, largest=largest), "indices"
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
