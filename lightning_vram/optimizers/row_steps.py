"""Compiled steps of many parameters with low-precision moments: the number of calls does not depend on the parameters.

A step sees rows of 128 numbers, one block of quantized moments each. Large parameters are stepped in place; small ones
are copied to scratch memory by one call, stepped by one call, and copied back by one call. A plan repeats a step.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_vram.core.tensors.codecs import BLOCK_SIZE as ROW
from lightning_vram.core.tensors.codecs import decode_rows, draw_of, encode_rows
from lightning_vram.core.tensors.properties import flat_as_stored, is_dense, stored_like
from lightning_vram.optimizers.moment_forms import DIVISORS, Seed, StateForm, first_place, make_seeds, seed_of_moment
from lightning_vram.optimizers.step_loop import bits_of, has_whole_blocks, memory_of
from lightning_vram.optimizers.step_round import Member, is_lion, is_ruled, iterate_parameters, steps_like
from lightning_vram.private_names.dispatcher import (
    EXACT_DIVISION,
    FakeTensor,
    add_to_each,
    copy_each,
    current_dispatch_mode,
)
from lightning_vram.private_names.torch import num_writes

DEVICES = {"cuda", "xpu"}  # types of devices with compiled steps: on the host our C is faster
IN_PLACE = 2**16  # numbers of a parameter from which on it is stepped in place
SLICE = 2**24  # numbers that one call steps in place
GATHERED = 2**22  # numbers that one call steps in scratch memory, of at most 12 bytes each
_STRIDE = draw_of(1, 0)  # from the draw of a place to that of the next one
_EXAMPLE_ROWS = 1031  # unlike any other size, or torch.compile would take the two for the same
_failures: list[str] = []  # of torch.compile, in this process
_log = logging.getLogger(__name__)

Moments = Sequence[Tensor]
Numbers = Sequence[Tensor]  # scalars on the host; kernels get them as arguments, if each is used with a device's tensor


class Rule(NamedTuple):
    """How an optimizer steps float32 weights."""

    keys: tuple[str, ...]  # of the moments
    size: int  # how many numbers a step needs
    numbers: Callable[[Mapping[str, Any], int], list[float]]  # from settings of a group, and number of the step
    step: Callable[[Tensor, Tensor, Moments, Numbers], tuple[Tensor, Moments]]  # of weight, gradient, moments, numbers


def _number_adam(settings: Mapping[str, Any], count: int) -> list[float]:
    (first, second), lr, decay = map(float, settings["betas"]), float(settings["lr"]), float(settings["weight_decay"])
    decays = (0.0, 1 - lr * decay) if settings.get("decoupled_weight_decay") else (decay, 1.0)
    root, rate = math.sqrt(1 - second**count), -lr / (1 - first**count)
    return [_sign(settings), *decays, 1 - first, second, 1 - second, root, float(settings["eps"]), rate]


def _step_adam(weight: Tensor, gradient: Tensor, moments: Moments, numbers: Numbers) -> tuple[Tensor, Moments]:
    (average, square), (sign, coupled, decay, share, beta2, square_share, root, eps, rate) = moments, numbers
    gradient = gradient * sign + weight * coupled
    average = average + (gradient - average) * share
    square = square * beta2 + gradient * square_share * gradient
    return weight * decay + average * rate / (square.sqrt() / root + eps), (average, square)


def _number_sgd(settings: Mapping[str, Any], count: int) -> list[float]:
    momentum = float(settings["momentum"])
    shares = (0.0, 1.0) if count == 1 else (momentum, 1 - float(settings["dampening"]))
    ahead = (1.0, momentum) if settings["nesterov"] else (0.0, 1.0)
    return [_sign(settings), float(settings["weight_decay"]), *shares, *ahead, -float(settings["lr"])]


def _step_sgd(weight: Tensor, gradient: Tensor, moments: Moments, numbers: Numbers) -> tuple[Tensor, Moments]:
    (buffer,), (sign, coupled, momentum, share, own, ahead, rate) = moments, numbers
    gradient = gradient * sign + weight * coupled
    buffer = buffer * momentum + gradient * share
    return weight + (gradient * own + buffer * ahead) * rate, (buffer,)


def _number_lion(settings: Mapping[str, Any], count: int) -> list[float]:
    (first, second), lr = map(float, settings["betas"]), float(settings["lr"])
    return [1 - lr * float(settings.get("weight_decay", 0.0)), 1 - first, 1 - second, -lr]


def _step_lion(weight: Tensor, gradient: Tensor, moments: Moments, numbers: Numbers) -> tuple[Tensor, Moments]:
    (average,), (decay, share, second_share, rate) = moments, numbers
    towards = gradient - average
    return weight * decay + (average + towards * share).sign() * rate, (average + towards * second_share,)


def _sign(settings: Mapping[str, Any]) -> float:
    return -1.0 if settings.get("maximize") else 1.0


_ADAM = Rule(("exp_avg", "exp_avg_sq"), 9, _number_adam, _step_adam)
_SGD = Rule(("momentum_buffer",), 7, _number_sgd, _step_sgd)
_LION = Rule(("exp_avg",), 4, _number_lion, _step_lion)


def rule_of(optimizer: Optimizer) -> Rule | None:
    """Return how a class of optimizers steps; ``None``: not as a known one."""
    if steps_like(type(optimizer), [Adam, AdamW]):
        return _ADAM
    if steps_like(type(optimizer), [SGD]):
        return _SGD
    return _LION if is_lion(optimizer) else None


class _Codec(NamedTuple):
    """How moments are stored: bf16 as int16, or uint8 records of a block of codes and the 4 bytes of its scale."""

    bits: int
    is_positive: bool = False

    @property
    def shorts(self) -> int:
        """Units of 2 bytes in a row."""
        return ROW if self.bits == 16 else (ROW * self.bits // 8 + 4) // 2

    def rows(self, stored: Tensor) -> Tensor:
        """Return int16 numbers as rows that can be decoded."""
        return stored.view(-1, self.shorts).view(torch.int16 if self.bits == 16 else torch.uint8)

    def decode(self, stored: Tensor) -> Tensor:
        """Return float32 rows, as ``LowBitTensor.decode``."""
        if self.bits == 16:
            return (stored.int() << 16).view(torch.float32)
        return decode_rows(stored, self.bits, is_positive=self.is_positive)


def _round(numbers: Tensor, draws: Tensor) -> Tensor:
    """Return the bits of bf16 numbers, as ``rounded_by_place``."""
    bits = torch.where(numbers.isnan(), 0x7FC00000, numbers.view(torch.int32))
    return ((bits + (draws & 0xFFFF).int()) >> 16).short()


def _make_function(rule: Rule, codecs: Sequence[_Codec], *, is_gathered: bool) -> Callable[..., None]:
    """Return a step of rows: of weights [rows, 128], a gradient and stored moments, with the numbers of the rule.

    ``places``: of rows in place, the draw of the first number for each moment; of gathered ones, marks [rows, 3]
    (numbers up to the end of the parameter, its number, place of the first number), and the number of the last step.
    """

    def step(weights: Tensor, gradient: Tensor, stored: Moments, numbers: Numbers, *places: Any) -> None:
        assert weights.shape[1] == ROW  # a constant for the compiler
        moments = [codec.decode(one) for codec, one in zip(codecs, stored, strict=True)]
        stepped, moments[:] = rule.step(weights, gradient, moments, numbers)
        columns = torch.arange(ROW, device=weights.device)
        if is_gathered:
            used, parameter, firsts = (places[0][:, place, None].long() for place in range(3))
            count = torch.zeros_like(parameter) + places[1]
        else:
            firsts = torch.arange(weights.shape[0], device=weights.device).unsqueeze(1) * ROW
        for index, (codec, moment) in enumerate(zip(codecs, moments, strict=True)):
            if codec.bits == 16:
                key = rule.keys[index]
                seed = seed_of_moment(cast(Seed, (count, parameter)), key) if is_gathered else places[index]
                stored[index].copy_(_round(moment, (firsts + columns) * _STRIDE + seed))
            else:
                # What follows the end of a parameter must not change the scale.
                moment = torch.where(columns < used, moment, 0.0) if is_gathered else moment
                encode_rows(moment, stored[index], codec.bits, is_positive=codec.is_positive)
        weights.copy_(stepped)

    # torch.compile limits how often one code is compiled: each function gets a copy.
    return FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)


def compile_function(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a step of rows, for any number of them."""
    return torch.compile(function, dynamic=True, options=EXACT_DIVISION)


