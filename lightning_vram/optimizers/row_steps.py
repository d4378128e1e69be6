"""Compiled steps of many parameters with low-precision moments: the number of calls does not depend on the parameters.

A step sees rows of 128 numbers, one block of quantized moments each. Large parameters are stepped in place; small ones
are copied to scratch memory by one call, stepped by one call, and copied back by one call.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_vram.core.tensors.codecs import BLOCK_SIZE as ROW
from lightning_vram.core.tensors.codecs import LowBitTensor, draw_of
from lightning_vram.optimizers.moment_forms import DIVISORS, Seed, StateForm, seed_of_moment
from lightning_vram.optimizers.step_round import is_lion, steps_like
from lightning_vram.private_names.dispatcher import EXACT_DIVISION, FakeTensor, copy_each, current_dispatch_mode

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


@dataclass(frozen=True)
class Rule:
    """How an optimizer steps float32 weights.

    Attributes:
        keys: Names of the moments.
        size: How many numbers a step needs.
        numbers: Returns these, from the settings of a group and the number of the step, from 1 on.
        step: Returns new weights and moments, from weights, gradient, moments and numbers.
    """

    keys: tuple[str, ...]
    size: int
    numbers: Callable[[Mapping[str, Any], int], list[float]]
    step: Callable[[Tensor, Tensor, Moments, Numbers], tuple[Tensor, Moments]]


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


def rule_of(optimizer: Optimizer, settings: Mapping[str, Any]) -> Rule | None:
    """Return how an optimizer steps a group with these settings; ``None``: not as a known one."""
    is_other = any(settings.get(name) for name in ("amsgrad", "differentiable", "capturable", "fixed_decay"))
    is_scaled = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
    values = (*settings.values(), *settings.get("betas", ()))
    if is_other or is_scaled or any(isinstance(one, Tensor) and one.device.type != "cpu" for one in values):
        return None
    if steps_like(type(optimizer), [Adam, AdamW]):
        return _ADAM
    if steps_like(type(optimizer), [SGD]):
        return _SGD if settings["momentum"] else None
    return _LION if settings.get("weight_decouple", True) and is_lion(optimizer) else None


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
        # Views of the same item size only: another one would be a kernel by itself.
        low, second, third, high = (stored[:, place, None].int() for place in range(-4, 0))
        scales = (low | second << 8 | third << 16 | high << 24).view(torch.float32)
        codes = stored[:, :-4]
        if self.bits == 4:
            shifts = torch.arange(0, 8, 4, dtype=torch.uint8, device=stored.device)
            codes = (codes.unsqueeze(2) >> shifts & 0xF).view(-1, ROW)
        offset, unit = (-1, 0.5**self.bits) if self.is_positive else (2 ** (self.bits - 1) - 1, 2 * 0.5**self.bits)
        roots = (codes.float() - offset) * unit
        return roots * roots.abs() * scales

    def encode(self, numbers: Tensor, stored: Tensor) -> None:
        """Write rows to records, as ``LowBitTensor.take_over``."""
        largest, smallest = numbers.amax(1, keepdim=True), numbers.amin(1, keepdim=True)
        scales = torch.where(-smallest > largest, smallest, largest)
        scales = torch.where(scales.abs() == math.inf, math.nan, scales)
        ratios = numbers / torch.where(scales.abs() > 0, scales, 1.0)
        offset, units = (-1, 2**self.bits) if self.is_positive else (2 ** (self.bits - 1) - 1, 2 ** (self.bits - 1))
        codes = torch.round(torch.copysign(_root(ratios.abs()), ratios) * units) + offset
        codes = codes.clamp(0, 2**self.bits - 1).to(torch.uint8)
        if self.bits == 4:
            pairs = codes.view(-1, ROW // 2, 2)
            codes = pairs[..., 0] | pairs[..., 1] << 4
        stored[:, :-4].copy_(codes)
        for place in range(4):
            stored[:, place - 4].copy_((scales.view(torch.int32) >> 8 * place & 0xFF).squeeze(1))


def _root(ratios: Tensor) -> Tensor:
    # On the host, where only tests run this, torch.sqrt is off by a bit in a fifth.
    return ratios.sqrt() if ratios.device.type != "cpu" else ratios.double().sqrt().float()


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
        stepped, moments[:] = rule.step(weights, gradient.float(), moments, numbers)
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
                codec.encode(torch.where(columns < used, moment, 0.0) if is_gathered else moment, stored[index])
        weights.copy_(stepped)

    # torch.compile limits how often one code is compiled: each function gets a copy.
    return FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)


def compile_function(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a step of rows, for any number of them."""
    return torch.compile(function, dynamic=True, options=EXACT_DIVISION)


