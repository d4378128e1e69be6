"""Optimizers that step bf16 weights in fp32, chunk by chunk; they stay the same objects.

Also: frozen bf16 weights that are written in every step, and loading states as fp32.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_vram.core.tensors.codecs import rounded_by_place, seed_of
from lightning_vram.core.tensors.properties import count, count_writes, flat_as_stored, stop_counting
from lightning_vram.memory.tracking.ledger import forget_optimizer_tensors, register_optimizer_tensors
from lightning_vram.optimizers.bf16_chunks import WeightChunk, list_rests, upcast_flat, views_like
from lightning_vram.optimizers.moment_forms import (
    HeldStates,
    Seed,
    UpdateCheck,
    convert_states,
    full_sized,
    refill_accumulators,
)
from lightning_vram.optimizers.step_round import (
    Member,
    State,
    StepRound,
    iterate_parameters,
    make_proxy,
    publish_state,
    why_not_steppable,
)
from lightning_vram.optimizers.take_over import StepTakeOver
from lightning_vram.private_names.dispatcher import copy_each

_NUM_WRITES = 3
_NUM_LOOKS = 8


class FrozenWrites:
    """Refuses frozen bf16 parameters that user code moves a little at every step, as momentum encoders do.

    bf16 loses such updates. Rare writes (loading, copying) are allowed. ``names`` are for messages.
    """

    def __init__(self, names: Mapping[str, nn.Parameter]) -> None:
        self._names = names
        self._num_looks = 0
        self._seen: dict[nn.Parameter, int] = {}
        self._writes: dict[nn.Parameter, deque[int]] = {}

    def look(self, parameters: Iterable[nn.Parameter]) -> None:
        """Check frozen parameters before a step: three writes in eight steps, after the first, are refused."""
        self._num_looks += 1
        for parameter in parameters:
            count(parameter)
            mark, known = count_writes(parameter), self._seen.get(parameter)
            if mark == known:
                continue
            self._seen[parameter] = mark
            if known is not None:
                self._note_write(parameter)

    def pass_over(self, parameters: Iterable[nn.Parameter]) -> None:
        """Ignore what was written to parameters since the last step."""
        self._seen |= {parameter: count_writes(parameter) for parameter in parameters if parameter in self._seen}

    def stop(self) -> None:
        """Stop counting writes."""
        for parameter in self._seen:
            stop_counting(parameter)

    def _note_write(self, parameter: nn.Parameter) -> None:
        writes = self._writes.setdefault(parameter, deque(maxlen=_NUM_WRITES))
        writes.append(self._num_looks)
        if len(writes) == _NUM_WRITES and writes[-1] - writes[0] < _NUM_LOOKS:
            names = [name for name, known in self._names.items() if known is parameter]
            raise RuntimeError(
                f"The frozen parameter {names[0] if names else f'of shape {tuple(parameter.shape)}'} is written at "
                "almost every step, and bfloat16 loses small changes: name its module in fp32_modules=[...]."
            )


class LeanOptimizers(StepTakeOver):
    """All attached optimizers. ``names`` are for messages."""

    def __init__(self, chunks: Iterable[WeightChunk], scheme: str, names: Mapping[str, nn.Parameter]) -> None:
        self.num_steps = 0
        self.check: UpdateCheck | None = None
        self._chunks = list(chunks)
        self._places = {parameter: chunk for chunk in self._chunks for parameter in chunk.parameters}
        self._has_bf16_states = scheme in ("bf16+kahan", "bf16+stochastic")
        self._names = names
        self._has_stepped: set[int] = set()  # optimizers, by id, since frozen parameters were looked at
        self.frozen_writes = FrozenWrites(names)
        self._hold_loaded()
        super().__init__()

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Step more optimizers in chunks; refuse all if one with bf16 weights cannot."""
        fresh = [optimizer for optimizer in optimizers if not self._is_taken(optimizer)]
        objections = {optimizer: why_not_steppable(optimizer) for optimizer in fresh}
        for optimizer, objection in objections.items():
            if objection and self._has_ours(optimizer):
                raise ValueError(objection)
        for optimizer in (one for one, objection in objections.items() if objection is None):
            refill_accumulators(optimizer, self._places)
            self._convert_states(optimizer)
            self._take_over(optimizer)
            self._handles += [
                optimizer.register_load_state_dict_pre_hook(self._held.before_load),
                optimizer.register_load_state_dict_post_hook(self._after_load),
            ]
            register_optimizer_tensors(optimizer, partial(list_rests, self._chunks))  # self would keep it alive

    def remove_patches(self) -> None:
        """Remove the patches, before parameters are restored."""
        super().remove_patches()
        self.frozen_writes.stop()

    def let_go(self) -> None:
        """Convert states to the dtype of the restored parameters, and forget everything."""
        for optimizer in self._taken:
            forget_optimizer_tensors(optimizer)
            convert_states(optimizer, self._places, None, None)
        self._taken, self._chunks, self._places = [], [], {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy is attached to no optimizer.
        left_out = ("check", "_patches", "_taken", "_handles", "_held", "frozen_writes")
        return {key: value for key, value in vars(self).items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, check=None)
        self.frozen_writes = FrozenWrites(self._names)
        self._hold_loaded()
        super().__init__()

    def _hold_loaded(self) -> None:
        self._held = HeldStates(lambda parameter, state: set(state) - {"step"} if parameter in self._places else ())

    def _has_ours(self, optimizer: Optimizer) -> bool:
        return any(parameter in self._places for parameter in iterate_parameters(optimizer))

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = self._run_closure(optimizer, closure)
        if id(optimizer) in self._has_stepped or not self._has_stepped:  # once per round of all optimizers
            self._has_stepped.clear()
            self.frozen_writes.look(p for chunk in self._chunks if chunk.is_resting for p in chunk.parameters)
        self._has_stepped.add(id(optimizer))
        self.num_steps += 1
        if self.check is not None:
            self.check.begin()
        step_round = StepRound(optimizer, is_on_host=False)
        by_chunk: dict[WeightChunk | None, list[Member]] = {}
        for member in step_round.take_rest():
            by_chunk.setdefault(self._places.get(member.parameter), []).append(member)
        for chunk, members in by_chunk.items():
            # A call per chunk frees all of it before the next one.
            if chunk is None:
                step_round.run(members)
            else:
                self._step_chunk(step_round, chunk, members)
        return loss

    @torch.no_grad()
    def _step_chunk(self, step_round: StepRound, chunk: WeightChunk, members: Sequence[Member]) -> None:
        exact, check = chunk.read_for_step(), self.check
        before = check.note(exact) if check is not None else None
        states = [dict(member.local_state) for member in members]
        shaped = [(member.shard.shape, state) for member, state in zip(members, states, strict=True)]
        upcast = UpcastStates(shaped) if self._has_bf16_states else None
        try:
            groups = [member.group for member in members]
            step_round.step_proxies(groups, _make_proxies(chunk, exact, members), states)
        finally:
            seed = self.num_steps, chunk.number
            if upcast is not None:
                upcast.round(shaped, seed)
            for member, state in zip(members, states, strict=True):
                publish_state(member, state)
            stepped = check.note(exact) if check is not None else None
            # As in fp32, a step that fails half-way leaves what it has done.
            chunk.write(exact, seed_of(*seed, 0), {member.parameter for member in members})
        if check is not None and before is not None and stepped is not None:
            check.count(before, stepped, chunk.read())

    def _after_load(self, optimizer: Optimizer) -> None:
        for parameter, state in self._held.take():
            own: State = optimizer.state[parameter]
            own.update(
                {
                    key: value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
                    for key, value in state.items()
                }
            )
        self._convert_states(optimizer)

    def _convert_states(self, optimizer: Optimizer) -> None:
        full_dtype = torch.bfloat16 if self._has_bf16_states else torch.float32
        convert_states(optimizer, self._places, torch.float32, full_dtype)


class UpcastStates:
    """Replaces elementwise bf16 states by fp32 ones, in place, until :meth:`round`.

    Rounding to nearest would lose what a decay of .999 moves: less than half a unit of bf16 per step.
    """

    def __init__(self, states: Iterable[tuple[torch.Size, State]]) -> None:
        slots = [(state, key) for shape, state in states for key in full_sized(shape, state)]
        self._bf16 = [state[key] for state, key in slots]
        self._flat, self._fp32 = upcast_flat(self._bf16, self._bf16[0].device if slots else None)
        for (state, key), fp32 in zip(slots, self._fp32, strict=True):
            state[key] = fp32

    def round(self, states: Sequence[tuple[torch.Size, State]], seed: Seed) -> None:
        """Put the bf16 tensors back, stochastically rounded, and round new states, too."""
        if self._fp32:
            copy_each(self._bf16, views_like(rounded_by_place(self._flat, 0, seed_of(*seed, 1)), self._bf16))
        lent = {id(fp32): bf16 for fp32, bf16 in zip(self._fp32, self._bf16, strict=True)}
        slots = [(state, key) for shape, state in states for key in full_sized(shape, state)]
        for number, (state, key) in enumerate(slots):
            value = state[key]
            if id(value) not in lent:
                bf16 = torch.empty_like(value, dtype=torch.bfloat16)
                rounded_by_place(flat_as_stored(value), 0, seed_of(*seed, 2 + number), flat_as_stored(bf16))
                lent[id(value)] = bf16
            state[key] = lent[id(value)]


def _make_proxies(chunk: WeightChunk, exact: Tensor, members: Sequence[Member]) -> list[nn.Parameter]:
    """Return fp32 proxies with gradients over the exact weights of a chunk."""
    views = dict(zip(chunk.parameters, chunk.views(exact), strict=True))
    dense = [member.gradient for member in members if member.gradient.layout is torch.strided]
    upcast = iter(upcast_flat(dense, exact.device)[1])
    gradients = (
        next(upcast) if one.gradient.layout is torch.strided else one.gradient.to(exact.device, torch.float32)
        for one in members
    )
    return [make_proxy(views[one.parameter], gradient) for one, gradient in zip(members, gradients, strict=True)]
