"""Forms of optimizer moments between steps, which compute in float32; what an optimizer stores for each weight."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from hashlib import blake2b
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from lightning_vram.core.tensors.bit_patterns import draw_of, rounded_by_place
from lightning_vram.core.tensors.layout import dense_stride, flat_as_stored, is_dense
from lightning_vram.core.tensors.low_bit import Bits, LowBitTensor, empty_low_bit, low_bit_over, record_bytes
from lightning_vram.optimizers.stepping.step_round import Member, State
from lightning_vram.optimizers.stepping.steppable import is_lion, iterate_parameters, steps_like, why_not_steppable
from lightning_vram.private_names.fsdp2.sharded_tensors import place_of_own_part
from lightning_vram.private_names.torch.dispatch import FakeTensor

HostState = Literal["fp32", "bf16", "8bit", "4bit"]
LEAST_NUMBERS = 4096  # smallest parameter with quantized moments, as in torchao and bitsandbytes
DIVISORS = ("exp_avg_sq", "max_exp_avg_sq", "exp_inf")  # the step divides by these
MOMENTS = ("exp_avg", *DIVISORS, "momentum_buffer")
_first_places = WeakTensorKeyDictionary()
KINDS: tuple[type[Optimizer], ...] = (Adam, AdamW, Adamax, NAdam, RAdam)  # their step count seeds random rounding


class StateForm(ABC):
    """A form of moments."""

    name: HostState  # argument of the strategy
    part: str  # callback that uses it for all moments of a run

    @property
    def able(self) -> str:
        """Name the supported optimizers."""
        return ", ".join(kind.__name__ for kind in KINDS)

    def is_for(self, optimizer: Optimizer) -> bool:
        """Whether the moments of an optimizer can have this form."""
        return steps_like(type(optimizer), KINDS)

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether they can, and the optimizer can step a few parameters at a time."""
        return self.is_for(optimizer) and why_not_steppable(optimizer) is None

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether moments of a parameter can have this form; others are unchanged."""
        return parameter.dtype == torch.float32 and is_dense(parameter)

    def takes(self, parameter: nn.Parameter) -> bool:
        """Whether a callback uses it for a parameter: by its unsharded size, the same on all ranks."""
        return parameter.dim() > 0 and self.holds(parameter)

    @abstractmethod
    def has(self, key: str, value: Tensor) -> bool:
        """Whether a moment has this form."""

    @abstractmethod
    def empty(self, key: str, like: Tensor) -> Tensor:
        """Return an uninitialized moment with the shape, memory order and device of a parameter."""

    @abstractmethod
    def over(self, key: str, memory: Tensor, count: int) -> Tensor:
        """Return a flat moment, or a part of one, over its bytes (uint8)."""

    @abstractmethod
    def cut(self, stored: Tensor, start: int, stop: int) -> Tensor:
        """Return a flat view of a part of a moment; it begins at a block."""

    @abstractmethod
    def round(self, key: str, wide: Tensor, start: int, seed: str, stored: Tensor | None) -> Tensor:
        """Round a flat float32 part [n] of a moment, from place ``start`` on, into ``stored``; may overwrite it.

        ``seed`` differs for each moment, parameter and step. Without ``stored``: return a value for ``copy_``.
        """

    @abstractmethod
    def num_bytes(self, count: int) -> int:
        """Return the bytes of so many numbers."""

    def convert(self, key: str, value: Tensor, like: Tensor) -> Tensor:
        """Return a moment in this form, rounded to nearest; itself if it has the form."""
        if self.has(key, value) and (value.device, value.stride()) == (like.device, dense_stride(like)):
            return value
        return self.empty(key, like).copy_(value)


class BF16Form(StateForm):
    """Stochastic rounding to 2 bytes: a decay of .999 moves an average by less than half a unit of bf16 per step."""

    name, part = "bf16", "MomentsInBF16"

    @override
    def has(self, key: str, value: Tensor) -> bool:
        return value.dtype == torch.bfloat16

    @override
    def empty(self, key: str, like: Tensor) -> Tensor:
        return torch.empty_like(like, dtype=torch.bfloat16, requires_grad=False)

    @override
    def over(self, key: str, memory: Tensor, count: int) -> Tensor:
        return memory.view(torch.bfloat16)

    @override
    def cut(self, stored: Tensor, start: int, stop: int) -> Tensor:
        return flat_as_stored(stored)[start:stop]

    @override
    def round(self, key: str, wide: Tensor, start: int, seed: str, stored: Tensor | None) -> Tensor:
        return rounded_by_place(wide, start, _short(seed), stored)

    @override
    def num_bytes(self, count: int) -> int:
        return 2 * count


class LowBitForm(StateForm):
    """8 or 4 bits, and a scale per 128 numbers, rounded to nearest; divisors never become zero."""

    def __init__(self, name: Literal["8bit", "4bit"], bits: Bits) -> None:
        self.name, self.part, self.bits = name, f"LowBitOptimizer(bits={bits})", bits

    @property
    @override
    def able(self) -> str:
        return f"{super().able}, SGD with momentum and Lion"

    @override
    def is_for(self, optimizer: Optimizer) -> bool:
        if steps_like(type(optimizer), [SGD]):
            return any(group["momentum"] for group in optimizer.param_groups)
        return super().is_for(optimizer) or is_lion(optimizer)

    @override
    def takes(self, parameter: nn.Parameter) -> bool:
        # Biases and the like would save no bytes, but add errors.
        return parameter.numel() >= LEAST_NUMBERS and self.holds(parameter)

    @override
    def has(self, key: str, value: Tensor) -> bool:
        return type(value) is LowBitTensor and (value.bits, value.is_positive) == (self.bits, key in DIVISORS)

    @override
    def empty(self, key: str, like: Tensor) -> Tensor:
        return empty_low_bit(like, bits=self.bits, is_positive=key in DIVISORS)

    @override
    def over(self, key: str, memory: Tensor, count: int) -> Tensor:
        return low_bit_over(memory, count, bits=self.bits, is_positive=key in DIVISORS)

    @override
    def cut(self, stored: Tensor, start: int, stop: int) -> Tensor:
        assert isinstance(stored, LowBitTensor)
        return stored.cut(start, stop)

    @override
    def round(self, key: str, wide: Tensor, start: int, seed: str, stored: Tensor | None) -> Tensor:
        return wide if stored is None else stored.copy_(wide)

    @override
    def num_bytes(self, count: int) -> int:
        return record_bytes(count, self.bits)


# By name; float32 has none.
FORMS: dict[HostState, StateForm] = {"bf16": BF16Form(), "8bit": LowBitForm("8bit", 8), "4bit": LowBitForm("4bit", 4)}


def is_narrow(value: object) -> bool:
    """Whether a moment has one of the forms."""
    return isinstance(value, LowBitTensor) or (isinstance(value, Tensor) and value.dtype == torch.bfloat16)


def widen_state(state: State, take: Callable[[int], Tensor] | None = None) -> State:
    """Return a state with float32 moments, in memory that ``take`` returns for a count of numbers, or in new memory."""
    return {key: widened(value, take) if key in MOMENTS and is_narrow(value) else value for key, value in state.items()}


def narrow_state(form: StateForm, state: State, start: int, seed: str, stored: State) -> State:
    """Return the flat state of a part of a parameter after a step, its moments rounded into those of ``stored``."""
    narrow = dict(state)
    for key in (key for key in MOMENTS if key in state):
        into = stored.get(key)
        narrow[key] = form.round(key, state[key], start, f"{seed} {key}", into if is_narrow(into) else None)
    return narrow


def draw_of_moment(key: str, start: int, seed: str) -> int:
    """Return the random draw by which a bf16 moment is rounded at place ``start``."""
    return draw_of(start, _short(f"{seed} {key}"))


def _short(seed: str) -> int:
    return int.from_bytes(blake2b(seed.encode(), digest_size=2).digest(), "little")


def widened(value: Tensor, take: Callable[[int], Tensor] | None = None) -> Tensor:
    """Return a moment in float32."""
    wide = None if take is None else take(value.numel())
    if isinstance(value, LowBitTensor):
        return value.decode(wide)
    return value.float() if wide is None else wide.view(value.shape).copy_(value)


def first_place(parameter: nn.Parameter) -> int:
    """Return the place of a shard in its parameter, so that random rounding is independent of sharding."""
    if parameter not in _first_places:
        offset = place_of_own_part(parameter)[1] if isinstance(parameter, DTensor) else ()
        _first_places[parameter] = sum(map(operator.mul, offset, parameter.stride()))
    return int(_first_places[parameter])


def make_seeds(members: Sequence[Member], states: Sequence[State]) -> list[str]:
    """Return seeds for a step of members, from their numbers and step counts."""
    steps = [state.get("step", 0) for state in states]
    there = [place for place, step in enumerate(steps) if isinstance(step, Tensor) and step.device.type != "cpu"]
    if there and not any(isinstance(steps[place], FakeTensor) for place in there):  # one transfer from the device
        read = torch.stack([steps[place].float() for place in there]).tolist()
        for place, step in zip(there, read, strict=True):
            steps[place] = step
    counts = (0 if isinstance(step, FakeTensor) else int(step) for step in steps)
    return [f"{count} {number}" for count, number in zip(counts, (member.number for member in members), strict=True)]


def find_unheld(
    name: str,
    way_out: str,
    form: StateForm,
    optimizers: Iterable[Optimizer],
    parameters: Container[object],
    *,
    is_late: bool,
) -> set[nn.Parameter]:
    """Return the trained parameters whose moments cannot have a form, and stay unchanged; refuse if all of them do.

    ``is_late``: moments of other optimizers have the form already.
    """
    trained: dict[nn.Parameter, str] = {}  # with the class of their optimizer
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not form.fits(optimizer):
            raise ValueError(
                f"{name} is for the moments of {form.able}, got {kind}: use one of these, as torch.optim has it, or "
                f"{way_out}."
            )
        trained |= {p: kind for p in iterate_parameters(optimizer) if p.requires_grad and p in parameters}
    unheld = {parameter for parameter in trained if not form.holds(parameter)}
    if unheld and len(unheld) == len(trained) and not is_late:
        found, kinds = (" and ".join(sorted(set(one))) for one in (map(_describe, unheld), trained.values()))
        raise ValueError(
            f"{name} is for the moments of float32 weights, got {found} in {kinds}: use precision='bf16-mixed' or "
            f"'32-true', or {way_out}."
        )
    return unheld


def describe_unheld(name: str, unheld: Container[object], module: nn.Module) -> str:
    """Name unsupported parameters of a module."""
    named = [f"{key} ({_describe(one)})" for key, one in module.named_parameters() if one in unheld]
    return f"{name} does not change the moments of parameters that are not dense float32: {', '.join(named)}."


def _describe(parameter: nn.Parameter) -> str:
    return str(parameter.dtype) if parameter.dtype != torch.float32 else f"strides {parameter.stride()}"
