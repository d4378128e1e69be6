"""Low-precision forms of optimizer moments between steps; what optimizers store per weight; lost updates.

Steps compute in float32: moments are upcast before, and rounded after.
"""

import operator
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_vram.core.tensors import codecs
from lightning_vram.core.tensors.properties import dense_stride, is_dense, state_stored_like
from lightning_vram.optimizers import step_round as rounds
from lightning_vram.private_names.dispatcher import FakeTensor
from lightning_vram.private_names.fsdp2 import local_shard, place_of_own_shard, stored_shard
from lightning_vram.private_names.torch import step_pre_hooks

HostState = Literal["fp32", "bf16", "8bit", "4bit"]
Seed = tuple[int, int]  # of stochastic rounding: the number of a step, and of a parameter
LEAST_NUMBERS = 4096  # smallest parameter with quantized moments, as in torchao and bitsandbytes
DIVISORS = ("exp_avg_sq", "max_exp_avg_sq", "exp_inf")  # the step divides by these
MOMENTS = ("exp_avg", *DIVISORS, "momentum_buffer")
KINDS: tuple[type[Optimizer], ...] = (Adam, AdamW, Adamax, NAdam, RAdam)  # their step count seeds random rounding
_first_places = WeakTensorKeyDictionary()
_upcasts: "WeakKeyDictionary[Optimizer, RemovableHandle]" = WeakKeyDictionary()  # hooks for the next step


@dataclass(eq=False)
class StateForm:
    """A form of moments: bf16, stochastically rounded; or 8 or 4 bits and a scale per 128 numbers, rounded to nearest.

    A decay of .999 moves an average by less than half a unit of bf16 per step. Divisors in few bits never become zero.
    """

    name: HostState  # argument of the strategy
    part: str  # callback that uses it for all moments of a run
    bits: int

    @property
    def able(self) -> str:
        """Name the supported optimizers."""
        return ", ".join(kind.__name__ for kind in KINDS) + (", SGD with momentum and Lion" if self.bits < 16 else "")

    def is_for(self, optimizer: Optimizer) -> bool:
        """Whether the moments of an optimizer can have this form."""
        if self.bits < 16 and rounds.steps_like(type(optimizer), [SGD]):
            return any(group["momentum"] for group in optimizer.param_groups)
        return rounds.steps_like(type(optimizer), KINDS) or (self.bits < 16 and rounds.is_lion(optimizer))

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether they can, and the optimizer can step a few parameters at a time."""
        return self.is_for(optimizer) and rounds.why_not_steppable(optimizer) is None

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether moments of a parameter can have this form; others are unchanged."""
        return parameter.dtype == torch.float32 and is_dense(parameter)

    def takes(self, parameter: nn.Parameter) -> bool:
        """Whether a callback uses it for a parameter: by its unsharded size, the same on all ranks."""
        # In few bits biases and the like would save no bytes, but add errors.
        is_large = parameter.numel() >= LEAST_NUMBERS if self.bits < 16 else parameter.dim() > 0
        return is_large and self.holds(parameter)

    def has(self, key: str, value: Tensor) -> bool:
        """Whether a moment has this form."""
        if self.bits == 16:
            return value.dtype == torch.bfloat16
        return type(value) is codecs.LowBitTensor and (value.bits, value.is_positive) == (self.bits, key in DIVISORS)

    def empty(self, key: str, like: Tensor) -> Tensor:
        """Return an uninitialized moment with the shape, memory order and device of a parameter."""
        if self.bits == 16:
            return torch.empty_like(like, dtype=torch.bfloat16, requires_grad=False)
        return codecs.empty_low_bit(like, bits=cast(codecs.Bits, self.bits), is_positive=key in DIVISORS)

    def round(self, key: str, fp32: Tensor, start: int, seed: Seed, stored: Tensor | None) -> Tensor:
        """Round a flat float32 part [n] of a moment, from place ``start`` on, into ``stored`` or for ``copy_``."""
        if self.bits == 16:
            return codecs.rounded_by_place(fp32, start, seed_of_moment(seed, key), stored)
        return fp32 if stored is None else stored.copy_(fp32)

    def num_bytes(self, count: int) -> int:
        """Return the bytes of so many numbers."""
        return 2 * count if self.bits == 16 else codecs.record_bytes(count, cast(codecs.Bits, self.bits))

    def convert(self, key: str, value: Tensor, like: Tensor) -> Tensor:
        """Return a moment in this form, rounded to nearest; itself if it has the form."""
        if self.has(key, value) and (value.device, value.stride()) == (like.device, dense_stride(like)):
            return value
        return self.empty(key, like).copy_(value)