@cache
def _function(
    rule: Rule, codecs: tuple[_Codec, ...], device: torch.device, *, is_gathered: bool
) -> Callable[..., None]:
    """Return the compiled step of rows on a device; not compiled if that fails."""
    rows, scalar = _EXAMPLE_ROWS, torch.zeros((), dtype=torch.int64, device="cpu")
    plain = _make_function(rule, codecs, is_gathered=is_gathered)
    example = (
        *(torch.zeros(rows, ROW, dtype=torch.float32, device=device) for _ in range(2)),
        [codec.rows(torch.zeros(rows * codec.shorts, dtype=torch.int16, device=device)) for codec in codecs],
        _scalars([0.0] * rule.size, torch.float32),
        *((torch.zeros(rows, 3, dtype=torch.int32, device=device), scalar) if is_gathered else [scalar] * len(codecs)),
    )
    try:
        compiled = compile_function(plain)
        with torch.no_grad():
            compiled(*example)
    except Exception as error:  # compilers fail in many ways
        reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        if not _failures:
            _log.warning(f"Optimizer steps launch more kernels than needed: torch.compile failed ({reason}).")
        _failures.append(reason)
        return plain
    return compiled


def _scalars(values: Sequence[float], dtype: torch.dtype) -> Numbers:
    return torch.tensor(values, dtype=dtype, device="cpu").unbind()


