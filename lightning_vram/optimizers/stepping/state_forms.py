"""How moments of Adam's kind are kept between the steps that compute with them in float32."""

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

from lightning_vram.core.tensors.bit_patterns import draw_of, rounded_by_place
from lightning_vram.core.tensors.layout import dense_stride, flat_as_stored, is_dense
from lightning_vram.core.tensors.low_bit import Bits, LowBitTensor, empty_low_bit, low_bit_over, record_bytes
from lightning_vram.optimizers.stepping.step_round import Member, State
from lightning_vram.optimizers.stepping.steppable import is_lion, iterate_parameters, steps_like, why_not_steppable
from lightning_vram.private_names.fsdp2.sharded_tensors import place_of_own_part
from lightning_vram.private_names.torch.dispatch import FakeTensor

HostState = Literal["fp32", "bf16", "8bit", "4bit"]
LEAST_NUMBERS = 4096
"""Of a parameter whose moments are in low bits, as torchao and bitsandbytes have it."""
DIVISORS = ("exp_avg_sq", "max_exp_avg_sq", "exp_inf")
"""Those that are divided by."""
MOMENTS = ("exp_avg", *DIVISORS, "momentum_buffer")
"""Names of what is kept in a form, of each weight."""
_first_places = WeakTensorKeyDictionary()
KINDS: tuple[type[Optimizer], ...] = (Adam, AdamW, Adamax, NAdam, RAdam)
"""Those of Adam's kind: their states count steps, by which rounding can be random."""