FORMS: dict[HostState, StateForm] = {
    "bf16": StateForm("bf16", "MomentsInBF16", 16),
    "8bit": StateForm("8bit", "LowBitOptimizer(bits=8)", 8),
    "4bit": StateForm("4bit", "LowBitOptimizer(bits=4)", 4),
}


def is_low_precision(value: object) -> bool:
    """Whether a moment has one of the forms."""
    return isinstance(value, codecs.LowBitTensor) or (isinstance(value, Tensor) and value.dtype == torch.bfloat16)


def upcast_state(state: rounds.State) -> rounds.State:
    """Return a state with float32 moments."""
    return {
        key: codecs.decoded(value).float() if key in MOMENTS and is_low_precision(value) else value
        for key, value in state.items()
    }


def round_state(
    form: StateForm,
    state: rounds.State,
    start: int,
    seed: Seed,
    stored: rounds.State,
    check: "UpdateCheck | None" = None,
) -> rounds.State:
    """Return the flat state of a part after a step, rounded into ``stored``; ``check`` counts lost updates."""
    rounded = dict(state)
    for key in (key for key in MOMENTS if key in state):
        value, into = state[key], stored.get(key) if is_low_precision(stored.get(key)) else None
        is_counted = check is not None and check.is_counting and into is not None
        before = (codecs.decoded(into).float(), value.clone()) if is_counted and into is not None else None
        rounded[key] = form.round(key, value, start, seed, into)
        if check is not None and before is not None:
            check.count(*before, rounded[key])
    return rounded


def seed_of_moment(seed: Seed, key: str) -> int:
    """Return 16 bits that differ for each step, parameter and moment."""
    return codecs.seed_of(*seed, MOMENTS.index(key))


def first_place(parameter: nn.Parameter) -> int:
    """Return the place of a shard in its parameter, so that random rounding is independent of sharding."""
    if parameter not in _first_places:
        offset = place_of_own_shard(parameter)[1] if isinstance(parameter, DTensor) else ()
        _first_places[parameter] = sum(map(operator.mul, offset, parameter.stride()))
    return int(_first_places[parameter])


def make_seeds(members: Sequence[rounds.Member], states: Sequence[rounds.State]) -> list[Seed]:
    """Return seeds for a step of members, from their step counts and numbers."""
    steps = [state.get("step", 0) for state in states]
    there = [place for place, step in enumerate(steps) if isinstance(step, Tensor) and step.device.type != "cpu"]
    if there and not any(isinstance(steps[place], FakeTensor) for place in there):  # one transfer from the device
        read = torch.stack([steps[place].float() for place in there]).tolist()
        for place, step in zip(there, read, strict=True):
            steps[place] = step
    counts = (0 if isinstance(step, FakeTensor) else int(step) for step in steps)
    return list(zip(counts, (member.number for member in members), strict=True))


def find_unsupported(
    name: str,
    way_out: str,
    form: StateForm,
    optimizers: Iterable[Optimizer],
    parameters: Container[object],
    *,
    is_late: bool,
) -> set[nn.Parameter]:
    """Return the trained parameters whose moments cannot have a form; refuse if all, unless ``is_late``."""
    trained: dict[nn.Parameter, str] = {}  # with the class of their optimizer
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if not form.fits(optimizer):
            raise ValueError(
                f"{name} is for the moments of {form.able}, got {kind}: use one of these, as torch.optim has it, or "
                f"{way_out}."
            )
        trained |= {p: kind for p in rounds.iterate_parameters(optimizer) if p.requires_grad and p in parameters}
    unheld = {parameter for parameter in trained if not form.holds(parameter)}
    if unheld and len(unheld) == len(trained) and not is_late:
        found, kinds = (" and ".join(sorted(set(one))) for one in (map(_describe, unheld), trained.values()))
        raise ValueError(
            f"{name} is for the moments of float32 weights, got {found} in {kinds}: use precision='bf16-mixed' or "
            f"'32-true', or {way_out}."
        )
    return unheld


def describe_unsupported(name: str, unheld: Container[object], module: nn.Module) -> str:
    """Name unsupported parameters of a module."""
    named = [f"{key} ({_describe(one)})" for key, one in module.named_parameters() if one in unheld]
    return f"{name} does not change the moments of parameters that are not dense float32: {', '.join(named)}."


