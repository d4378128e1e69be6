"""Restore the module and the generators as they were before a training step."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from lightning_vram.core.random_state.sources import global_sources
from lightning_vram.core.rollback.attribute_state import AttributeState, iterate_members, take_states
from lightning_vram.core.rollback.buffer_copies import ALWAYS_COPIED_BYTES, BufferCopies
from lightning_vram.core.tensors.versions import num_bytes_of
from lightning_vram.private_names.torch.modules import own_buffers, own_parameters

__all__ = ["BufferCopies", "StepState", "iterate_members"]


class StepState:
    """The state of a module and of the global generators before a training step that may have to be run again.

    A step that ran out of memory has moved running statistics, drawn random numbers, counted in attributes: run again
    on top of that it would train another model. Restored are attributes of all modules (modes, hooks, flags, lists and
    dicts with their contents) but those in ``skip``, ``requires_grad``, generators, buffers, and plain tensor
    attributes of up to 1 MiB. It blocks on no device and copies small tensors only, except for its first two times.

    Not restored: parameters' values and gradients (a forward does not change the first; for the others see
    :class:`GradientState`), objects of other kinds that change inside, tensors in containers that are written in place,
    and parameters under FSDP1.

    ``copies`` are held by the caller over the run, so that constant buffers are copied once; the state is good until
    the next one is taken with the same copies. ``None``: everything is copied.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        copies: BufferCopies | None = None,
        *,
        skip: Callable[[nn.Module], bool] | None = None,
    ) -> None:
        members = list(iterate_members(module))
        copies = copies if copies is not None else BufferCopies()
        seen = members if skip is None else [member for member in members if not skip(member)]
        self._attributes = take_states(seen, copies.layouts)
        self._requires_grad = [
            (parameter, parameter.requires_grad)
            for member in members
            for parameter in own_parameters(member).values()
            if parameter is not None
        ]
        buffers = (buffer for member in members for buffer in own_buffers(member).values() if buffer is not None)
        self._buffers = copies.take([*buffers, *_iterate_plain_tensors(self._attributes)])
        self._generators = [(write, read()) for read, write in global_sources(device)]

    def restore(self) -> None:
        """Go back. May be called again, after each further try."""
        for attributes in self._attributes:
            attributes.restore()
        for buffer in self._buffers:
            buffer.restore()
        for parameter, requires_grad in self._requires_grad:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        for write, state in self._generators:
            write(state)


def _iterate_plain_tensors(states: list[AttributeState]) -> Iterator[Tensor]:
    for state in states:
        if state.layout.tensors:
            for tensor in state.tensors().values():
                # Results of the last step have a past: they are replaced, not written.
                if type(tensor) is Tensor and not tensor.requires_grad and num_bytes_of(tensor) <= ALWAYS_COPIED_BYTES:
                    yield tensor
