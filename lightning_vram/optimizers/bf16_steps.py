"""Optimizers that step bf16 weights in fp32, chunk by chunk; they stay the same objects.

Also: frozen bf16 weights that are written in every step, and loading states as fp32.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_vram.core.patching import MethodPatch
from lightning_vram.core.tensors.codecs import round_randomly_
from lightning_vram.core.tensors.properties import count, count_writes, stop_counting
from lightning_vram.memory.tracking.ledger import forget_optimizer_tensors, register_optimizer_tensors
from lightning_vram.optimizers.bf16_chunks import WeightChunk, list_rests, upcast_flat
from lightning_vram.optimizers.moment_forms import UpdateCheck, convert_states, full_sized, refill_accumulators
from lightning_vram.optimizers.step_round import State, iterate_parameters, unhooked_step, why_not_steppable
from lightning_vram.optimizers.take_over import StepTakeOver
from lightning_vram.private_names.dispatcher import copy_each
from lightning_vram.private_names.torch import LOAD_HOOKS

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
            self._patches.append(MethodPatch(optimizer, "load_state_dict", partial(partial, self._load, optimizer)))
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
        self._patches, self._taken, self._chunks, self._places = [], [], [], {}

    def __getstate__(self) -> dict[str, Any]:
        # A copy is attached to no optimizer.
        left_out = ("check", "_patches", "_taken", "_handle", "frozen_writes")
        return {key: value for key, value in vars(self).items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, check=None)
        self.frozen_writes = FrozenWrites(self._names)
        super().__init__()

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
        step = ChunkedStep(optimizer, self._make_generator, has_bf16_states=self._has_bf16_states, check=self.check)
        step.run(self._places)
        return loss

    def _make_generator(self, chunk: WeightChunk, device: torch.device) -> torch.Generator:
        # Differs for each chunk and step. Hashed, because the CPU generator reads only half of the bits.
        digest = blake2b(f"{self.num_steps} {chunk.number}".encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little", signed=True))

    def _load(self, optimizer: Optimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
        load_upcast(optimizer, state_dict, load, self._places)
        self._convert_states(optimizer)

    def _convert_states(self, optimizer: Optimizer) -> None:
        full_dtype = torch.bfloat16 if self._has_bf16_states else torch.float32
        convert_states(optimizer, self._places, torch.float32, full_dtype)


def load_upcast(
    optimizer: Optimizer,
    state_dict: dict[str, Any],
    load: Callable[[dict[str, Any]], None],
    lean_parameters: Container[nn.Parameter],
) -> None:
    """Call ``load``, an optimizer's ``load_state_dict``, such that states of ``lean_parameters`` become fp32."""
    hooks = {name: vars(optimizer)[name] for name in LOAD_HOOKS}
    before, after = hooks.values()  # they run without the proxies
    state_dict = state_dict.copy()
    for hook in before.values():
        replaced = hook(optimizer, state_dict)
        state_dict = state_dict if replaced is None else replaced
    groups = optimizer.param_groups
    proxies = {
        p: nn.Parameter(torch.empty(0, dtype=torch.float32, device=p.device)) if p in lean_parameters else p
        for p in iterate_parameters(optimizer)
    }
    vars(optimizer).update({name: OrderedDict() for name in LOAD_HOOKS})
    optimizer.param_groups = [{**group, "params": [proxies[p] for p in group["params"]]} for group in groups]
    try:
        load(state_dict)
        real: dict[Tensor, nn.Parameter] = {proxy: parameter for parameter, proxy in proxies.items()}
        states = defaultdict(dict, {real.get(key, key): state for key, state in optimizer.state.items()})
        optimizer.state = states
        for group, loaded in zip(groups, optimizer.param_groups, strict=True):
            loaded["params"] = group["params"]
    except BaseException:
        optimizer.param_groups = groups
        raise
    finally:
        vars(optimizer).update(hooks)
    for hook in after.values():
        hook(optimizer)


Members = list[tuple[int, nn.Parameter]]  # indices of groups, and parameters