def _describe(parameter: nn.Parameter) -> str:
    return str(parameter.dtype) if parameter.dtype != torch.float32 else f"strides {parameter.stride()}"


class HeldStates:
    """Holds back states while an optimizer loads them: ``torch.optim`` would cast all at once, as parameters are.

    ``names`` returns those to hold back of a parameter and its state.
    """

    def __init__(self, names: Callable[[nn.Parameter, rounds.State], Iterable[str]]) -> None:
        self._names = names
        self._states: dict[nn.Parameter, rounds.State] = {}

    def begin(self, optimizer: Optimizer, after_load: Callable[[Optimizer], None]) -> list[RemovableHandle]:
        """Do so until the returned handles are removed; ``after_load`` takes them in."""
        return [
            optimizer.register_load_state_dict_pre_hook(self.before_load),
            optimizer.register_load_state_dict_post_hook(after_load, prepend=True),
        ]

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a ``state_dict`` without them: a pre-hook of ``load_state_dict``."""
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        # load_state_dict compares the numbers
        parameters = dict(zip(saved, rounds.iterate_parameters(optimizer), strict=False))
        states, self._states = dict(state_dict["state"]), {}  # there may be some of a load that failed
        for key, state in states.items():
            parameter = parameters.get(key)
            if parameter is not None and isinstance(state, Mapping):
                names = set(self._names(parameter, dict(state))) & set(state)
                self._states[parameter] = {name: state[name] for name in state if name in names}
                # Scalars stay, too: an optimizer may look for them.
                left = {key: value for key, value in state.items() if not isinstance(value, Tensor) or not value.dim()}
                states[key] = left | {name: state[name] for name in state if name not in names}
        return {**state_dict, "state": states}

    def take(self) -> Iterable[tuple[nn.Parameter, rounds.State]]:
        """Return what was held back, and forget it."""
        states, self._states = self._states, {}
        return states.items()


class LowPrecisionStates:
    """Moments of one optimizer in a form, for the parameters that ``takes`` returns true for, now or later."""

    def __init__(
        self,
        optimizer: Optimizer,
        takes: Callable[[nn.Parameter], bool],
        form: StateForm,
        check: "UpdateCheck | None" = None,
    ) -> None:
        self.form, self.check = form, check or UpdateCheck()
        self._optimizer = optimizer
        self.has = takes  # whether the moments of a parameter have the form
        self._held = HeldStates(lambda parameter, state: MOMENTS if takes(parameter) else ())
        if optimizer in _upcasts:  # of an earlier run
            _upcasts.pop(optimizer).remove()

    def begin(self) -> list[RemovableHandle]:
        """Convert moments now and after loading, until the returned handles are removed."""
        self.take_in(self._optimizer)
        return self._held.begin(self._optimizer, self.take_in)

    def take_in(self, optimizer: Optimizer) -> None:
        """Convert the moments that the optimizer has or has loaded, one by one."""
        for parameter, moments in self._held.take():
            optimizer.state[parameter].update(moments)
        for parameter in filter(self.has, rounds.iterate_parameters(optimizer)):
            state = optimizer.state.get(parameter, {})
            self._convert(parameter, state, rounds.local_parts(parameter, state))

    def adopt(self, members: Sequence[rounds.Member]) -> None:
        """Convert moments that user code wrote to the states of members."""
        for member in members:
            if self.has(member.parameter):
                self._convert(member.parameter, member.state, member.local_state)

    def _convert(self, parameter: nn.Parameter, state: rounds.State, local_state: rounds.State) -> None:
        shard = stored_shard(parameter)
        for key in MOMENTS:
            value = local_state.get(key)
            if value is not None:
                rounds.check_state(self._optimizer, parameter, key, value)
                local_state[key] = self.form.convert(key, value, shard)
                if local_state[key] is not value:
                    state[key] = rounds.as_sharded(local_state[key], parameter, shard.shape)


def upcast_when_stepped(optimizer: Optimizer) -> None:
    """Upcast moments at the next step of the optimizer itself: there may be no memory for them before."""
    is_due = [True]

    def upcast_states(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, state in optimizer.state.items() if is_due else ():
            is_rounded = any(is_low_precision(local_shard(state.get(key))) for key in MOMENTS)
            if parameter.dtype == torch.float32 and is_rounded:
                state.update(state_stored_like(upcast_state(state), stored_shard(parameter)))
        is_due.clear()
        if next(reversed(step_pre_hooks(optimizer))) == handle.id:  # else removing it would disturb those after it
            handle.remove()

    handle = _upcasts[optimizer] = optimizer.register_step_pre_hook(upcast_states)


_ELEMENTWISE = tuple(kind for kind in rounds.STEPPABLE if kind not in rounds.WHOLE)


@dataclass(frozen=True)
class StateLayout:
    """The optimizer state of one parameter."""

    elementwise: tuple[tuple[str, torch.dtype], ...]  # names and dtypes of tensors with one number per weight
    form: StateForm | None = None  # of stored float32 moments; ``None``: unchanged

    def stored_bytes(self, count: int) -> list[int]:
        """Return the stored bytes of each elementwise tensor of so many weights."""
        return [
            dtype.itemsize * count if (form := self.form_of(key)) is None else form.num_bytes(count)
            for key, dtype in self.elementwise
        ]

    def form_of(self, key: str) -> StateForm | None:
        """Return the form of an elementwise tensor."""
        return self.form if key in MOMENTS else None

    def slot(self, key: str, dtype: torch.dtype, memory: Tensor, count: int) -> Tensor:
        """Return a flat elementwise tensor over its bytes (uint8)."""
        form = self.form_of(key)
        if form is None or form.bits == 16:
            return memory.view(dtype if form is None else torch.bfloat16)
        return codecs.low_bit_over(memory, count, bits=cast(codecs.Bits, form.bits), is_positive=key in DIVISORS)


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Whether a class steps each weight by itself, so that a parameter can be stepped in parts."""
    return rounds.steps_like(kind, _ELEMENTWISE)


