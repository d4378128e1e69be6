"""Steps of many parameters that are stepped as in the step before: only gradients, memory and settings are read anew.

To read the state of a small parameter takes ten times as long as to step it.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_vram.core.tensors.native_codecs import COLUMNS, LANES, native_step
from lightning_vram.core.tensors.properties import is_dense
from lightning_vram.optimizers.moment_forms import first_place
from lightning_vram.optimizers.step_loop import ADAMW_STATE, bits_of, has_whole_blocks, memory_of, read_adamw
from lightning_vram.optimizers.step_round import Member, State, iterate_parameters
from lightning_vram.private_names.dispatcher import add_to_each
from lightning_vram.private_names.torch import num_writes

_COUNT, _STEP, _NUMBER, _PLACE = range(4, COLUMNS)  # of an item


@dataclass(slots=True)
class _Planned:
    """A parameter, as it was in the step before."""

    parameter: nn.Parameter
    state: State
    values: list[Any]  # of the state
    stride: tuple[int, ...]
    group: int
    count: int  # of its steps so far


class StepPlan:
    """Steps the members of a step of fused AdamW on the host again, in one call of compiled code.

    ``others`` are the parameters of the optimizer that are not planned.
    """

    def __init__(self, optimizer: Optimizer, members: Sequence[Member]) -> None:
        self._optimizer = optimizer
        members = [member for member in members if _can_plan(optimizer, member)]
        self._planned = [
            _Planned(one.parameter, one.state, list(one.state.values()), one.shard.stride(), one.group, count)
            for one, count in ((member, int(member.state["step"])) for member in members)
        ]
        self._counters = [one.state["step"] for one in self._planned]
        self._versions = [num_writes(counter) for counter in self._counters]
        averages, squares = ([memory_of(one.state[key]) for one in self._planned] for key in ADAMW_STATE[1:])
        self._memory = [*(one.parameter for one in self._planned), *averages, *squares]
        self._sizes = [memory.nbytes for memory in self._memory]
        self._items = array("q", bytes(8 * COLUMNS * len(members)))
        for place, column in (
            (_COUNT, [one.shard.numel() for one in members]),
            (_NUMBER, [one.number for one in members]),
            (_PLACE, [first_place(one.parameter) for one in members]),
        ):
            self._items[place::COLUMNS] = array("q", column)
        self._order = [id(parameter) for parameter in iterate_parameters(optimizer)]
        planned = {one.parameter for one in self._planned}
        self.others = [parameter for parameter in iterate_parameters(optimizer) if parameter not in planned]

    @torch.no_grad()
    def step(self) -> bool:
        """Step; ``False``, and nothing is changed, if one of them is not as it was."""
        native, gradients = native_step(0), self._gradients()
        keys = [(one.group, one.count) for one in self._planned]
        places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        groups = self._optimizer.param_groups
        found = [read_adamw(self._optimizer, groups[group], count + 1) for group, count in places]
        steps = [step for step in found if step is not None]
        if native is None or not gradients or len(steps) < len(found):
            return False
        addresses, count = [one.data_ptr() for one in self._memory], len(gradients)
        weights, averages, squares = (addresses[start : start + count] for start in range(0, 3 * count, count))
        columns = weights, [one.data_ptr() for one in gradients], averages, squares
        for place, column in (*enumerate(columns), (_STEP, [places[key] for key in keys])):
            self._items[place::COLUMNS] = array("q", column)
        native.step_adamw(steps, self._items, bits_of(self._planned[0].state["exp_avg"]))
        add_to_each(self._counters, 1)
        self._versions = [num_writes(counter) for counter in self._counters]
        for one in self._planned:
            one.count += 1
        return True

    def _gradients(self) -> list[Tensor]:
        """Return the gradients; none if a parameter is not as it was."""
        states = self._optimizer.state
        gradients = [one.parameter.grad for one in self._planned]
        is_same = (
            [id(parameter) for parameter in iterate_parameters(self._optimizer)] == self._order
            and all(
                states.get(one.parameter) is one.state
                and len(one.state) == len(one.values)
                and all(map(is_, one.state.values(), one.values))
                and type(gradient) is Tensor
                and gradient.dtype is torch.float32
                and gradient.stride() == one.stride == one.parameter.stride()
                for one, gradient in zip(self._planned, gradients, strict=True)
            )
            and [num_writes(counter) for counter in self._counters] == self._versions
            and [memory.nbytes if memory.is_cpu else 0 for memory in self._memory] == self._sizes
        )
        return [one for one in gradients if one is not None] if is_same else []


def _can_plan(optimizer: Optimizer, member: Member) -> bool:
    """Whether compiled code steps a member as one part."""
    state, shard = member.state, member.shard
    if native_step(0) is None or set(state) != set(ADAMW_STATE) or not is_dense(shard) or shard.numel() % LANES:
        return False
    moments, gradient = [state[key] for key in ADAMW_STATE[1:]], member.own_gradient
    tensors = (gradient, state["step"], *map(memory_of, moments))
    is_real = type(member.parameter) is nn.Parameter and all(type(one) is Tensor and one.is_cpu for one in tensors)
    is_known = is_real and shard.is_cpu and all(map(has_whole_blocks, moments))
    if not is_known or gradient is None or gradient.stride() != shard.stride():
        return False
    return read_adamw(optimizer, optimizer.param_groups[member.group], 1) is not None