class StateForm(ABC):
    """A form of moments."""

    name: HostState  # as the strategy's users call it
    part: str  # what a callback has all moments of a run in it, as its users call it

    @property
    def able(self) -> str:
        """Name the optimizers whose moments can be in it."""
        return ", ".join(kind.__name__ for kind in KINDS)

    def is_for(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer has moments that can be in it."""
        return steps_like(type(optimizer), KINDS)

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether that is so, and its step can be taken in parts."""
        return self.is_for(optimizer) and why_not_steppable(optimizer) is None

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether moments of a parameter can be in it: others are left as the optimizer has them."""
        return parameter.dtype == torch.float32 and is_dense(parameter)

    def takes(self, parameter: nn.Parameter) -> bool:
        """Whether a callback has the moments of a parameter in it: by its whole size, on which ranks agree."""
        return parameter.dim() > 0 and self.holds(parameter)

    @abstractmethod
    def has(self, key: str, value: Tensor) -> bool:
        """Whether a moment is in it."""

    @abstractmethod
    def empty(self, key: str, like: Tensor) -> Tensor:
        """Return a moment without values, of the shape, order in memory and device of a parameter."""

    @abstractmethod
    def over(self, key: str, memory: Tensor, count: int) -> Tensor:
        """Return a flat moment, or a part of one, over so many bytes (uint8) as that takes."""

    @abstractmethod
    def cut(self, kept: Tensor, start: int, stop: int) -> Tensor:
        """Return a part of a moment as it lies in memory, flat, and over that. It begins where a block does."""

    @abstractmethod
    def narrow(self, key: str, wide: Tensor, start: int, seed: str, kept: Tensor | None) -> Tensor:
        """Round a flat float32 part of a moment, which may be written to."""

    @abstractmethod
    def num_bytes(self, count: int) -> int:
        """Bytes that so many numbers of a moment take."""

    def convert(self, key: str, value: Tensor, like: Tensor) -> Tensor:
        """Return a moment of a parameter in this form, rounded to the nearest; itself where it is so."""
        if self.has(key, value) and (value.device, value.stride()) == (like.device, dense_stride(like)):
            return value
        return self.empty(key, like).copy_(value)


class BF16Form(StateForm):
    """Two bytes each, rounded at random.

    A decay of .999 moves an average by less than half a unit of bf16 in a step: rounding to the nearest would lose it.
    """

    name, part = "bf16", "MomentsInBF16"

    def has(self, key: str, value: Tensor) -> bool:
        """By its dtype."""
        return value.dtype == torch.bfloat16

    def empty(self, key: str, like: Tensor) -> Tensor:
        """Return a plain tensor."""
        return torch.empty_like(like, dtype=torch.bfloat16, requires_grad=False)

    def over(self, key: str, memory: Tensor, count: int) -> Tensor:
        """Return a view."""
        return memory.view(torch.bfloat16)

    def cut(self, kept: Tensor, start: int, stop: int) -> Tensor:
        """Return a view."""
        return flat_as_stored(kept)[start:stop]

    def narrow(self, key: str, wide: Tensor, start: int, seed: str, kept: Tensor | None) -> Tensor:
        """Round at random, as it follows from the place of each number."""
        return rounded_by_place(wide, start, _short(seed), kept)

    def num_bytes(self, count: int) -> int:
        """Two each."""
        return 2 * count


class LowBitForm(StateForm):
    """8 or 4 bits and a scale for each 128, rounded to the nearest; what is divided by never becomes zero."""

    def __init__(self, name: Literal["8bit", "4bit"], bits: Bits) -> None:
        self.name, self.part, self.bits = name, f"LowBitOptimizer(bits={bits})", bits

    @property
    def able(self) -> str:
        """Name them."""
        return f"{super().able}, SGD with momentum and Lion"

    def is_for(self, optimizer: Optimizer) -> bool:
        """Whether it is one of those."""
        if steps_like(type(optimizer), [SGD]):
            return any(group["momentum"] for group in optimizer.param_groups)
        return super().is_for(optimizer) or is_lion(optimizer)

    def takes(self, parameter: nn.Parameter) -> bool:
        """Not of biases and the like, whose errors would be seen and whose bytes would not."""
        return parameter.numel() >= LEAST_NUMBERS and self.holds(parameter)

    def has(self, key: str, value: Tensor) -> bool:
        """By the kind of its blocks."""
        return type(value) is LowBitTensor and (value.bits, value.is_positive) == (self.bits, key in DIVISORS)

    def empty(self, key: str, like: Tensor) -> Tensor:
        """Return a tensor of blocks."""
        return empty_low_bit(like, bits=self.bits, is_positive=key in DIVISORS)

    def over(self, key: str, memory: Tensor, count: int) -> Tensor:
        """Return a tensor of blocks."""
        return low_bit_over(memory, count, bits=self.bits, is_positive=key in DIVISORS)

    def cut(self, kept: Tensor, start: int, stop: int) -> Tensor:
        """Return some of its blocks."""
        assert isinstance(kept, LowBitTensor)
        return kept.cut(start, stop)

    def narrow(self, key: str, wide: Tensor, start: int, seed: str, kept: Tensor | None) -> Tensor:
        """Leave it to the moment, which has the blocks."""
        return wide if kept is None else kept.copy_(wide)

    def num_bytes(self, count: int) -> int:
        """One or a half each, and those of the scales."""
        return record_bytes(count, self.bits)


FORMS: dict[HostState, StateForm] = {"bf16": BF16Form(), "8bit": LowBitForm("8bit", 8), "4bit": LowBitForm("4bit", 4)}
"""By name; none for float32."""


def is_narrow(value: object) -> bool:
    """Whether a moment is in one of the forms."""
    return isinstance(value, LowBitTensor) or (isinstance(value, Tensor) and value.dtype == torch.bfloat16)


def widen_state(state: State, take: Callable[[int], Tensor] | None = None) -> State:
    """Return a state of which all that is in a form is in float32, in memory of its own."""
    return {key: widened(value, take) if key in MOMENTS and is_narrow(value) else value for key, value in state.items()}


def narrow_state(form: StateForm, state: State, start: int, seed: str, kept: State) -> State:
    """Return a state of a part of a parameter after a step, its moments as :meth:`StateForm.narrow` makes them."""
    narrow = dict(state)
    for key in (key for key in MOMENTS if key in state):
        into = kept.get(key)
        narrow[key] = form.narrow(key, state[key], start, f"{seed} {key}", into if is_narrow(into) else None)
    return narrow


def draw_of_moment(key: str, start: int, seed: str) -> int:
    """Return the draw that :func:`narrow_state` rounds a moment in bf16 with at the place where a part starts."""
    return draw_of(start, _short(f"{seed} {key}"))


def _short(seed: str) -> int:
    return int.from_bytes(blake2b(seed.encode(), digest_size=2).digest(), "little")


def widened(value: Tensor, take: Callable[[int], Tensor] | None = None) -> Tensor:
    """Return the numbers of a moment in float32: see :func:`widen_state`."""
    wide = None if take is None else take(value.numel())
    if isinstance(value, LowBitTensor):
        return value.decode(wide)
    return value.float() if wide is None else wide.view(value.shape).copy_(value)


def first_place(parameter: nn.Parameter) -> int:
    """Return the place of the first weight of the local part of a parameter in it.

    By it rounding at random is the same however parameters are sharded.
    """
    if parameter not in _first_places:
        offset = place_of_own_part(parameter)[1] if isinstance(parameter, DTensor) else ()
        _first_places[parameter] = sum(map(operator.mul, offset, parameter.stride()))
    return int(_first_places[parameter])


def make_seeds(members: Sequence[Member], states: Sequence[State]) -> list[str]:
    """Return seeds for a step of parameters or parts of them, by their numbers and their states before it."""
    steps = [state.get("step", 0) for state in states]
    there = [place for place, step in enumerate(steps) if isinstance(step, Tensor) and step.device.type != "cpu"]
    if there and not any(isinstance(steps[place], FakeTensor) for place in there):  # the device is asked once
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
    """Return the trained parameters whose moments cannot be in a form, and stay as their optimizer has them."""
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
    """Say which parameters of a module those are."""
    named = [f"{key} ({_describe(one)})" for key, one in module.named_parameters() if one in unheld]
    return f"{name} does not change the moments of parameters that are not dense float32: {', '.join(named)}."


def _describe(parameter: nn.Parameter) -> str:
    return str(parameter.dtype) if parameter.dtype != torch.float32 else f"strides {parameter.stride()}"
