"""What autograd saves in a call that is recomputed in the backward: placeholders, which the recomputation fills.

This is the inside of a checkpoint, by the rules of PyTorch's own (``torch.utils.checkpoint``, not reentrant). The two
nest in any order:

* The first tensor that a backward asks for starts the recomputation, once for each backward. Each tensor is returned
  once and dropped then, whether the graph is retained or not.
* A placeholder that autograd no longer holds stays empty.
* The recomputation ends with the operator that saves the last tensor, unless it is compared with the forward.
* A backward inside of the call finds what was saved so far. One on the graph of the recomputation finds its tensors.

PyTorch's hooks take some 25 calls of Python functions for each saved tensor, and it enters autocast, a fork of the
generators and Dynamo around each recomputation. These hooks take three; the ambient state is left to the caller.

PyTorch compares shapes and dtypes of saved tensors, so a layer that draws from an untracked generator, or reads a
changed global, passes, with gradients of a network that never ran. Outputs show no more if a branch starts at zero
(LoRA's B, adaLN-zero, LayerScale), while the tensors inside of the branch are saved all the same. Here some elements of
each saved tensor are compared, up to rounding: kernels with atomic additions are not bit-exact twice.
"""

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError
from typing_extensions import override

from lightning_vram.core.hooks.hidden_from_dynamo import hide_from_dynamo
from lightning_vram.core.hooks.saved_samples import SavedSamples
from lightning_vram.core.hooks.stepping_aside import OwnHooks
from lightning_vram.core.tensors.parameter_classes import PARAMETER_CLASSES
from lightning_vram.private_names.torch.autograd import (
    StopRecomputation,
    current_graph_group,
    current_graph_task_id,
    hide_warning_of_hooks,
    num_nodes,
)
from lightning_vram.private_names.torch.tensors import base_of, is_view, num_writes

_NOBODY = -1  # runs a backward
_NOT_COUNTED = -1

_Kind = tuple[torch.Size, torch.dtype, torch.device, int]
"""Of a saved tensor: what it is, and how often it was written if it is a parameter, or a view of one."""


class Place(dict[Any, Tensor]):
    """Placeholder of a saved tensor: the recomputed tensor, by the backward that it is for."""

    __slots__ = ("__weakref__",)


class RecomputedSaves(OwnHooks):
    """What autograd saves in one call; as a context manager, its forward.

    ``run_again`` repeats the call with the hooks that it gets set around the forward. ``places`` gets a reference for
    each saved tensor, in order; autograd holds the placeholders. ``difference`` makes an error of a sentence.
    ``compares_kinds``: shapes, dtypes and devices must be equal. ``stops_early``: end with the last tensor that the
    forward saved. ``samples``: of the forward, if values are compared.
    """

    def __init__(
        self,
        run_again: Callable[["SecondRun"], None],
        places: list[ref[Place]],
        difference: Callable[[str], Exception],
        *,
        compares_kinds: bool,
        stops_early: bool,
        samples: SavedSamples | None = None,
    ) -> None:
        hide_warning_of_hooks()
        self.places = places
        self.kinds: list[_Kind] = []
        self.is_complete = False
        """Whether the first run is over: to be set."""
        self.compares_kinds = compares_kinds
        self.stops_early = stops_early
        self.samples = samples
        self._run_again = run_again
        self._difference = difference
        self._filled: set[Any] = set()

    @override
    @hide_from_dynamo
    def pack_hook(self, tensor: Tensor) -> Place:
        place = Place()
        self.places.append(ref(place))
        is_parameter = type(tensor) in PARAMETER_CLASSES or type(base_of(tensor)) in PARAMETER_CLASSES
        num_written = num_writes(tensor) if is_parameter else _NOT_COUNTED
        self.kinds.append((tensor.shape, tensor.dtype, tensor.device, num_written))
        if self.samples is not None:
            self.samples.take(tensor)
        return place

    @override
    @hide_from_dynamo
    def unpack_hook(self, packed: Place) -> Tensor:
        backward: Any = current_graph_group()  # several backwards that count as one
        if backward is None:
            backward = current_graph_task_id()
            if backward == _NOBODY:
                backward = object()  # who asks is told, and nothing is kept for others
        if backward not in self._filled:
            self._fill(backward)
        if backward not in packed:
            raise CheckpointError("a recomputed tensor was read twice in the backward. Read ctx.saved_tensors once.")
        return packed.pop(backward)

    def _fill(self, backward: Any) -> None:
        second = SecondRun(self, backward)
        try:
            with torch.enable_grad():
                self._run_again(second)
        except StopRecomputation:
            pass
        self._filled.add(backward)
        difference = second.difference()
        if difference is not None:
            raise self._difference(difference)


