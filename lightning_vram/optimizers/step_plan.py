"""Steps of many parameters that are stepped as in the step before: only gradients, memory and settings are read anew.

To read the state of a small parameter takes ten times as long as to step it, and on a GPU each is a launch or more.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_vram.core.tensors.codecs import LowBitTensor
from lightning_vram.core.tensors.native_codecs import COLUMNS, LANES, native_step
from lightning_vram.core.tensors.properties import flat_as_stored, is_dense
from lightning_vram.optimizers.moment_forms import first_place
from lightning_vram.optimizers.row_steps import RowSteps, can_run, rule_of
from lightning_vram.optimizers.step_loop import ADAMW_STATE, bits_of, has_whole_blocks, memory_of, read_adamw
from lightning_vram.optimizers.step_round import Member, State, iterate_parameters
from lightning_vram.private_names.dispatcher import add_to_each
from lightning_vram.private_names.torch import num_writes

_COUNT, _STEP, _NUMBER, _PLACE = range(4, COLUMNS)  # of an item


@dataclass(slots=True)
class _Planned:
    """A parameter, as it was in the step before."""

    parameter: nn.Parameter
    group: int  # index of its group
    number: int  # of the parameter
    state: State
    values: list[Any]  # of the state
    moments: list[Any]
    stride: tuple[int, ...]
    count: int  # of its steps so far


class StepPlan:
    """Steps the members of a step again, in a few calls: compiled code of AdamW on the host, compiled rows on a GPU.

    ``others`` are the parameters of the optimizer that are not planned, such as those on a second device.
    """

    def __init__(self, optimizer: Optimizer, members: Sequence[Member]) -> None:
        self._optimizer = optimizer
        planned = [_plan(one) for one in members if _can_plan(optimizer, one)]
        planned = [one for one in planned if one.parameter.device == planned[0].parameter.device]
        self._on_host = bool(planned) and planned[0].parameter.is_cpu
        self._rows = [] if self._on_host else self._plan_rows(planned)
        self._planned = planned if self._on_host or self._rows else []
        self._counters = [one.state["step"] for one in self._planned if "step" in one.state]
        self._versions = [num_writes(counter) for counter in self._counters]
        lists = zip(*([one.parameter, *map(memory_of, one.moments)] for one in self._planned), strict=True)
        self._memory = [tensor for tensors in lists for tensor in tensors]
        self._sizes, self._addresses = self._measure(), [one.data_ptr() for one in self._memory]
        self._items = array("q", bytes(8 * COLUMNS * len(self._planned)))
        for place, column in (
            (_COUNT, [one.parameter.numel() for one in self._planned]),
            (_NUMBER, [one.number for one in self._planned]),
            (_PLACE, [first_place(one.parameter) for one in self._planned]),
        ):
            self._items[place::COLUMNS] = array("q", column)
        self._order = [id(parameter) for parameter in iterate_parameters(optimizer)]
        known = {one.parameter for one in self._planned}
        self.others = [parameter for parameter in iterate_parameters(optimizer) if parameter not in known]
        self._idle = [parameter for parameter in self.others if parameter.grad is None]  # would be planned with one

    @torch.no_grad()
    def step(self) -> bool:
        """Step; ``False``, and nothing is changed, if one of them is not as it was."""
        gradients = self._gradients()
        if not gradients or not (self._step_on_host(gradients) if self._on_host else self._step_rows(gradients)):
            return False
        add_to_each(self._counters, 1)
        self._versions = [num_writes(counter) for counter in self._counters]
        for one in self._planned:
            one.count += 1
        return True

    def _step_on_host(self, gradients: Sequence[Tensor]) -> bool:
        native, groups = native_step(0), self._optimizer.param_groups
        keys = [(one.group, one.count) for one in self._planned]
        places = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        found = [read_adamw(self._optimizer, groups[group], count + 1) for group, count in places]
        steps = [step for step in found if step is not None]
        if native is None or len(steps) < len(found):
            return False
        addresses, count = [one.data_ptr() for one in self._memory], len(gradients)
        weights, averages, squares = (addresses[start : start + count] for start in range(0, 3 * count, count))
        columns = weights, [one.data_ptr() for one in gradients], averages, squares
        for place, column in (*enumerate(columns), (_STEP, [places[key] for key in keys])):
            self._items[place::COLUMNS] = array("q", column)
        native.step_adamw(steps, self._items, bits_of(self._planned[0].moments[0]))
        return True

    def _plan_rows(self, planned: Sequence[_Planned]) -> list[tuple[RowSteps, list[int]]]:
        """Return steps of parameters with the same settings and count, and their indices; none if one cannot be."""
        alike: dict[tuple[int, int], list[int]] = {}
        for index, one in enumerate(planned):
            alike.setdefault((one.group, one.count), []).append(index)
        rows = []
        for (group, _), indices in alike.items():
            rule, some = rule_of(self._optimizer, self._optimizer.param_groups[group]), [planned[i] for i in indices]
            made = (
                None
                if rule is None
                else RowSteps.make(
                    rule,
                    [flat_as_stored(one.parameter.detach()) for one in some],
                    [[_flat(moment) for moment in one.moments] for one in some],
                    [one.number for one in some],
                    [first_place(one.parameter) for one in some],
                )
            )
            if made is None:
                return []
            rows.append((made, indices))
        return rows

    def _step_rows(self, gradients: Sequence[Tensor]) -> bool:
        groups = [self._optimizer.param_groups[self._planned[indices[0]].group] for _, indices in self._rows]
        is_known = all(
            rule_of(self._optimizer, group) is rows.rule for group, (rows, _) in zip(groups, self._rows, strict=True)
        )
        is_same = [one.data_ptr() for one in self._memory] == self._addresses
        if not is_known or not is_same or not can_run(gradients[0].device):
            return False
        for group, (rows, indices) in zip(groups, self._rows, strict=True):
            count = self._planned[indices[0]].count + 1
            rows.step([flat_as_stored(gradients[index]) for index in indices], group, count)
        return True

    def _measure(self) -> list[tuple[int, bool]]:
        return [(memory.nbytes, memory.is_cpu) for memory in self._memory]

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
            and self._measure() == self._sizes
            and all(parameter.grad is None for parameter in self._idle)
        )
        return [one for one in gradients if one is not None] if is_same else []


def _plan(member: Member) -> _Planned:
    state = member.state
    moments = [value for key, value in state.items() if key != "step"]
    count = int(state.get("step", 1))  # SGD and Lion do not count: it is not their first step
    values, stride = list(state.values()), member.shard.stride()
    return _Planned(member.parameter, member.group, member.number, state, values, moments, stride, count)


def _can_plan(optimizer: Optimizer, member: Member) -> bool:
    """Whether one of the backends steps a member as it is."""
    state, shard, group = member.state, member.shard, optimizer.param_groups[member.group]
    gradient, moments = member.own_gradient, [value for key, value in state.items() if key != "step"]
    is_real = type(member.parameter) is nn.Parameter and type(gradient) is Tensor and is_dense(shard)
    if not is_real or gradient is None or gradient.stride() != shard.stride():
        return False
    if not all(isinstance(one, Tensor) and has_whole_blocks(one) for one in moments):
        return False
    if shard.is_cpu:
        is_known = tuple(state) == ADAMW_STATE and native_step(0) is not None and not shard.numel() % LANES
        return is_known and state["step"].is_cpu and read_adamw(optimizer, group, 1) is not None
    rule = rule_of(optimizer, group) if can_run(shard.device) else None
    return rule is not None and tuple(key for key in state if key != "step") == rule.keys


def _flat(moment: Tensor) -> Tensor:
    return moment if isinstance(moment, LowBitTensor) else flat_as_stored(moment)
