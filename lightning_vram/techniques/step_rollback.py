"""Take a training step back: the module and the generators as they were before, in the objects that were there.

A step that ran out of memory has moved running statistics, drawn random numbers, counted in attributes. Run again on
top of that it would train another model. Taken back are attributes of all modules (modes, hooks, flags, lists and dicts
with what they hold), ``requires_grad``, generators, buffers, and plain tensor attributes of up to 1 MiB. Taking the
state waits for no device and copies small tensors only, but for its first two times.

Not taken back: parameters' values and gradients (a forward does not change the first; for the others see
:mod:`~lightning_vram.techniques.gradient_rollback`), objects of other kinds that change inside, tensors in containers
that are written in place, and parameters under FSDP1.
"""

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.techniques.attribute_state import AttributeState
from lightning_vram.techniques.buffer_copies import ALWAYS_COPIED_BYTES, BufferCopies

__all__ = ["BufferCopies", "StepState"]


class StepState:
    """The state of a module and of the global generators, to go back to.

    Args:
        module: With all modules in it.
        device: The step runs here; its generator counts, beside those of the host.
        copies: Kept by the caller over the run, so that constant buffers are copied once. The state is good until the
            next one is taken with the same copies. ``None``: everything is copied.
        skip: Modules whose attributes somebody else looks after. Their children and buffers are looked after here.
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
        kept = members if skip is None else [member for member in members if not skip(member)]
        self._attributes = [AttributeState(member) for member in kept]
        self._requires_grad = [
            (parameter, parameter.requires_grad)
            for member in members
            for parameter in member._parameters.values()
            if parameter is not None
        ]
        copies = copies if copies is not None else BufferCopies()
        self._buffers = copies.take([*_iterate_buffers(members), *_iterate_plain_tensors(kept)])
        self._restores = list(_read_generators(device))

    def restore(self) -> None:
        """Go back. May be called again, after each further try."""
        for attributes in self._attributes:
            attributes.restore()
        for buffer in self._buffers:
            buffer.restore()
        for parameter, requires_grad in self._requires_grad:
            if parameter.requires_grad != requires_grad:
                parameter.requires_grad_(requires_grad)
        for restore, state in self._restores:
            restore(state)


def iterate_members(module: nn.Module) -> Iterator[nn.Module]:
    """Yield ``module`` and all modules in it, each once; quicker than ``modules()``, which hashes metrics by state."""
    waiting, seen = [module], {id(module)}
    while waiting:
        member = waiting.pop()
        yield member
        for child in member._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def _iterate_buffers(members: list[nn.Module]) -> Iterator[Tensor]:
    return (buffer for member in members for buffer in member._buffers.values() if buffer is not None)


def _iterate_plain_tensors(members: list[nn.Module]) -> Iterator[Tensor]:
    for member in members:
        for value in vars(member).values():
            # Results of the last step have a past: they are replaced, not written.
            if type(value) is Tensor and not value.requires_grad and value.nbytes <= ALWAYS_COPIED_BYTES:
                yield value


def _read_generators(device: torch.device) -> Iterator[tuple[Callable[[Any], object], Any]]:
    yield random.setstate, random.getstate()
    yield torch.set_rng_state, torch.get_rng_state()
    numpy = sys.modules.get("numpy")  # torch works without it
    if numpy is not None:
        yield numpy.random.set_state, numpy.random.get_state()
    if device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        if getattr(module, "is_initialized", lambda: True)():
            arguments = () if device.type == "mps" else (device,)  # has one device and takes no name for it
            yield lambda state: module.set_rng_state(state, *arguments), module.get_rng_state(*arguments)
