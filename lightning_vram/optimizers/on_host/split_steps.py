"""Step split weights, and weights with low-precision moments, in parts: few of them are float32 at a time.

Where compiled code can do it, AdamW steps the stored numbers themselves.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_vram.core.gradients import apply_clip_factor
from lightning_vram.core.host.memory import PART_ELEMENTS, Part, SplitWeights, cut_parts
from lightning_vram.core.tensors.codecs import BLOCK_SIZE, LowBitTensor, draw_of
from lightning_vram.core.tensors.native_codecs import LANES, AdamWStep, native_codecs
from lightning_vram.core.tensors.properties import flat_as_stored, state_stored_like, stored_like
from lightning_vram.optimizers.moment_forms import (
    MOMENTS,
    Seed,
    StateForm,
    UpdateCheck,
    first_place,
    is_elementwise,
    is_low_precision,
    make_seeds,
    round_state,
    seed_of,
    upcast_moment,
    upcast_state,
)
from lightning_vram.optimizers.step_round import (
    Member,
    State,
    StepRound,
    as_sharded,
    check_state,
    iterate_parameters,
    local_parts,
    make_proxy,
    publish_state,
    steps_like,
)
from lightning_vram.private_names.dispatcher import FakeTensor
from lightning_vram.private_names.fsdp2 import local_shard, own_shard_of
from lightning_vram.techniques.sharding import (
    FlatShard,
    fp32_part,
    low_precision_of,
    low_precision_part,
    scale_low_precision,
    upcast,
)

_STATE = {"step", "exp_avg", "exp_avg_sq"}
_OTHERS = ("amsgrad", "maximize", "differentiable")  # unsupported settings
_ON_DEVICE = 2**22  # weights in a part on the device: few kernels, 64 MiB
_to_upcast: "WeakKeyDictionary[Optimizer, RemovableHandle]" = WeakKeyDictionary()


def read_adamw_step(step_round: StepRound, member: Member) -> AdamWStep | None:
    """Return the step of a member if it is one of fused AdamW on the host, but not the first."""
    optimizer, state = step_round.optimizer, member.local_state
    step = state.get("step")
    if set(state) != _STATE or not isinstance(step, Tensor) or type(step) is not Tensor or step.device.type != "cpu":
        return None
    settings = step_round.settings_of(member.group)
    is_other = not settings.get("fused") or any(settings.get(name) for name in _OTHERS)
    is_scaled = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
    if is_other or is_scaled or not steps_like(type(optimizer), (Adam, AdamW)):
        return None
    numbers = settings["lr"], *settings["betas"], settings["eps"], settings["weight_decay"]
    if any(isinstance(number, Tensor) and number.device.type != "cpu" for number in numbers):
        return None
    lr, first, second, eps, decay = map(float, numbers)
    if 1 - first >= 0.5 or (decay and not settings.get("decoupled_weight_decay")):  # use other formulas
        return None
    return AdamWStep(int(step) + 1, lr, (first, second), eps, decay)


def step_stored(step: AdamWStep, weights: Tensor, gradient: Tensor, state: State, draws: tuple[int, int]) -> bool:
    """Step flat fp32 weights with stored moments by compiled code, if it can; return whether they are stepped.

    ``draws``: random draws for the first place of both moments.
    """
    moments = state["exp_avg"], state["exp_avg_sq"]
    if weights.numel() % LANES or gradient.dtype != torch.float32 or not all(map(is_low_precision, moments)):
        return False
    tensors = weights, gradient, *map(_stored, moments)
    native = native_codecs(*tensors)
    if native is None or not native.has_step:
        return False
    native.step_adamw(step, tensors, _bits_of(moments[0]), draws)
    return True


def step_split(
    step: AdamWStep,
    split: SplitWeights,
    part: Part,
    gradient: tuple[Tensor, float],
    state: State,
    draws: tuple[int, int],
) -> bool:
    """Step a part of split weights likewise; the gradient may be bf16, with a factor."""
    upper, lower, (places, halves) = split.pieces(part)
    moments, (numbers, factor) = (state["exp_avg"], state["exp_avg_sq"]), gradient
    is_known = all(is_low_precision(one) or one.dtype == torch.float32 for one in moments)
    is_known = is_known and numbers.dtype in {torch.float32, torch.bfloat16}
    if places is None or not is_known or upper.numel() % LANES or numbers.numel() != upper.numel():
        return False
    tensors = upper, lower, numbers, *map(_stored, moments)
    native = native_codecs(*tensors)
    if native is None or not native.has_step:
        return False
    found = native.step_split(step, tensors, _bits_of(moments[0]), draws, factor=factor, odd=(places, halves))
    split.note_odd(part, *found)
    return True


def _stored(moment: Tensor) -> Tensor:
    return moment.records if isinstance(moment, LowBitTensor) else moment


def _bits_of(moment: Any) -> int:
    return int(moment.bits) if isinstance(moment, LowBitTensor) else 8 * int(moment.itemsize)


class LowPrecisionStates:
    """Moments of one optimizer in a form, for the parameters that ``takes`` returns true for, now or later."""

    def __init__(
        self,
        optimizer: Optimizer,
        takes: Callable[[nn.Parameter], bool],
        form: StateForm,
        check: UpdateCheck | None = None,
    ) -> None:
        self.form, self._check = form, check
        self._optimizer = optimizer
        self.has = takes  # whether the moments of a parameter have the form
        self._loading: dict[nn.Parameter, State] = {}
        handle = _to_upcast.pop(optimizer, None)
        if handle is not None:  # of an earlier run
            handle.remove()

    @property
    def is_counting(self) -> bool:
        """Whether lost updates are counted in this step."""
        return self._check is not None and self._check.is_counting

    def rounded(self, state: State, start: int, seed: Seed, stored: State) -> State:
        """Round the state of a part of a parameter, and count lost updates of existing moments."""
        if self._check is None or not self._check.is_counting:
            return round_state(self.form, state, start, seed, stored)
        keys = [key for key in MOMENTS if is_low_precision(stored.get(key))]
        before, stepped = [upcast_moment(stored[key]) for key in keys], [state[key].clone() for key in keys]
        rounded = round_state(self.form, state, start, seed, stored)
        for key, old, new in zip(keys, before, stepped, strict=True):
            self._check.count(old, new, rounded[key])
        return rounded

    def take_in(self, optimizer: Optimizer) -> None:
        """Convert the moments that the optimizer has or has loaded, one by one."""
        loading, self._loading = self._loading, {}
        for parameter, moments in loading.items():
            optimizer.state[parameter].update(moments)
        for parameter in filter(self.has, iterate_parameters(optimizer)):
            state = optimizer.state.get(parameter, {})
            self._convert(parameter, state, local_parts(parameter, state))

    def adopt(self, members: Sequence[Member]) -> None:
        """Convert moments that user code wrote to the states of members."""
        for member in members:
            if self.has(member.parameter):
                self._convert(member.parameter, member.state, member.local_state)

    def _convert(self, parameter: nn.Parameter, state: State, local_state: State) -> None:
        shard = local_shard(parameter)
        for key in MOMENTS:
            value = local_state.get(key)
            if value is not None:
                check_state(self._optimizer, parameter, key, value)
                local_state[key] = self.form.convert(key, value, shard)
                if local_state[key] is not value:
                    state[key] = as_sharded(local_state[key], parameter, shard.shape)

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Hold back moments while loading: ``torch.optim`` would upcast all of them at once."""
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        # load_state_dict compares the numbers
        parameters = dict(zip(saved, iterate_parameters(optimizer), strict=False))
        states = dict(state_dict["state"])
        for key, state in states.items():
            parameter = parameters.get(key)
            if parameter is not None and self.has(parameter) and isinstance(state, Mapping):
                self._loading[parameter] = {name: state[name] for name in MOMENTS if name in state}
                states[key] = {name: value for name, value in state.items() if name not in MOMENTS}
        return {**state_dict, "state": states}