def find_layout(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> StateLayout:
    """Return what an optimizer stores for a parameter after the first step; uses no random numbers."""
    kind = type(optimizer)
    if not is_elementwise(kind):
        able = ", ".join(known.__name__ for known in _ELEMENTWISE)
        raise ValueError(
            f"nvme_path cannot hold the optimizer state of {kind.__name__}: its step is not known to treat each weight "
            f"by itself; use one of torch.optim's {able}, or leave nvme_path out."
        )
    proxy = nn.Parameter(torch.zeros((2, 3), dtype=dtype, device="cpu"))  # nothing else in a state has this shape
    proxy.grad = torch.zeros_like(proxy)
    twin = rounds.make_twin(kind, vars(optimizer), [{**group, "params": [proxy]}], defaultdict(dict))
    if isinstance(optimizer, Adagrad):  # creates its state in __init__
        twin.state[proxy] = {"step": torch.zeros((), device="cpu"), "sum": torch.zeros_like(proxy)}
    with torch.no_grad():
        rounds.unhooked_step(kind)(twin)
    state: rounds.State = twin.state[proxy]
    tensors = ((key, value) for key, value in state.items() if isinstance(value, Tensor))
    elementwise = {key: value.dtype for key, value in tensors if value.shape == proxy.shape}
    return StateLayout(tuple(elementwise.items()))


class UpdateCheck:
    """Counts updates of weights or moments that rounding undoes; takes 8 bytes per number that is stepped at once."""

    def __init__(self, is_due: Callable[[], bool] = lambda: False) -> None:
        self._is_due = is_due
        self._counts: list[tuple[Tensor, Tensor]] | None = None

    def begin(self) -> None:
        """Begin a step, and forget earlier ones."""
        self._counts = [] if self._is_due() else None

    @property
    def is_counting(self) -> bool:
        """Whether this step is counted."""
        return self._counts is not None

    def count(self, before: Tensor, stepped: Tensor, saved: Tensor) -> None:
        """Count numbers that the step moved, and those among them stored unchanged. Overwrites ``stepped``."""
        assert self._counts is not None
        is_moved = stepped.ne_(before)
        is_lost = saved.eq(before).logical_and_(is_moved)
        self._counts.append((is_lost.sum(), is_moved.count_nonzero()))

    @property
    def share(self) -> Tensor | None:
        """Share of lost updates, a scalar from 0 to 1; ``None``: not counted."""
        if not self._counts:
            return None
        lost, moved = (sum(numbers[1:], numbers[0]) for numbers in zip(*self._counts, strict=True))
        share: Tensor = lost / moved.clamp(min=1)
        return share