def can_run(device: torch.device) -> bool:
    """Whether compiled steps can run on a device now: ask before each step, as dispatch modes come and go."""
    return device.type in DEVICES and not _failures and current_dispatch_mode() is None


def compile_ahead(device: torch.device, rule: Rule | None, form: StateForm) -> None:
    """Compile the steps of a rule for moments in a form, so that the first step need not; log a warning if it fails."""
    if rule is not None and can_run(device):
        codecs = tuple(_Codec(form.bits, form.bits < 16 and key in DIVISORS) for key in rule.keys)
        for is_gathered in (False, True):
            _function(rule, codecs, device, is_gathered=is_gathered)


class Stored(NamedTuple):
    """A dense parameter and its moments, in the order of ``Rule.keys``: bf16 with its strides, or ``LowBitTensor``."""

    weights: Tensor
    moments: Moments  # all zeros if it was never stepped
    number: int  # of the parameter in the optimizer
    place: int  # of its first weight in the unsharded parameter


def fits_rows(weights: Tensor) -> bool:
    """Whether rows can step weights: in place if these are many, and then without a shorter last row."""
    return weights.dtype == torch.float32 and (weights.numel() < IN_PLACE or not weights.numel() % ROW)


def plan_rows(rule: Rule, stored: Sequence[Stored]) -> "RowSteps | None":
    """Plan steps, and compile what they need; ``None`` if these parameters cannot be stepped so."""
    found = {tuple(map(_codec_of, one.moments)) for one in stored}
    is_real = all(fits_rows(one.weights) and not isinstance(one.weights, FakeTensor) for one in stored)
    if len(found) != 1 or None in next(iter(found)) or not is_real or not can_run(stored[0].weights.device):
        return None
    rows = RowSteps(rule, cast(tuple[_Codec, ...], found.pop()), stored)
    return None if _failures else rows