@cache
def _function(
    rule: Rule, codecs: tuple[_Codec, ...], device: torch.device, dtype: torch.dtype, *, is_gathered: bool
) -> Callable[..., None]:
    """Return the compiled step of rows on a device with gradients of a dtype; not compiled if that fails."""
    rows, scalar = _EXAMPLE_ROWS, torch.zeros((), dtype=torch.int64, device="cpu")
    plain = _make_function(rule, codecs, is_gathered=is_gathered)
    example = (
        torch.zeros(rows, ROW, dtype=torch.float32, device=device),
        torch.zeros(rows, ROW, dtype=dtype, device=device),
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


def compile_ahead(device: torch.device, rule: Rule, form: StateForm) -> None:
    """Compile the steps of a rule for moments in a form, so that the first step need not; log a warning if it fails."""
    bits = form.bits
    codecs = tuple(_Codec(bits, bits < 16 and key in DIVISORS) for key in rule.keys)
    for is_gathered in (False, True) if can_run(device) else ():
        _function(rule, codecs, device, torch.float32, is_gathered=is_gathered)


class _Piece(NamedTuple):
    """Numbers of a parameter; they begin with a row."""

    parameter: int  # its index
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return -(-(self.stop - self.start) // ROW)

    def cut(self, flat: Tensor, row: int) -> Tensor:
        """Return this part of a flat tensor with ``row`` elements in a row; its last row may be shorter."""
        first, size = self.start // ROW * row, self.rows * row
        return flat if not first and flat.numel() <= size else flat[first : first + size]  # slicing takes 5 us


def _cut(sizes: Sequence[int]) -> tuple[list[_Piece], list[list[_Piece]]]:
    """Return the pieces of parameters to step in place, and those to step together."""
    in_place: list[_Piece] = []
    gathered: list[list[_Piece]] = []
    last = GATHERED
    for parameter, size in enumerate(sizes):
        whole = size - size % ROW if size >= IN_PLACE else 0
        in_place += [_Piece(parameter, start, min(start + SLICE, whole)) for start in range(0, whole, SLICE)]
        rest = _Piece(parameter, whole, size)
        if not rest.rows:
            continue
        last += rest.rows * ROW
        if last > GATHERED:
            gathered.append([])
            last = rest.rows * ROW
        gathered[-1].append(rest)
    return in_place, gathered


def _gather(views: Sequence[Tensor], pieces: Sequence[_Piece], rows: int, row: int) -> tuple[Tensor, list[Tensor]]:
    """Return memory of so many rows, in which each piece begins with one, and views of it with the sizes of theirs."""
    memory, used = views[0].new_empty(rows * row), [view.numel() for view in views]
    gaps = [piece.rows * row - size for piece, size in zip(pieces, used, strict=True)]
    gaps[-1] += rows * row - sum(used) - sum(gaps)
    return memory, list(memory.split_with_sizes([*chain(*zip(used, gaps, strict=True))])[::2])


@dataclass(frozen=True)
class RowSteps:
    """Steps of float32 parameters of one device and one group, with moments stored alike, all in the same step."""

    rule: Rule
    codecs: tuple[_Codec, ...]
    device: torch.device
    in_place: list[tuple[_Piece, int, int, Sequence[Tensor]]]  # with its number, place, and what is stored
    gathered: list[tuple[list[_Piece], Sequence[Sequence[Tensor]], Tensor]]  # with what is stored, and marks

    @classmethod
    def make(
        cls,
        rule: Rule,
        weights: Sequence[Tensor],
        moments: Sequence[Moments],
        numbers: Sequence[int],
        places: Sequence[int],
    ) -> "RowSteps | None":
        """Plan the steps of some parameters, and compile what they need; ``None`` if they cannot be stepped so.

        Args:
            rule: How their optimizer steps.
            weights: Flat and contiguous, over the memory of the parameters.
            moments: For each parameter, stored moments in the order of ``rule.keys``: flat bf16 tensors or
                ``LowBitTensor``; all zeros if it was never stepped.
            numbers: Number of each parameter in the optimizer.
            places: Place of the first weight in the unsharded parameter.
        """
        found = {tuple(map(_codec_of, some)) for some in moments}
        is_other = any(one.dtype != torch.float32 or isinstance(one, FakeTensor) for one in weights)
        if len(found) != 1 or None in next(iter(found)) or is_other or not can_run(weights[0].device):
            return None
        codecs, device = cast(tuple[_Codec, ...], found.pop()), weights[0].device

        def views(piece: _Piece) -> list[Tensor]:  # flat int16
            own = (getattr(one, "records", one) for one in (weights[piece.parameter], *moments[piece.parameter]))
            rows = (2 * ROW, *(codec.shorts for codec in codecs))
            return [piece.cut(one.view(torch.int16).view(-1), row) for one, row in zip(own, rows, strict=True)]

        in_place, gathered = _cut([one.numel() for one in weights])
        made = cls(
            rule,
            codecs,
            device,
            [(one, numbers[one.parameter], places[one.parameter] + one.start, views(one)) for one in in_place],
            [
                (some, list(zip(*map(views, some), strict=True)), _mark(some, numbers, places).to(device))
                for some in gathered
            ],
        )
        made._functions(torch.float32)
        return None if _failures else made

    @property
    def num_launches(self) -> int:
        """Calls of operators and of compiled functions in a step."""
        return len(self.in_place) + 3 * len(self.gathered)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], settings: Mapping[str, Any], count: int) -> None:
        """Step all parameters.

        Args:
            gradients: Flat and contiguous, in float32, bf16 or fp16.
            settings: Of the group, in this step.
            count: Number of the step, from 1 on. SGD begins its buffer in step 1.
        """
        if len({one.dtype for one in gradients}) > 1:
            gradients = [one.float() for one in gradients]
        dtype, row = gradients[0].dtype, gradients[0].itemsize // 2 * ROW
        step_in_place, step_gathered = self._functions(dtype)
        values = _scalars(self.rule.numbers(settings, count), torch.float32)
        for piece, number, place, stored in self.in_place:
            draws = [draw_of(place, seed_of_moment((count - 1, number), key)) for key in self.rule.keys]
            gradient = piece.cut(gradients[piece.parameter], ROW)
            step_in_place(*self._typed(stored, gradient), values, *_scalars(draws, torch.int64))
        for pieces, views, marks in self.gathered:
            sources = [*views, [piece.cut(gradients[piece.parameter].view(torch.int16), row) for piece in pieces]]
            rows = (2 * ROW, *(codec.shorts for codec in self.codecs), row)
            scratch = [_gather(some, pieces, len(marks), size) for some, size in zip(sources, rows, strict=True)]
            memories, targets = zip(*scratch, strict=True)
            # All in units of 2 bytes: PyTorch copies a list at once if it has one dtype.
            copy_each([*chain(*targets)], [*chain(*sources)])
            typed = self._typed(memories[:-1], memories[-1].view(dtype))
            step_gathered(*typed, values, marks, *_scalars([count - 1], torch.int64))
            copy_each([*chain(*views)], [*chain(*targets[:-1])])

    def _typed(self, stored: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, Tensor, Moments]:
        """Return rows of weights, gradient and moments."""
        moments = [codec.rows(one) for codec, one in zip(self.codecs, stored[1:], strict=True)]
        return stored[0].view(torch.float32).view(-1, ROW), gradient.view(-1, ROW), moments

    def _functions(self, dtype: torch.dtype) -> tuple[Callable[..., None], Callable[..., None]]:
        key = self.rule, self.codecs, self.device, dtype
        return _function(*key, is_gathered=False), _function(*key, is_gathered=True)


def _mark(pieces: Sequence[_Piece], numbers: Sequence[int], places: Sequence[int]) -> Tensor:
    """Return what :func:`_make_function` reads of gathered rows; at least two, as one would be compiled by itself."""
    starts = [torch.arange(piece.start, piece.stop, ROW, device="cpu") for piece in pieces]
    marks = [
        torch.stack([piece.stop - some, torch.full_like(some, numbers[index]), (some + places[index]) % 2**16], 1)
        for piece, index, some in zip(pieces, (piece.parameter for piece in pieces), starts, strict=True)
    ]
    padding = torch.zeros(max(0, 2 - sum(map(len, marks))), 3, dtype=torch.int64, device="cpu")
    return torch.cat([*marks, padding]).int()


def _codec_of(moment: Tensor) -> _Codec | None:
    if moment.dtype == torch.bfloat16:
        return _Codec(16)
    if type(moment) is not LowBitTensor:
        return None
    codec = _Codec(moment.bits, moment.is_positive)
    return codec if moment.records.shape[1] == 2 * codec.shorts else None