def upcast_when_stepped(optimizer: Optimizer) -> None:
    """Upcast moments at the next step of the optimizer itself: there may be no memory for them before."""

    def upcast_states(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        _to_upcast.pop(optimizer).remove()
        for parameter, state in optimizer.state.items():
            is_rounded = any(is_low_precision(local_shard(state.get(key))) for key in MOMENTS)
            if parameter.dtype == torch.float32 and is_rounded:
                state.update(state_stored_like(upcast_state(state), local_shard(parameter)))

    _to_upcast[optimizer] = optimizer.register_step_pre_hook(upcast_states)


def step_in_parts(step_round: StepRound, states: LowPrecisionStates, members: Sequence[Member]) -> None:
    """Step members with low-precision moments, some parts at a time."""
    _step_parts(step_round, [_Stepping(member, states) for member in members])


def step_flat_shards(
    step_round: StepRound,
    low_precision: LowPrecisionStates | None,
    flat_shards: Sequence[FlatShard],
    members: Sequence[Member],
    *,
    is_whole: bool,
) -> list[Member]:
    """Step members that can be stepped in parts (none if ``is_whole``); join the shards of the rest, and return it."""
    if not any(flat_shard.is_split for flat_shard in flat_shards):
        return list(members)
    left: list[Member] = []
    for flat_shard in flat_shards:
        places = {parameter.sharded_param: place for place, parameter in enumerate(flat_shard.parameters)}
        ours = [member for member in members if member.parameter in places]
        if not ours:
            continue
        states = (value for one in ours for value in one.local_state.values() if isinstance(value, Tensor))
        can_part = is_elementwise(type(step_round.optimizer)) and all(value.is_contiguous() for value in states)
        if flat_shard.shards is None and not is_whole and can_part:
            assert flat_shard.split is not None
            split = flat_shard.split
            _step_parts(step_round, [_Stepping(one, low_precision, split, places[one.parameter]) for one in ours])
        else:
            flat_shard.open()
            for member in ours:
                assert member.own_gradient is not None
                if not is_whole:
                    upcast(member.own_gradient)
                # The tensors of now: some may have been empty before.
                shard, gradient = own_shard_of(member.parameter), own_shard_of(member.own_gradient)
                left.append(replace(member, shard=shard, gradient=gradient))
    return left


def scale_gradients(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply sharded gradients by a scalar, in place; 16-bit ones when they are read."""
    for gradient in gradients:
        if low_precision_of(gradient) is not None:
            scale_low_precision(gradient, factor)
    apply_clip_factor([local_shard(gradient) for gradient in gradients if low_precision_of(gradient) is None], factor)


def cut_gradient(member: Member, part: slice) -> Tensor:
    """Return a flat part of a gradient."""
    if member.own_gradient is not None and low_precision_of(member.own_gradient) is not None:
        return fp32_part(member.own_gradient, part)
    return flat_as_stored(stored_like(member.gradient, member.shard))[part]


def scale_members(step_round: StepRound, members: Sequence[Member]) -> None:
    """Multiply gradients by the factor of the step, if any; 16-bit ones when they are read."""
    if step_round.factor is None:
        return
    for member in members:
        if member.own_gradient is not None and low_precision_of(member.own_gradient) is not None:
            scale_low_precision(member.own_gradient, step_round.factor)
    step_round.scale([member for member in members if low_precision_of(member.own_gradient) is None])


class _Scratch:
    """Float32 memory on one device, reused by batches: new pages of the host take as long as a step."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._blocks: list[Tensor] = []
        self._next = 0

    def take(self, count: int) -> Tensor:
        place, self._next = self._next, self._next + 1
        if place == len(self._blocks):
            self._blocks.append(self._like.new_empty(count, dtype=torch.float32))
        elif self._blocks[place].numel() < count:
            self._blocks[place] = self._like.new_empty(count, dtype=torch.float32)
        return self._blocks[place][:count]

    def reuse(self) -> None:
        self._next = 0


class _Stepping:
    """A parameter that is stepped in parts."""

    def __init__(
        self, member: Member, states: LowPrecisionStates | None, split: SplitWeights | None = None, place: int = 0
    ) -> None:
        if low_precision_of(member.own_gradient) is None:
            member = replace(member, gradient=stored_like(member.gradient, member.shard))
        self.member, self.split = member, split
        self.low_precision = states if states is not None and states.has(member.parameter) else None
        numel = member.shard.numel()
        self.part_elements = PART_ELEMENTS if member.shard.device.type == "cpu" else _ON_DEVICE
        parts = list(cut_parts(0, numel, self.part_elements)) if split is None else split.parts[place]
        self.parts = parts[:1] if isinstance(member.shard, FakeTensor) else parts  # of an estimate: no part needs more
        self.seed: Seed = 0, 0  # of stochastic rounding
        self.step: AdamWStep | None = None  # if compiled code can do it
        self.fresh: State = {}  # new states, to be published after all parts

    def step_most(self) -> list[Part]:
        """Step stored tensors by compiled code, as one part; return the parts that are left."""
        numel = self.member.shard.numel()
        most = numel - numel % BLOCK_SIZE if numel % LANES else numel
        if self.split is None and _Part(self, (0, most)).step_stored():
            return list(cut_parts(most, numel)) if most < numel else []
        return self.parts

    def read(self, part: Part) -> Tensor:
        """Return float32 weights, to be written to."""
        return flat_as_stored(self.member.shard)[slice(*part)] if self.split is None else self.split.read(part)

    def write(self, part: Part, numbers: Tensor) -> None:
        if self.split is not None:
            self.split.write(part, numbers)

    def state_of(self, part: slice) -> State:
        """Return views of the stored states of some weights; values per parameter are copied."""
        return {
            key: self._cut(key, value, part) if self._is_elementwise(value) else _copy(value)
            for key, value in self.member.local_state.items()
        }

    def rounded(self, state: State, part: slice, stored: State) -> State:
        """Round stepped states of some weights into those of ``stored``."""
        if self.low_precision is None:
            return state
        return self.low_precision.rounded(state, self.place_of(part), self.seed, stored)

    def place_of(self, part: slice) -> int:
        """Return the place of a part in the unsharded parameter."""
        return first_place(self.member.parameter) + int(part.start)

    def save(self, key: str, value: Any, part: slice, size: int) -> None:
        """Store a stepped state of some weights."""
        if not isinstance(value, Tensor) or value.shape != (size,):
            self.fresh[key] = value
            return
        whole = self.fresh.get(key, self.member.local_state.get(key))
        if not self._is_elementwise(whole):
            whole = self._make(key, value)
            self.fresh[key] = whole
        assert isinstance(whole, Tensor)
        self._cut(key, whole, part).copy_(value)

    def _make(self, key: str, value: Tensor) -> Tensor:
        if self.low_precision is not None and key in MOMENTS:
            return self.low_precision.form.empty(key, self.member.shard)
        return torch.empty_like(self.member.shard, dtype=value.dtype, device=value.device, requires_grad=False)

    def _cut(self, key: str, value: Tensor, part: slice) -> Tensor:
        if self.low_precision is not None and key in MOMENTS:
            return self.low_precision.form.cut(value, part.start, part.stop)
        return flat_as_stored(value)[part]

    def _is_elementwise(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape == self.member.shard.shape


class _Part:
    """Some weights of a parameter."""

    def __init__(self, whole: _Stepping, part: Part) -> None:
        self._whole, self._part = whole, part
        first, numel = whole.parts[0][0], whole.member.shard.numel()
        # The end of a shard may be padding of FSDP2.
        self._range = slice(part[0] - first, max(min(part[1] - first, numel), part[0] - first))
        self.size = self._range.stop - self._range.start
        self._before = whole.state_of(self._range)
        self.group = whole.member.group

    def step_stored(self) -> bool:
        """Step stored weights and moments by compiled code, if possible."""
        whole, split, part = self._whole, self._whole.split, self._range
        is_counting = whole.low_precision is not None and whole.low_precision.is_counting  # needs float32 moments
        if whole.step is None or not self.size or is_counting:
            return False
        place = whole.place_of(part)
        draws = tuple(draw_of(place, seed_of(whole.seed, key)) for key in ("exp_avg", "exp_avg_sq"))
        if split is None:
            gradient = cut_gradient(whole.member, part)
            is_done = step_stored(whole.step, whole.read(self._part), gradient, self._before, draws)
        else:
            scaled = low_precision_part(whole.member.own_gradient, part) or (cut_gradient(whole.member, part), 1.0)
            is_done = step_split(whole.step, split, self._part, scaled, self._before, draws)
        if is_done:
            whole.fresh["step"] = whole.member.local_state["step"] + 1
        return is_done

    def upcast(self, take: Callable[[int], Tensor]) -> None:
        """Create the proxy and float32 state, in memory of ``take``."""
        self._numbers = self._whole.read(self._part)
        self.proxy = make_proxy(self._numbers[: self.size], cut_gradient(self._whole.member, self._range))
        self.state = dict(self._before) if self._whole.low_precision is None else upcast_state(self._before, take)

    def save(self) -> None:
        self._whole.write(self._part, self._numbers)
        for key, value in self._whole.rounded(self.state, self._range, self._before).items():
            is_view = isinstance(value, Tensor) and value.shape == (self.size,) and value is self._before.get(key)
            if not is_view:  # otherwise written in place
                self._whole.save(key, value, self._range, self.size)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@torch.no_grad()
def _step_parts(step_round: StepRound, all_stepping: Sequence[_Stepping]) -> None:
    scale_members(step_round, [stepping.member for stepping in all_stepping])
    seeded = [stepping for stepping in all_stepping if stepping.low_precision is not None]
    members = [stepping.member for stepping in seeded]
    for stepping, seed in zip(seeded, make_seeds(members, [one.local_state for one in members]), strict=True):
        stepping.seed = seed
    if not all_stepping:
        return
    batch, scratch = list[_Part](), _Scratch(all_stepping[0].member.shard)
    for stepping in all_stepping:
        stepping.step = read_adamw_step(step_round, stepping.member)
        for part in stepping.step_most():
            one = _Part(stepping, part)
            if one.step_stored():
                continue
            one.upcast(scratch.take)
            batch.append(one)
            if sum(one.size for one in batch) >= stepping.part_elements:
                _step_batch(step_round, batch)
                batch.clear()
                scratch.reuse()
    _step_batch(step_round, batch)
    for stepping in all_stepping:
        publish_state(stepping.member, stepping.fresh)


def _step_batch(step_round: StepRound, batch: Sequence[_Part]) -> None:
    if batch:
        groups, proxies = [one.group for one in batch], [one.proxy for one in batch]
        step_round.step_proxies(groups, proxies, [one.state for one in batch])
    for one in batch:
        one.save()
