"""The step of stored weights and moments, some at a time: decode, step, encode.

The first of these that can does it: compiled code for AdamW on the host, which steps what is stored; the optimizer's
own step, as torch has it, on float32 copies.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW

from lightning_vram.core.host.memory import PART_ELEMENTS, SplitWeights, cut_parts
from lightning_vram.core.tensors.codecs import BLOCK_SIZE, LowBitTensor, draw_of
from lightning_vram.core.tensors.native_codecs import LANES, AdamWStep, is_codable, native_step
from lightning_vram.core.tensors.properties import flat_as_stored, stored_like
from lightning_vram.optimizers import moment_forms
from lightning_vram.optimizers import step_round as rounds
from lightning_vram.private_names.dispatcher import FakeTensor
from lightning_vram.private_names.fsdp2 import own_shard_of
from lightning_vram.techniques.sharding import FlatShard, fp32_part, low_precision_of, low_precision_part, upcast

ADAMW_STATE = ("step", "exp_avg", "exp_avg_sq")
_ON_DEVICE = 2**22  # weights in a part on the device: few kernels, 64 MiB


@dataclass(slots=True)
class Part:
    """Some weights of a parameter in a step, flat."""

    member: rounds.Member
    range: slice  # in the flat shard
    stored: rounds.State  # as stored: flat tensors, and copies of values per parameter; empty before the first step
    form: moment_forms.StateForm | None  # of stored moments
    seed: moment_forms.Seed = (0, 0)
    split: SplitWeights | None = None  # which has the weights
    split_range: tuple[int, int] = (0, 0)
    state: rounds.State = field(default_factory=dict)  # after the step, as it is to be stored

    @property
    def size(self) -> int:
        """The number of weights."""
        return int(self.range.stop - self.range.start)

    @property
    def place(self) -> int:
        """The place of the first weight in the unsharded parameter."""
        return moment_forms.first_place(self.member.parameter) + int(self.range.start)

    def read(self) -> Tensor:
        """Return float32 weights, to be changed in place and given to :meth:`write`; the end may be padding."""
        if self.split is not None:
            return self.split.read(self.split_range)
        return flat_as_stored(self.member.shard)[self.range]

    def write(self, weights: Tensor) -> None:
        """Store stepped weights."""
        if self.split is not None:
            self.split.write(self.split_range, weights)


@torch.no_grad()
def step_parts(
    step_round: rounds.StepRound, parts: Sequence[Part], check: moment_forms.UpdateCheck | None = None
) -> None:
    """Step parts; ``check`` counts lost updates."""
    is_counting = check is not None and check.is_counting  # needs float32 moments
    left = [part for part in parts if is_counting or not _step_natively(step_round, part)]
    weights = [part.read() for part in left]
    proxies = [rounds.make_proxy(one[: part.size], cut_gradient(part)) for one, part in zip(weights, left, strict=True)]
    for part in left:
        part.state = dict(part.stored) if part.form is None else moment_forms.upcast_state(part.stored)
    if left:
        step_round.step_proxies([part.member.group for part in left], proxies, [part.state for part in left])
    for part, stepped in zip(left, weights, strict=True):
        part.write(stepped)
        if part.form is not None:
            part.state = moment_forms.round_state(part.form, part.state, part.place, part.seed, part.stored, check)


def _step_natively(step_round: rounds.StepRound, part: Part) -> bool:
    """Step a part as it is stored, if compiled code can."""
    native = native_step(3 * part.size)
    step = None if native is None else _adamw_step(step_round, part)
    if native is None or step is None or not part.size or part.size % LANES:
        return False
    moments = [part.stored[key] for key in ADAMW_STATE[1:]]
    memories = [moment.records if isinstance(moment, LowBitTensor) else moment for moment in moments]
    bits, is_whole = bits_of(moments[0]), all(map(_is_codable_moment, moments))
    first, second = (draw_of(part.place, moment_forms.seed_of_moment(part.seed, key)) for key in ADAMW_STATE[1:])
    if part.split is None:
        weights, gradient = part.read(), cut_gradient(part)
        if not is_whole or gradient.dtype != torch.float32 or not is_codable(weights, gradient, *memories):
            return False
        native.step_adamw(step, (weights, gradient, *memories), bits, (first, second))
    else:
        upper, lower, odd = part.split.pieces(part.split_range)
        # The gradient may be bf16, with a factor.
        gradient, factor = low_precision_part(part.member.own_gradient, part.range) or (cut_gradient(part), 1.0)
        tensors = upper, lower, gradient, *memories
        is_whole = is_whole or all(type(one) is Tensor and one.dtype == torch.float32 for one in moments)
        is_whole = is_whole and odd[0] is not None and gradient.numel() == upper.numel()
        if not is_whole or gradient.dtype not in {torch.float32, torch.bfloat16} or not is_codable(*tensors):
            return False
        found = native.step_split(step, tensors, bits, (first, second), factor=factor, odd=odd)
        part.split.note_odd(part.split_range, *found)
    part.state = {"step": part.stored["step"] + 1}
    return True


def _adamw_step(step_round: rounds.StepRound, part: Part) -> AdamWStep | None:
    """Return the step of a part if it is one of fused AdamW on the host, but not the first; ``None``: another rule."""
    step, optimizer = part.stored.get("step"), step_round.optimizer
    if set(part.stored) != set(ADAMW_STATE) or type(step) is not Tensor or step.device.type != "cpu":
        return None
    settings = step_round.settings_of(part.member.group)
    is_fused = settings.get("fused") and not settings.get("maximize") and rounds.is_ruled(optimizer, settings)
    if not is_fused or not rounds.steps_like(type(optimizer), (Adam, AdamW)):
        return None
    numbers = settings["lr"], *settings["betas"], settings["eps"], settings["weight_decay"]
    lr, first, second, eps, decay = map(float, numbers)
    if 1 - first >= 0.5 or (decay and not settings.get("decoupled_weight_decay")):  # use other formulas
        return None
    return AdamWStep(int(step) + 1, lr, (first, second), eps, decay)


def _is_codable_moment(moment: Tensor) -> bool:
    if isinstance(moment, LowBitTensor):
        return type(moment) is LowBitTensor and moment.block_size == BLOCK_SIZE
    return moment.dtype == torch.bfloat16


def bits_of(moment: Any) -> int:
    """Return the bits of a number of a moment."""
    return int(moment.bits) if isinstance(moment, LowBitTensor) else 8 * int(moment.itemsize)


def cut_gradient(part: Part) -> Tensor:
    """Return the gradient of a part, float32."""
    member = part.member
    if member.own_gradient is not None and low_precision_of(member.own_gradient) is not None:
        return fp32_part(member.own_gradient, part.range)
    return flat_as_stored(stored_like(member.gradient, member.shard))[part.range]


def _cut(
    step_round: rounds.StepRound,
    states: moment_forms.LowPrecisionStates | None,
    member: rounds.Member,
    seed: moment_forms.Seed,
    split: SplitWeights | None,
    place: int,
) -> Iterator[Part]:
    """Cut a parameter. Compiled code steps it as one part, except for the end, which torch rounds differently."""
    shard, numel = member.shard, member.shard.numel()
    form = states.form if states is not None and states.has(member.parameter) else None
    first = 0 if split is None else split.parts[place][0][0]

    def make(part: tuple[int, int]) -> Part:
        start = part[0] - first
        found = slice(start, max(min(part[1] - first, numel), start))  # the end of a shard may be padding of FSDP2
        stored = {key: _cut_state(value, shard, found) for key, value in member.local_state.items()}
        return Part(member, found, stored, form, seed, split, part)

    if split is not None:
        parts = split.parts[place]
    else:
        most = numel - numel % BLOCK_SIZE if numel % LANES else numel
        can_step = most and native_step(0) is not None and (states is None or not states.check.is_counting)
        if can_step and _adamw_step(step_round, whole := make((0, most))) is not None:
            yield whole
            parts = [(most, numel)] if most < numel else []
        else:
            parts = list(cut_parts(0, numel, _most_elements(member)))
    yield from map(make, parts[:1] if isinstance(shard, FakeTensor) else parts)  # of an estimate: no part needs more


def _most_elements(member: rounds.Member) -> int:
    return PART_ELEMENTS if member.shard.device.type == "cpu" else _ON_DEVICE


def _cut_state(value: Any, shard: Tensor, part: slice) -> Any:
    """Return a part of a tensor with one number per weight; a copy of another value."""
    if not isinstance(value, Tensor):
        return value
    if value.shape != shard.shape:
        return value.clone()
    return value.cut(part.start, part.stop) if isinstance(value, LowBitTensor) else flat_as_stored(value)[part]


def _save(part: Part, fresh: rounds.State) -> None:
    """Store the stepped states of a part; ``fresh``: new ones of its parameter, to be published after all parts."""
    shard = part.member.shard
    for key, value in part.state.items():
        if not isinstance(value, Tensor) or value.shape != (part.size,):
            fresh[key] = value
        elif value is not part.stored.get(key):  # otherwise written in place
            whole = fresh.get(key, part.member.local_state.get(key))
            if not isinstance(whole, Tensor) or whole.shape != shard.shape:
                if part.form is not None and key in moment_forms.MOMENTS:
                    whole = part.form.empty(key, shard)
                else:
                    whole = torch.empty_like(shard, dtype=value.dtype, device=value.device, requires_grad=False)
                fresh[key] = whole
            _cut_state(whole, shard, part.range).copy_(value)


def step_in_parts(
    step_round: rounds.StepRound, states: moment_forms.LowPrecisionStates, members: Sequence[rounds.Member]
) -> None:
    """Step members with low-precision moments, some parts at a time."""
    for device in dict.fromkeys(member.shard.device for member in members):
        _step_all(step_round, states, [(one, None, 0) for one in members if one.shard.device == device])


def _batches(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """Yield parts to be stepped at once: one large one, or many small ones."""
    batch: list[Part] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += part.size
        if size >= _most_elements(part.member):
            yield batch
            batch, size = [], 0
    yield batch


@torch.no_grad()
def _step_all(
    step_round: rounds.StepRound,
    states: moment_forms.LowPrecisionStates | None,
    targets: Sequence[tuple[rounds.Member, SplitWeights | None, int]],
) -> None:
    """Step members, with split weights, if there are any, and their place there."""
    given, splits, places = zip(*targets, strict=True)
    is_wide = [low_precision_of(one.own_gradient) is None for one in given]
    members: list[rounds.Member] = [
        replace(one, gradient=stored_like(one.gradient, one.shard)) if wide else one
        for one, wide in zip(given, is_wide, strict=True)
    ]
    step_round.scale(members)
    seeds = moment_forms.make_seeds(members, [member.local_state for member in members])
    fresh: dict[rounds.Member, rounds.State] = {member: {} for member in members}
    cuts = map(partial(_cut, step_round, states), members, seeds, splits, places)
    for batch in _batches(chain.from_iterable(cuts)):
        step_parts(step_round, batch, None if states is None else states.check)
        for part in batch:
            _save(part, fresh[part.member])
    for member, state in fresh.items():
        rounds.publish_state(member, state)


def step_flat_shards(
    step_round: rounds.StepRound,
    states: moment_forms.LowPrecisionStates | None,
    flat_shards: Sequence[FlatShard],
    members: Sequence[rounds.Member],
    *,
    is_whole: bool,
) -> list[rounds.Member]:
    """Step members that can be stepped in parts (none if ``is_whole``); join the shards of the rest, and return it."""
    left: list[rounds.Member] = []
    for flat_shard in flat_shards:
        places = {parameter.sharded_param: place for place, parameter in enumerate(flat_shard.parameters)}
        ours = [member for member in members if member.parameter in places]
        if not ours:
            continue
        values = (value for one in ours for value in one.local_state.values() if isinstance(value, Tensor))
        can_part = moment_forms.is_elementwise(type(step_round.optimizer)) and all(t.is_contiguous() for t in values)
        if flat_shard.shards is None and not is_whole and can_part:
            _step_all(step_round, states, [(one, flat_shard.split, places[one.parameter]) for one in ours])
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
