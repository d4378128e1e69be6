"""Optimizer states kept in bf16 between steps, and in fp32 during one.

They are rounded at random: an average with a decay of .999 moves by less than half a unit of bf16 in a step, and would
stand still if it were rounded to the nearest. Numbers that are not one per weight stay as they are.
"""

from collections.abc import Iterable

import torch

from lightning_vram.optimizers.lean.bit_patterns import round_randomly_
from lightning_vram.optimizers.lean.flat_tensors import widened
from lightning_vram.optimizers.stepping import State, full_sized
from lightning_vram.private_names.torch.operators import copy_each


class WideStates:
    """Replaces the bf16 tensors in states by fp32 ones, until :meth:`round`.

    Args:
        states: Of some parameters on one device, each with its shape. Changed in place.
    """

    def __init__(self, states: Iterable[tuple[torch.Size, State]]) -> None:
        slots = [(state, key) for shape, state in states for key in full_sized(shape, state)]
        self._narrow = [state[key] for state, key in slots]
        self._flat, self._wide = widened(self._narrow, self._narrow[0].device if slots else None)
        for (state, key), wide in zip(slots, self._wide, strict=True):
            state[key] = wide

    def round(self, states: Iterable[tuple[torch.Size, State]], generator: torch.Generator) -> None:
        """Put the bf16 tensors back, with the rounded values, and replace what is new by rounded values too.

        Args:
            states: As before, and those that were made since. Changed in place.
            generator: On the same device.
        """
        if self._wide:
            round_randomly_(self._flat, generator)
            copy_each(self._narrow, self._wide)
        lent = {id(wide): narrow for wide, narrow in zip(self._wide, self._narrow, strict=True)}
        for shape, state in states:
            for key in full_sized(shape, state):
                value = state[key]
                if id(value) not in lent:
                    round_randomly_(value, generator)
                state[key] = lent[id(value)] if id(value) in lent else value.bfloat16()