class SecondRun(OwnHooks):
    """The hooks of one recomputation, for one backward.

    ``rrelu`` saves noise that its kernel is going to draw (:func:`may_be_unfinished`): a run that ends with the last
    save ends when the operator that made it has finished, which is when the next one saves something.
    """

    def __init__(self, saves: RecomputedSaves, backward: Any) -> None:
        self._saves = saves
        self._backward = backward
        self._number = 0  # of saved tensors
        # Operators: one that saves such noise, and the one that has to come to its end.
        self._unfinished = self._last = -1
        self._difference: str | None = None
        self._ignores_number = False
        self._samples = SavedSamples(first=saves.samples) if saves.samples is not None else None

    @override
    @hide_from_dynamo
    def pack_hook(self, tensor: Tensor) -> Tensor:  # noqa: C901 - once for each saved tensor, without a further call
        saves, number = self._saves, self._number
        if self._last != -1 and num_nodes() == self._last:
            return tensor.detach()  # else a result would hold its own node
        if number >= len(saves.places):
            return self._pack_more(tensor)
        self._number = number + 1
        if self._samples is not None:
            self._samples.take(tensor)
        if tensor.requires_grad:
            tensor = tensor.detach()
        elif type(tensor) not in PARAMETER_CLASSES and not is_view(tensor):
            self._unfinished = num_nodes()
        place = saves.places[number]()
        if place is not None:  # else autograd has let go of it, after a backward inside of the call
            place[self._backward] = tensor
            was = saves.kinds[number]
            num_written = num_writes(tensor) if was[-1] != _NOT_COUNTED else _NOT_COUNTED
            now = (tensor.shape, tensor.dtype, tensor.device, num_written)
            if saves.compares_kinds and was != now:
                self._note_difference(was, now, number)
        if saves.stops_early and number + 1 == len(saves.places):
            self._last = num_nodes()
            if self._last != self._unfinished:
                raise StopRecomputation
        return tensor

    @override
    @hide_from_dynamo
    def unpack_hook(self, packed: Tensor) -> Tensor:
        return packed

    def difference(self) -> str | None:
        """Return what differs from the forward, as far as it can be seen here."""
        expected = len(self._saves.places)
        if self._number == expected or self._ignores_number:
            is_sampled = self._difference is None and self._samples is not None
            return self._samples.difference() if is_sampled else self._difference  # type: ignore[union-attr]
        return (
            f"A different number of tensors was saved: {expected} in the forward, "
            f"{'more' if self._number > expected else self._number} in the recomputation."
        )

    def _pack_more(self, tensor: Tensor) -> Tensor:
        saves = self._saves
        if not (saves.stops_early or saves.is_complete):  # of a backward inside of the call: the rest of it comes now
            self._ignores_number = True
            return tensor.detach()
        if not saves.stops_early:
            self._number += 1
        raise StopRecomputation

    def _note_difference(self, was: _Kind, now: _Kind, number: int) -> None:
        text = f"was {_describe(*was)} and is {_describe(*now)}"
        if was[:-1] == now[:-1]:
            text = "is a parameter that was modified by an inplace operation: write it after the backward"
        self._difference = self._difference or f"Saved tensor {number + 1} {text}."


def _describe(shape: torch.Size, dtype: torch.dtype, device: torch.device, num_written: int) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"
