"""One step of an optimizer, chunk by chunk, on fp32 parameters that live only as long as their chunk is stepped."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_vram.core.tensors.bit_patterns import round_randomly_
from lightning_vram.optimizers.lean.weight_chunks import WeightChunk, widened
from lightning_vram.optimizers.stepping import State, UpdateCheck, full_sized, plain_step
from lightning_vram.private_names.torch.operators import copy_each

Members = list[tuple[int, nn.Parameter]]
"""Parameters of an optimizer, each with the index of its group."""


class ChunkedStep:
    """One step of an optimizer, without its hooks.

    Args:
        optimizer: One for which :func:`~lightning_vram.optimizers.stepping.steppable.why_not_steppable` is ``None``.
        make_generator: Returns the source of randomness for a chunk in this step, on the device given.
        has_narrow_states: Whether states are bf16 between steps.
        check: Counts updates that are lost; ``None``: nobody does.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        make_generator: Callable[[WeightChunk, torch.device], torch.Generator],
        *,
        has_narrow_states: bool,
        check: UpdateCheck | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._make_generator = make_generator
        self._has_narrow_states = has_narrow_states
        self._check = check
        # Should a step change its groups, then it does so from here for every chunk.
        self._groups = [dict(group) for group in optimizer.param_groups]

    @torch.no_grad()
    def run(self, places: Mapping[nn.Parameter, WeightChunk]) -> None:
        """Step all parameters that have a gradient: those in ``places`` chunk by chunk, the others as they are."""
        work: dict[WeightChunk | None, Members] = {}
        for index, group in enumerate(self._groups):
            for parameter in group["params"]:
                if parameter.grad is not None:  # no optimizer of torch.optim looks at the others
                    work.setdefault(places.get(parameter), []).append((index, parameter))
        for chunk, members in work.items():
            # A call for each chunk, so that nothing of it lives on while the next is stepped.
            if chunk is None:
                self._step(members, {parameter: parameter for _, parameter in members})
            else:
                self._step_chunk(chunk, members)

    def _step_chunk(self, chunk: WeightChunk, members: Members) -> None:
        exact, check = chunk.read_for_step(), self._check
        before = check.note(exact) if check is not None else None
        generator = self._make_generator(chunk, exact.device)
        parameters = [parameter for _, parameter in members]
        wide = WideStates(self._states(parameters)) if self._has_narrow_states else None
        try:
            self._step(members, _make_stand_ins(chunk, exact, parameters))
        finally:
            if wide is not None:
                wide.round(self._states(parameters), generator)
            stepped = check.note(exact) if check is not None else None
            chunk.write(
                exact, generator, set(parameters)
            )  # a step that fails half-way leaves what it has done, as in fp32
        if check is not None and before is not None and stepped is not None:
            check.count(before, stepped, chunk.read())

    def _step(self, members: Members, stand_ins: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Let the optimizer see only these parameters, each through its stand-in, for one step."""
        optimizer = self._optimizer
        groups, states = optimizer.param_groups, optimizer.state
        seen = {index: {**self._groups[index], "params": []} for index, _ in members}
        seen_states: defaultdict[Tensor, State] = defaultdict(dict)
        for index, parameter in members:
            seen[index]["params"].append(stand_ins[parameter])
            if parameter in states:
                seen_states[stand_ins[parameter]] = states[parameter]
        optimizer.param_groups, optimizer.state = list(seen.values()), seen_states
        try:
            plain_step(type(optimizer))(optimizer)
        finally:
            optimizer.param_groups, optimizer.state = groups, states
            for _, parameter in members:
                if stand_ins[parameter] in seen_states:
                    states[parameter] = seen_states[stand_ins[parameter]]
            for index, group in seen.items():
                groups[index].update({key: value for key, value in group.items() if key != "params"})

    def _states(self, parameters: Iterable[nn.Parameter]) -> list[tuple[torch.Size, State]]:
        states = self._optimizer.state
        return [(parameter.shape, states[parameter]) for parameter in parameters if parameter in states]


class WideStates:
    """Replaces the bf16 tensors in states by fp32 ones, in place, until :meth:`round`, which rounds them at random.

    An average with a decay of .999 moves by less than half a unit of bf16 in a step, and would stand still if it were
    rounded to the nearest. Numbers that are not one per weight stay as they are.
    """

    def __init__(self, states: Iterable[tuple[torch.Size, State]]) -> None:
        slots = [(state, key) for shape, state in states for key in full_sized(shape, state)]
        self._narrow = [state[key] for state, key in slots]
        self._flat, self._wide = widened(self._narrow, self._narrow[0].device if slots else None)
        for (state, key), wide in zip(slots, self._wide, strict=True):
            state[key] = wide

    def round(self, states: Iterable[tuple[torch.Size, State]], generator: torch.Generator) -> None:
        """Put the bf16 tensors back, with the rounded values, and replace what was made since by rounded values too."""
        if self._wide:
            round_randomly_(self._flat, generator)
            copy_each(self._narrow, self._wide)
        lent = {id(wide): narrow for wide, narrow in zip(self._wide, self._narrow, strict=True)}
        for shape, state in states:
            for key in full_sized(shape, state):
                value = state[key]
                if id(value) not in lent:
                    round_randomly_(value, generator)
                state[key] = lent[id(value)] if id(value) in lent else value.bfloat16()


def _make_stand_ins(
    chunk: WeightChunk, exact: Tensor, wanted: Sequence[nn.Parameter]
) -> dict[nn.Parameter, nn.Parameter]:
    """Make fp32 parameters with gradients out of some of a chunk, over its exact weights."""
    views = dict(zip(chunk.parameters, chunk.views(exact), strict=True))
    stand_ins = {parameter: nn.Parameter(views[parameter]) for parameter in wanted}
    dense = [p for p in wanted if p.grad is not None and p.grad.layout is torch.strided]
    _, gradients = widened([p.grad for p in dense if p.grad is not None], exact.device)
    for parameter, gradient in zip(dense, gradients, strict=True):
        stand_ins[parameter].grad = gradient
    for parameter, stand_in in stand_ins.items():
        if stand_in.grad is None and parameter.grad is not None:
            stand_in.grad = parameter.grad.to(exact.device, torch.float32)
    return stand_ins
