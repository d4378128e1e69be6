"""The optimizers that step lean parameters, in fp32 and chunk by chunk; they stay the same objects."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_vram.core.surgery.shadow import Shadow
from lightning_vram.memory.tracking.optimizer_tensors import forget_optimizer_tensors, register_optimizer_tensors
from lightning_vram.optimizers.lean.chunked_step import ChunkedStep
from lightning_vram.optimizers.lean.frozen_writes import FrozenWrites
from lightning_vram.optimizers.lean.state_loading import load_wide
from lightning_vram.optimizers.lean.weight_chunks import WeightChunk, list_rests
from lightning_vram.optimizers.stepping import (
    StepTakeOver,
    UpdateCheck,
    convert_states,
    iterate_parameters,
    refill_accumulators,
    why_not_steppable,
)
from lightning_vram.private_names.torch.optimizers import note_step

_WITH_NARROW_STATES = ("bf16+kahan", "bf16+stochastic")


class LeanOptimizers(StepTakeOver):
    """All those that are attached, to the ``chunks`` of all lean parameters. ``names`` are for messages."""

    def __init__(self, chunks: Iterable[WeightChunk], scheme: str, names: Mapping[str, nn.Parameter]) -> None:
        self.num_steps = 0
        self.check: UpdateCheck | None = None
        self._chunks = list(chunks)
        self._places = {parameter: chunk for chunk in self._chunks for parameter in chunk.parameters}
        self._has_narrow_states = scheme in _WITH_NARROW_STATES
        self._names = names
        self._has_stepped: set[int] = set()  # optimizers, by id, since frozen parameters were looked at
        self._frozen_writes = FrozenWrites(names)
        super().__init__()

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers step in chunks from now on, but those that are attached already.

        Raises:
            ValueError: If one with lean parameters cannot; then none is changed.
        """
        fresh = [optimizer for optimizer in optimizers if not self._is_taken(optimizer)]
        objections = {optimizer: why_not_steppable(optimizer) for optimizer in fresh}
        for optimizer, objection in objections.items():
            if objection and self._has_ours(optimizer):
                raise ValueError(objection)
        for optimizer in (optimizer for optimizer, objection in objections.items() if objection is None):
            refill_accumulators(optimizer, self._places)
            self._convert_states(optimizer)
            self._take_over(optimizer)
            load = Shadow(optimizer, "load_state_dict", partial(partial, self._load, optimizer))
            self._stand_ins.append(load)
            register_optimizer_tensors(optimizer, partial(list_rests, self._chunks))  # self would hold it

    def pass_over_writes(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let what was written to parameters since the last step be nobody's by hand."""
        self._frozen_writes.pass_over(parameters)

    def end_standing_in(self) -> None:
        """Let the optimizers step plainly again, before their parameters are restored."""
        super().end_standing_in()
        self._frozen_writes.stop()

    def let_go(self) -> None:
        """Give the states the dtype of the parameters, after those are restored, and forget all."""
        for optimizer in self._taken:
            forget_optimizer_tensors(optimizer)
            convert_states(optimizer, self._places, None, None)
        self._stand_ins, self._taken, self._chunks, self._places = [], [], [], {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy is attached to no optimizer."""
        left_out = ("check", "_stand_ins", "_taken", "_handle", "_frozen_writes")
        return {key: value for key, value in vars(self).items() if key not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, check=None)
        self._frozen_writes = FrozenWrites(self._names)
        super().__init__()

    def _has_ours(self, optimizer: Optimizer) -> bool:
        return any(parameter in self._places for parameter in iterate_parameters(optimizer))

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        note_step(optimizer)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if id(optimizer) in self._has_stepped or not self._has_stepped:  # once for each round of all optimizers
            self._has_stepped.clear()
            self._frozen_writes.look(p for chunk in self._chunks if chunk.is_resting for p in chunk.parameters)
        self._has_stepped.add(id(optimizer))
        self.num_steps += 1
        if self.check is not None:
            self.check.begin()
        narrow = self._has_narrow_states
        ChunkedStep(optimizer, self._make_generator, has_narrow_states=narrow, check=self.check).run(self._places)
        return loss

    def _make_generator(self, chunk: WeightChunk, device: torch.device) -> torch.Generator:
        # Another for each chunk and step; the generator of the CPU looks at half of the bits only.
        digest = blake2b(f"{self.num_steps} {chunk.number}".encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little", signed=True))

    def _load(self, optimizer: Optimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
        load_wide(optimizer, state_dict, load, self._places)
        self._convert_states(optimizer)

    def _convert_states(self, optimizer: Optimizer) -> None:
        full_dtype = torch.bfloat16 if self._has_narrow_states else torch.float32
        convert_states(optimizer, self._places, torch.float32, full_dtype)
