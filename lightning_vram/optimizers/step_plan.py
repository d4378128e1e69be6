"""Steps of many parameters that are stepped as in the step before: only gradients, memory and settings are read anew.

To read the state of a small parameter takes ten times as long as to step it, and on a GPU each is a launch or more.
"""

from array import array
from collections.abc import Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_vram.core.tensors.native_codecs import COLUMNS, LANES, native_step
from lightning_vram.core.tensors.properties import is_dense, stored_like
from lightning_vram.optimizers.moment_forms import first_place, make_seeds
from lightning_vram.optimizers.row_steps import RowSteps, Stored, can_run, fits_rows, is_ruled, plan_rows, rule_of
from lightning_vram.optimizers.step_loop import ADAMW_STATE, bits_of, has_whole_blocks, memory_of, read_adamw
from lightning_vram.optimizers.step_round import Member, iterate_parameters
from lightning_vram.private_names.dispatcher import add_to_each
from lightning_vram.private_names.torch import num_writes


class _Alike(NamedTuple):  # parameters with the same settings and number of steps
    group: int
    num_steps: int  # before this plan
    rows: RowSteps | None  # on a GPU
    indices: list[int]


class StepPlan:
    """Steps the members of a step again, in a few calls: compiled code of AdamW on the host, compiled rows on a GPU.

    ``others`` are the parameters of the optimizer that are not planned. A plan does not keep moments alive.
    """

    def __init__(self, optimizer: Optimizer, members: Sequence[Member]) -> None:
        self._optimizer, self._order = optimizer, _order_of(optimizer)
        self._on_host = bool(members) and members[0].shard.is_cpu
        has_rows = bool(members) and not self._on_host and can_run(members[0].shard.device)
        self._rule = rule_of(optimizer) if has_rows else None
        moments = ADAMW_STATE[1:] if self._rule is None else self._rule.keys
        self._keys = ("step", *moments) if any("step" in one.state for one in members) else moments
        planned = [one for one in members if self._can_plan(one)]
        self._alike = self._plan_alike(planned)
        self._num_steps = 0  # of this plan
        planned = planned if self._alike else []
        self._parameters = [one.parameter for one in planned]
        self._strides = [one.shard.stride() for one in planned]
        self._bits = bits_of(planned[0].state[moments[0]]) if planned else 0
        self._num_counters = len(planned) if "step" in self._keys else 0
        values = [one.state[key] for key in self._keys for one in planned]
        self._known = [ref(value, partial(_forget, self._alike)) for value in values]
        self._versions = list(map(num_writes, values[: self._num_counters]))
        self._memory = self._measure(values)
        self._items = array("q", bytes(8 * COLUMNS * len(planned)))
        for place, alike in enumerate(self._alike):
            for index in alike.indices:
                one = planned[index]
                fixed = array("q", (one.shard.numel(), place, one.number, first_place(one.parameter)))
                self._items[COLUMNS * (index + 1) - len(fixed) : COLUMNS * (index + 1)] = fixed
        known = set(self._parameters)
        self.others = [parameter for parameter in iterate_parameters(optimizer) if parameter not in known]
        self._idle = [parameter for parameter in self.others if parameter.grad is None]  # would be planned with one

    def _can_plan(self, member: Member) -> bool:
        """Whether one of the backends steps a member as it is."""
        state, shard, group = member.state, member.shard, self._optimizer.param_groups[member.group]
        is_real = type(member.parameter) is nn.Parameter and type(member.own_gradient) is Tensor and is_dense(shard)
        if not is_real or shard.is_cpu != self._on_host or state.keys() != set(self._keys):
            return False
        if not all(isinstance(one, Tensor) and (key == "step" or has_whole_blocks(one)) for key, one in state.items()):
            return False
        if not self._on_host:
            return self._rule is not None and fits_rows(shard) and is_ruled(self._optimizer, group)
        is_known = tuple(self._keys) == ADAMW_STATE and state["step"].is_cpu and not shard.numel() % LANES
        return is_known and native_step(0) is not None and read_adamw(self._optimizer, group, 1) is not None

    def _plan_alike(self, planned: Sequence[Member]) -> list[_Alike]:
        """Return parameters with the same settings and count of steps; none if one cannot be stepped in rows."""
        indices: dict[tuple[int, int, torch.device], list[int]] = {}
        # SGD and Lion do not count: it is not their first step.
        seeds = make_seeds(planned, [{"step": 1} | one.state for one in planned])
        for index, (one, (count, _)) in enumerate(zip(planned, seeds, strict=True)):
            indices.setdefault((one.group, count, one.shard.device), []).append(index)
        alike: list[_Alike] = []
        for (group, count, _), some in indices.items():
            rows = None if self._rule is None else plan_rows(self._rule, [self._store(planned[one]) for one in some])
            if rows is None and not self._on_host:
                return []
            alike.append(_Alike(group, count, rows, some))
        return alike

    def _store(self, member: Member) -> Stored:
        assert self._rule is not None
        moments = [member.state[key] for key in self._rule.keys]
        return Stored(member.shard, moments, member.number, first_place(member.parameter))

    @torch.no_grad()
    def step(self) -> bool:
        """Step; ``False``, and nothing is changed, if one of them is not as it was."""
        values, gradients = self._values(), self._gradients()
        if not values or not gradients or self._measure(values) != self._memory:
            return False
        counters = values[: self._num_counters]
        if list(map(num_writes, counters)) != self._versions:
            return False
        if not (self._step_on_host(values, gradients) if self._on_host else self._step_rows(gradients)):
            return False
        add_to_each(counters, 1)
        self._versions = list(map(num_writes, counters))
        self._num_steps += 1
        return True

    def _step_on_host(self, values: Sequence[Any], gradients: Sequence[Tensor]) -> bool:
        native, groups, count = native_step(0), self._optimizer.param_groups, len(gradients)
        found = [read_adamw(self._optimizer, groups[a.group], a.num_steps + self._num_steps + 1) for a in self._alike]
        steps = [step for step in found if step is not None]
        if native is None or len(steps) < len(found):
            return False
        moments = list(map(memory_of, values[count:]))
        for place, column in enumerate((self._parameters, gradients, moments[:count], moments[count:])):
            self._items[place::COLUMNS] = array("q", [one.data_ptr() for one in column])
        native.step_adamw(steps, self._items, self._bits)
        return True

    def _step_rows(self, gradients: Sequence[Tensor]) -> bool:
        groups = [self._optimizer.param_groups[alike.group] for alike in self._alike]
        is_known = all(is_ruled(self._optimizer, group) for group in groups)
        if not is_known or not can_run(gradients[0].device):
            return False
        for group, alike in zip(groups, self._alike, strict=True):
            assert alike.rows is not None
            alike.rows.step([gradients[index] for index in alike.indices], group, alike.num_steps + self._num_steps + 1)
        return True

    def _values(self) -> list[Any]:
        """Return the values of states, those of one key together; none if a state or a group is not as it was."""
        states = [self._optimizer.state.get(parameter, {}) for parameter in self._parameters]
        values = [state.get(key) for key in self._keys for state in states]
        is_same = self._order == _order_of(self._optimizer) and set(map(len, states)) == {len(self._keys)}
        is_same = is_same and all(map(is_, values, (known() for known in self._known)))
        return values if is_same and self._alike else []

    def _gradients(self) -> list[Tensor]:
        """Return the gradients in the order of the parameters; none if they cannot be stepped so."""
        gradients: list[Tensor] = []
        for parameter, stride in zip(self._parameters, self._strides, strict=True):
            gradient = parameter.grad
            is_plain = type(gradient) is Tensor and gradient.dtype is torch.float32 and not gradient.is_sparse
            if not is_plain or gradient is None or parameter.stride() != stride:
                return []
            gradients.append(gradient if gradient.stride() == stride else stored_like(gradient, parameter))
        return gradients if all(parameter.grad is None for parameter in self._idle) else []

    def _measure(self, values: Sequence[Any]) -> list[tuple[int, ...]]:
        """Return size and kind of memory; and the place of it, if it is held."""
        memory = (*self._parameters, *map(memory_of, values[self._num_counters :]))
        if self._on_host:
            return [(one.nbytes, one.is_cpu) for one in memory]
        return [(one.nbytes, one.is_cpu, one.data_ptr()) for one in memory]


def _order_of(optimizer: Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _forget(alike: list[_Alike], _: object) -> None:
    """Free what a plan holds: a moment is gone."""
    alike.clear()