class ChunkedStep:
    """One step of an optimizer, without its hooks. ``has_bf16_states``: states are bf16 between steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        make_generator: Callable[[WeightChunk, torch.device], torch.Generator],
        *,
        has_bf16_states: bool,
        check: UpdateCheck | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._make_generator = make_generator
        self._has_bf16_states = has_bf16_states
        self._check = check
        # A step that changes its groups starts from these for every chunk.
        self._groups = [dict(group) for group in optimizer.param_groups]

    @torch.no_grad()
    def run(self, places: Mapping[nn.Parameter, WeightChunk]) -> None:
        """Step all parameters with a gradient: those in ``places`` chunk by chunk, the others unchanged."""
        work: dict[WeightChunk | None, Members] = {}
        for index, group in enumerate(self._groups):
            for parameter in group["params"]:
                if parameter.grad is not None:  # torch.optim ignores the others
                    work.setdefault(places.get(parameter), []).append((index, parameter))
        for chunk, members in work.items():
            # A call per chunk frees all of it before the next one.
            if chunk is None:
                self._step(members, {parameter: parameter for _, parameter in members})
            else:
                self._step_chunk(chunk, members)

    def _step_chunk(self, chunk: WeightChunk, members: Members) -> None:
        exact, check = chunk.read_for_step(), self._check
        before = check.note(exact) if check is not None else None
        generator = self._make_generator(chunk, exact.device)
        parameters = [parameter for _, parameter in members]
        upcast = UpcastStates(self._states(parameters)) if self._has_bf16_states else None
        try:
            self._step(members, _make_proxies(chunk, exact, parameters))
        finally:
            if upcast is not None:
                upcast.round(self._states(parameters), generator)
            stepped = check.note(exact) if check is not None else None
            # As in fp32, a step that fails half-way leaves what it has done.
            chunk.write(exact, generator, set(parameters))
        if check is not None and before is not None and stepped is not None:
            check.count(before, stepped, chunk.read())

    def _step(self, members: Members, proxies: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Step proxies of some parameters."""
        optimizer = self._optimizer
        groups, states = optimizer.param_groups, optimizer.state
        seen = {index: {**self._groups[index], "params": []} for index, _ in members}
        seen_states: defaultdict[Tensor, State] = defaultdict(dict)
        for index, parameter in members:
            seen[index]["params"].append(proxies[parameter])
            if parameter in states:
                seen_states[proxies[parameter]] = states[parameter]
        optimizer.param_groups, optimizer.state = list(seen.values()), seen_states
        try:
            unhooked_step(type(optimizer))(optimizer)
        finally:
            optimizer.param_groups, optimizer.state = groups, states
            for _, parameter in members:
                if proxies[parameter] in seen_states:
                    states[parameter] = seen_states[proxies[parameter]]
            for index, group in seen.items():
                groups[index].update({key: value for key, value in group.items() if key != "params"})

    def _states(self, parameters: Iterable[nn.Parameter]) -> list[tuple[torch.Size, State]]:
        states = self._optimizer.state
        return [(parameter.shape, states[parameter]) for parameter in parameters if parameter in states]


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

    def round(self, states: Iterable[tuple[torch.Size, State]], generator: torch.Generator) -> None:
        """Put the bf16 tensors back, stochastically rounded, and round new states, too."""
        if self._fp32:
            round_randomly_(self._flat, generator)
            copy_each(self._bf16, self._fp32)
        lent = {id(fp32): bf16 for fp32, bf16 in zip(self._fp32, self._bf16, strict=True)}
        for shape, state in states:
            for key in full_sized(shape, state):
                value = state[key]
                if id(value) not in lent:
                    round_randomly_(value, generator)
                state[key] = lent[id(value)] if id(value) in lent else value.bfloat16()


def _make_proxies(
    chunk: WeightChunk, exact: Tensor, wanted: Sequence[nn.Parameter]
) -> dict[nn.Parameter, nn.Parameter]:
    """Return fp32 proxies with gradients over the exact weights of a chunk."""
    views = dict(zip(chunk.parameters, chunk.views(exact), strict=True))
    proxies = {parameter: nn.Parameter(views[parameter]) for parameter in wanted}
    dense = [p for p in wanted if p.grad is not None and p.grad.layout is torch.strided]
    _, gradients = upcast_flat([p.grad for p in dense if p.grad is not None], exact.device)
    for parameter, gradient in zip(dense, gradients, strict=True):
        proxies[parameter].grad = gradient
    for parameter, proxy in proxies.items():
        if proxy.grad is None and parameter.grad is not None:  # a sparse one
            proxy.grad = parameter.grad.to(exact.device, torch.float32)
    return proxies