class RowSteps:
    """Steps of parameters of one device and one group, with moments stored alike, all in the same step.

    It holds their memory, but not the tensors.
    """

    def __init__(self, rule: Rule, codecs: tuple[_Codec, ...], stored: Sequence[Stored]) -> None:
        self._rule, self._codecs, self._numbers = rule, codecs, [one.number for one in stored]
        device = stored[0].weights.device
        self._step_in_place, self._step_gathered = (
            _function(rule, codecs, device, is_gathered=is_gathered) for is_gathered in (False, True)
        )
        self._units = 2 * ROW, *(codec.shorts for codec in codecs)
        views = [[_shorts_of(tensor) for tensor in (one.weights, *one.moments)] for one in stored]
        self._slices = [  # index, start, place, and what is stored
            (index, start, one.place + start, pieces)
            for index, one in enumerate(stored)
            if one.weights.numel() >= IN_PLACE
            for start, *pieces in zip(range(0, one.weights.numel(), SLICE), *self._split(views[index]), strict=True)
        ]
        self._parts = []  # indices, rows, what is stored, and marks
        for batch in _batches(stored):
            rows = [_num_rows(stored[index]) for index in batch]
            rows[-1] = max(rows[-1], 2 - sum(rows[:-1]))  # a single row would be compiled by itself
            marks = torch.cat([_mark(stored[index], count) for index, count in zip(batch, rows, strict=True)])
            own = list(zip(*(views[index] for index in batch), strict=True))
            self._parts.append((batch, rows, own, marks.to(device)))

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], settings: Mapping[str, Any], count: int) -> None:
        """Step all parameters.

        Args:
            gradients: In float32, with the strides of the parameters.
            settings: Of the group, in this step.
            count: Number of the step, from 1 on. SGD begins its buffer in step 1.
        """
        values, flat = _scalars(self._rule.numbers(settings, count), torch.float32), list(map(_shorts_of, gradients))
        for index, start, place, stored in self._slices:
            seeds = [seed_of_moment((count - 1, self._numbers[index]), key) for key in self._rule.keys]
            draws = _scalars([draw_of(place, seed) for seed in seeds], torch.int64)
            gradient = flat[index][2 * start : 2 * (start + SLICE)]
            self._step_in_place(*self._typed([gradient, *stored]), values, *draws)
        for batch, rows, stored, marks in self._parts:
            sources = [[flat[index] for index in batch], *stored]
            scratch = [_gather(*some, rows) for some in zip(sources, (2 * ROW, *self._units), strict=True)]
            memories, targets = zip(*scratch, strict=True)
            # All in units of 2 bytes: PyTorch copies a list at once if it has one dtype.
            copy_each([*chain(*targets)], [*chain(*sources)])
            self._step_gathered(*self._typed(memories), values, marks, *_scalars([count - 1], torch.int64))
            copy_each([*chain(*stored)], [*chain(*targets[1:])])

    def _split(self, views: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
        return (torch.split(view, SLICE // ROW * unit) for view, unit in zip(views, self._units, strict=True))

    def _typed(self, memories: Sequence[Tensor]) -> tuple[Tensor, Tensor, Moments]:
        """Return rows of weights, gradient and moments, from memory that begins with the gradient."""
        gradient, weights = (one.view(torch.float32).view(-1, ROW) for one in memories[:2])
        return weights, gradient, [codec.rows(one) for codec, one in zip(self._codecs, memories[2:], strict=True)]


def _shorts_of(tensor: Tensor) -> Tensor:
    """Return flat memory in units of 2 bytes, without a reference to the tensor."""
    return flat_as_stored(memory_of(tensor).detach()).view(torch.int16)


def _num_rows(one: Stored) -> int:
    return -(-one.weights.numel() // ROW)


def _batches(stored: Sequence[Stored]) -> list[list[int]]:
    """Return indices of small parameters, those together that one call steps."""
    batches: list[list[int]] = []
    left = 0
    for index, one in enumerate(stored):
        if one.weights.numel() < IN_PLACE:
            left -= _num_rows(one) * ROW
            if left < 0:
                batches.append([])
                left = GATHERED - _num_rows(one) * ROW
            batches[-1].append(index)
    return batches


def _mark(one: Stored, rows: int) -> Tensor:
    """Return what :func:`_make_function` reads of gathered rows."""
    starts = torch.arange(0, rows * ROW, ROW, device="cpu")
    marks = one.weights.numel() - starts, torch.full_like(starts, one.number), (starts + one.place) % 2**16
    return torch.stack(marks, 1).int()


def _gather(views: Sequence[Tensor], unit: int, rows: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
    """Return memory of rows, in which each of some flat tensors begins with one, and views of it with their sizes."""
    memory, sizes = views[0].new_empty(sum(rows) * unit), [view.numel() for view in views]
    gaps = [count * unit - size for count, size in zip(rows, sizes, strict=True)]
    return memory, list(memory.split_with_sizes([*chain(*zip(sizes, gaps, strict=True))])[::2])


def _codec_of(moment: Tensor) -> _Codec | None:
    return _Codec(bits_of(moment), getattr(moment, "is_positive", False)) if has_whole_blocks(moment) else None


class _Alike(NamedTuple):  # parameters with the same settings and number of steps
    group: int
    num_steps: int  # before this plan
    rows: RowSteps
    indices: list[int]


class StepPlan:
    """Steps the members of a step again, in a few calls: only gradients, settings and places of memory are read anew.

    To read the state of a small parameter takes ten times as long as to step it, and on a GPU each is a launch or more.
    ``others`` are the parameters of the optimizer that are not planned. A plan does not keep moments alive.
    """

    def __init__(self, optimizer: Optimizer, members: Sequence[Member]) -> None:
        self._optimizer, self._order = optimizer, _order_of(optimizer)
        self._device = next((one.shard.device.type for one in members if can_run(one.shard.device)), None)
        self._rule = None if self._device is None else rule_of(optimizer)
        moments = () if self._rule is None else self._rule.keys
        self._keys = ("step", *moments) if any("step" in one.state for one in members) else moments
        planned = [one for one in members if self._can_plan(one)]
        self._alike = self._plan_alike(planned)
        self._num_steps = 0  # of this plan
        planned = planned if self._alike else []
        self._parameters = [one.parameter for one in planned]
        self._strides = [one.shard.stride() for one in planned]
        self._num_counters = len(planned) if "step" in self._keys else 0
        values = [one.state[key] for key in self._keys for one in planned]
        alike = self._alike
        self._known = [ref(value, lambda _: alike.clear()) for value in values]  # frees what rows hold of a dead moment
        self._versions = list(map(num_writes, values[: self._num_counters]))
        self._memory = self._measure(values)
        known = set(self._parameters)
        self.others = [parameter for parameter in iterate_parameters(optimizer) if parameter not in known]
        self._idle = [parameter for parameter in self.others if parameter.grad is None]  # would be planned with one

    def _can_plan(self, member: Member) -> bool:
        """Whether rows step a member as it is."""
        state, shard = member.state, member.shard
        is_plain = type(member.parameter) is nn.Parameter and type(member.own_gradient) is Tensor and is_dense(shard)
        is_here = self._rule is not None and is_plain and shard.device.type == self._device
        if not is_here or state.keys() != set(self._keys) or not fits_rows(shard):
            return False
        if not all(isinstance(one, Tensor) and (key == "step" or has_whole_blocks(one)) for key, one in state.items()):
            return False
        return is_ruled(self._optimizer, self._optimizer.param_groups[member.group])

    def _plan_alike(self, planned: Sequence[Member]) -> list[_Alike]:
        """Return parameters with the same settings and count of steps; none if one cannot be stepped in rows."""
        indices: dict[tuple[int, int, torch.device], list[int]] = {}
        # SGD and Lion do not count: it is not their first step.
        seeds = make_seeds(planned, [{"step": 1} | one.state for one in planned])
        for index, (one, (count, _)) in enumerate(zip(planned, seeds, strict=True)):
            indices.setdefault((one.group, count, one.shard.device), []).append(index)
        alike: list[_Alike] = []
        for (group, count, _), some in indices.items():
            assert self._rule is not None
            rows = plan_rows(self._rule, [_store(self._rule, planned[one]) for one in some])
            if rows is None:
                return []
            alike.append(_Alike(group, count, rows, some))
        return alike

    @torch.no_grad()
    def step(self) -> bool:
        """Step; ``False``, and nothing is changed, if one of them is not as it was."""
        values, gradients = self._values(), self._gradients()
        if not values or not gradients or self._measure(values) != self._memory:
            return False
        counters = values[: self._num_counters]
        groups = [self._optimizer.param_groups[alike.group] for alike in self._alike]
        is_known = all(is_ruled(self._optimizer, group) for group in groups) and can_run(gradients[0].device)
        if not is_known or list(map(num_writes, counters)) != self._versions:
            return False
        for group, alike in zip(groups, self._alike, strict=True):
            alike.rows.step([gradients[index] for index in alike.indices], group, alike.num_steps + self._num_steps + 1)
        add_to_each(counters, 1)
        self._versions = list(map(num_writes, counters))
        self._num_steps += 1
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

    def _measure(self, values: Sequence[Any]) -> list[tuple[int, int]]:
        """Return the size and place of the memory that the rows hold."""
        memory = *self._parameters, *map(memory_of, values[self._num_counters :])
        return [(one.nbytes, one.data_ptr()) for one in memory]


def _store(rule: Rule, member: Member) -> Stored:
    moments = [member.state[key] for key in rule.keys]
    return Stored(member.shard, moments, member.number, first_place(member.parameter))


def _order_of(optimizer: Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]
