"""Low-precision moments: 4, 2.06 or 1.06 bytes per weight for Adam instead of 8.

On a device compiled code steps rows of 128 numbers, one block of quantized moments each: one pass over memory in place
of a dozen. Other parameters run torch's own kernel on parts of some million weights (``step_loop.py``), with moments
upcast to float32 and rounded afterwards: 12 bytes per weight.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from lightning_vram.core.tensors.codecs import BLOCK_SIZE as ROW
from lightning_vram.core.tensors.codecs import LowBitTensor, decode_rows, draw_of, encode_rows
from lightning_vram.core.tensors.properties import flat_as_stored, is_dense, stored_like
from lightning_vram.optimizers import moment_forms
from lightning_vram.optimizers import step_round as rounds
from lightning_vram.optimizers.library_moments import Library, LibraryForm, form_of
from lightning_vram.optimizers.step_loop import bits_of, step_in_parts
from lightning_vram.private_names.dispatcher import EXACT_DIVISION, FakeTensor, add_to_each, current_dispatch_mode

DEVICES = {"cuda", "xpu"}  # types of devices with compiled rows: on the host our C is faster
SLICE = 2**24  # numbers that one call steps
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
    if rounds.steps_like(type(optimizer), [Adam, AdamW]):
        return _ADAM
    if rounds.steps_like(type(optimizer), [SGD]):
        return _SGD
    return _LION if rounds.is_lion(optimizer) else None


Codec = tuple[int, bool]  # how a moment is stored: bits, and whether it is positive


def _round(numbers: Tensor, draws: Tensor) -> Tensor:
    """Return the bits of bf16 numbers, as ``rounded_by_place``."""
    bits = torch.where(numbers.isnan(), 0x7FC00000, numbers.view(torch.int32))
    return ((bits + (draws & 0xFFFF).int()) >> 16).short()


def _make_function(rule: Rule, codecs: Sequence[Codec]) -> Callable[..., None]:
    """Return a step of rows: of weights [rows, 128], a gradient and stored moments, with the numbers of the rule.

    ``draws``: of the first number, for each moment.
    """

    def step(weights: Tensor, gradient: Tensor, stored: Moments, numbers: Numbers, *draws: Tensor) -> None:
        assert weights.shape[1] == ROW  # a constant for the compiler
        moments = [
            (rows.int() << 16).view(torch.float32) if bits == 16 else decode_rows(rows, bits, is_positive=is_positive)
            for (bits, is_positive), rows in zip(codecs, stored, strict=True)
        ]
        stepped, moments[:] = rule.step(weights, gradient, moments, numbers)
        columns = torch.arange(ROW, device=weights.device)
        firsts = torch.arange(weights.shape[0], device=weights.device).unsqueeze(1) * ROW
        for index, ((bits, is_positive), moment) in enumerate(zip(codecs, moments, strict=True)):
            if bits == 16:
                stored[index].copy_(_round(moment, (firsts + columns) * _STRIDE + draws[index]))
            else:
                encode_rows(moment, stored[index], bits, is_positive=is_positive)
        weights.copy_(stepped)

    # torch.compile limits how often one code is compiled: each function gets a copy.
    return FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)


def compile_function(function: Callable[..., None]) -> Callable[..., None]:
    """Compile a step of rows, for any number of them."""
    return torch.compile(function, dynamic=True, options=EXACT_DIVISION)


@cache
def _function(rule: Rule, codecs: tuple[Codec, ...], device: torch.device) -> Callable[..., None] | None:
    """Return the compiled step of rows on a device; ``None`` if that fails."""
    formats = [(ROW, torch.float32)] * 2
    formats += [(ROW, torch.int16) if bits == 16 else (ROW * bits // 8 + 4, torch.uint8) for bits, _ in codecs]
    weights, gradient, *stored = (
        torch.zeros(_EXAMPLE_ROWS, width, dtype=dtype, device=device) for width, dtype in formats
    )
    draws = _scalars([0] * len(codecs), torch.int64)
    try:
        compiled = compile_function(_make_function(rule, codecs))
        with torch.no_grad():
            compiled(weights, gradient, stored, _scalars([0.0] * rule.size, torch.float32), *draws)
    except Exception as error:  # compilers fail in many ways
        reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
        if not _failures:
            _log.warning(f"Optimizer steps launch more kernels than needed: torch.compile failed ({reason}).")
        _failures.append(reason)
        return None
    return compiled


def _scalars(values: Sequence[float], dtype: torch.dtype) -> Numbers:
    return torch.tensor(values, dtype=dtype, device="cpu").unbind()


def can_run(device: torch.device) -> bool:
    """Whether compiled steps can run on a device now: ask before each step, as dispatch modes come and go."""
    return device.type in DEVICES and not _failures and current_dispatch_mode() is None


@torch.no_grad()
def step_rows(step_round: rounds.StepRound, rule: Rule | None, members: Sequence[rounds.Member]) -> list[rounds.Member]:
    """Step the members that compiled rows can step, as they are stored; return the others.

    Which these are depends on states and settings alone, or a resumed run might round otherwise.
    """
    chosen = [] if rule is None else [one for one in members if _can_step(step_round, rule, one)]
    stepped: set[rounds.Member] = set()
    # SGD and Lion do not count: it is not their first step.
    seeds = moment_forms.make_seeds(chosen, [{"step": 1} | one.local_state for one in chosen])
    numbers: dict[tuple[int, int], Numbers] = {}  # by group and count
    for member, (count, number) in zip(chosen, seeds, strict=True):
        assert rule is not None
        moments = [member.local_state[key] for key in rule.keys]
        codecs = tuple((bits_of(one), getattr(one, "is_positive", False)) for one in moments)
        function = _function(rule, codecs, member.shard.device)
        if function is None:
            break
        key = member.group, count
        if key not in numbers:
            numbers[key] = _scalars(rule.numbers(step_round.settings_of(member.group), count + 1), torch.float32)
        seeds_of_moments = [moment_forms.seed_of_moment((count, number), one) for one in rule.keys]
        _step_one(function, member, moments, numbers[key], seeds_of_moments)
        stepped.add(member)
    counters = [one.local_state["step"] for one in stepped if "step" in one.local_state]
    if counters:
        add_to_each(counters, 1)
    return [one for one in members if one not in stepped]


def _can_step(step_round: rounds.StepRound, rule: Rule, member: rounds.Member) -> bool:
    shard, gradient, state = member.shard, member.own_gradient, member.local_state
    is_plain = type(member.parameter) is nn.Parameter and not isinstance(shard, FakeTensor) and can_run(shard.device)
    if not is_plain or type(gradient) is not Tensor or gradient.is_sparse or gradient.dtype != torch.float32:
        return False
    # A single row would be compiled by itself.
    is_whole = is_dense(shard) and shard.dtype == torch.float32 and shard.numel() % ROW == 0 and shard.numel() > ROW
    has_begun = state.keys() == {*rule.keys, *(["step"] if rule is _ADAM else [])}
    has_begun = has_begun and all(isinstance(one, Tensor) for one in state.values())  # SGD's may be None
    return is_whole and has_begun and rounds.is_ruled(step_round.optimizer, step_round.settings_of(member.group))


def _step_one(
    function: Callable[..., None], member: rounds.Member, moments: Moments, numbers: Numbers, seeds: Sequence[int]
) -> None:
    shard = member.shard.detach()
    weights, gradient = (flat_as_stored(one).view(-1, ROW) for one in (shard, stored_like(member.gradient, shard)))
    stored = [
        one.records if isinstance(one, LowBitTensor) else flat_as_stored(one).view(torch.int16).view(-1, ROW)
        for one in moments
    ]
    for start in range(0, len(weights), SLICE // ROW):
        place = moment_forms.first_place(member.parameter) + start * ROW
        draws = _scalars([draw_of(place, seed) for seed in seeds], torch.int64)
        part = slice(start, start + SLICE // ROW)
        function(weights[part], gradient[part], [one[part] for one in stored], numbers, *draws)


class LowPrecisionMoments(rounds.StepTakeOver):
    """Optimizers of a module with moments in a form, until :meth:`let_go`; those made in training, too."""

    def __init__(
        self,
        module: nn.Module,
        form: moment_forms.StateForm,
        library: Library = "own",
        check: moment_forms.UpdateCheck | None = None,
    ) -> None:
        self._module, self._form, self._library, self._check = module, form, library, check
        self.unheld: set[nn.Parameter] = set()  # trained parameters whose moments cannot have the form
        super().__init__()

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Convert the moments of optimizers, now and after loading; refuse all if one cannot be stepped."""
        fresh = list(filter(self._form.fits, optimizers))
        parameters, name = set(chain.from_iterable(map(rounds.iterate_parameters, fresh))), self._form.part
        self.unheld = moment_forms.find_unsupported(
            name, f"leave {name} out", self._form, fresh, parameters, is_late=bool(self._taken)
        )
        forms = [form_of(self._library, self._form, optimizer) for optimizer in fresh]
        for optimizer, form in zip(fresh, forms, strict=True):
            states = moment_forms.LowPrecisionStates(optimizer, form.takes, form, self._check)
            self._handles += states.begin()
            self._take(optimizer, (states, None if isinstance(form, LibraryForm) else rule_of(optimizer)))

    def let_go(self) -> None:
        """Detach the optimizers; their next step upcasts the moments."""
        for optimizer in self.release():
            moment_forms.upcast_when_stepped(optimizer)

    def _has_ours(self, optimizer: Optimizer) -> bool:
        own = set(self._module.parameters())
        return self._form.fits(optimizer) and not own.isdisjoint(rounds.iterate_parameters(optimizer))

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        loss = None if closure is None else closure()
        step_round = rounds.StepRound(optimizer, is_on_host=False)
        self.step_members(optimizer, step_round, step_round.take_rest())
        return loss

    def step_members(
        self, optimizer: Optimizer, step_round: rounds.StepRound, members: Sequence[rounds.Member]
    ) -> None:
        """Step a few parameters of an attached optimizer."""
        states, rule = self._taken[optimizer]
        states.adopt(members)
        step_round.run([member for member in members if not states.has(member.parameter)])
        ours = [member for member in members if states.has(member.parameter)]
        if isinstance(states.form, LibraryForm):
            states.form.step(step_round, ours)
            return
        if not states.check.is_counting:
            ours = step_rows(step_round, rule, ours)
        step_in_parts(step_round, states, ours)
