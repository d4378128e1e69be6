"""Weights in 16 bits, and what they lack for training kept beside them, under any optimizer of ``torch.optim``.

A step of an optimizer runs in fp32, on one chunk of the parameters after another. The bytes per parameter, with AdamW:

==================  ======  ========  ====  =====  =====  ==================================================
scheme              weight  gradient  rest  state  total  result
==================  ======  ========  ====  =====  =====  ==================================================
fp32                4       4         0     8      16
bf16+master         2       2         4     8      16     steps as in fp32, to the bit
bf16+split          2       2         2     8      14     steps as in fp32, to the bit
bf16+kahan          2       2         2     4      10     weights of 16 significant bits, states of 8
bf16+stochastic     2       2         0     4      8      both of 8, rounded at random
==================  ======  ========  ====  =====  =====  ==================================================

For each parameter of the chunk that is being stepped, a step needs 8 bytes more (16 with Kahan and stochastic rounding)
and what the optimizer itself needs. A chunk has four million parameters, or one larger one. A step costs reading and
writing the weights once more. Forward and backward need no copies of the weights in 16 bits, as they do under autocast;
but modules that ask for fp32 weights get them rounded, so keep those out.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from lightning_vram.memory.kept_beside import forget_beside, keep_beside
from lightning_vram.optimizers.chunked_step import ChunkedStep
from lightning_vram.optimizers.full_weights import put_full_weights
from lightning_vram.optimizers.lean_checks import check_parameter
from lightning_vram.optimizers.optimizer_shadow import OptimizerShadow
from lightning_vram.optimizers.state_dtypes import convert_states, refill_accumulators
from lightning_vram.optimizers.state_loading import load_wide
from lightning_vram.optimizers.steppable import iterate_parameters, why_not_steppable
from lightning_vram.optimizers.weight_chunks import WeightChunk, make_chunks

SCHEMES = ("bf16+master", "bf16+split", "bf16+kahan", "bf16+stochastic")

_NARROW_STATES = SCHEMES[2:]


class LeanParameters:
    """Keeps floating parameters in bf16 until :meth:`restore`: the same objects, with other memory.

    The rest of a frozen parameter lies in host memory. A parameter that several modules share is converted once; what
    is written to a parameter between steps is kept. All ranks that have the same weights and gradients have the same
    weights after a step, random as it may be, and the global random state is not used.

    Args:
        parameters: fp32, fp16 or bf16. Those that are not floating are passed over.
        scheme: One of ``SCHEMES``.

    Raises:
        ValueError: If ``scheme`` is unknown, or a parameter cannot be converted; then none is.

    Example:
        >>> layer = nn.Linear(4, 4)
        >>> lean = LeanParameters(layer.parameters(), "bf16+split")
        >>> optimizer = torch.optim.AdamW(layer.parameters())
        >>> lean.attach([optimizer])
        >>> layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> lean.restore()
        >>> layer.weight.dtype
        torch.float32
    """

    def __init__(self, parameters: Iterable[nn.Parameter], scheme: str) -> None:
        if scheme not in SCHEMES:
            raise ValueError(f"LeanParameters(scheme) must be one of {', '.join(SCHEMES)}, got {scheme!r}.")
        unique = [
            p for p in dict.fromkeys(parameters) if isinstance(p, UninitializedParameter) or p.is_floating_point()
        ]
        for parameter in unique:
            check_parameter(parameter)
        self._scheme = scheme
        self._num_steps = 0
        self._stand_ins: list[OptimizerShadow] = []
        self._optimizers: list[Optimizer] = []
        with torch.no_grad():
            self._chunks = make_chunks(unique, scheme)
        self._places = {parameter: chunk for chunk in self._chunks for parameter in chunk.parameters}

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers step in fp32 from now on; before their first step. They stay the same objects.

        An optimizer without lean parameters may get some later, if it can step them at all. One that is attached
        already is passed over.

        Args:
            optimizers: Any number, over any of the parameters and over others: those are stepped as they are.

        Raises:
            ValueError: If an optimizer with lean parameters cannot step in chunks; then none is changed.
        """
        fresh = [optimizer for optimizer in optimizers if all(optimizer is not known for known in self._optimizers)]
        objections = {optimizer: why_not_steppable(optimizer) for optimizer in fresh}
        for optimizer, objection in objections.items():
            if objection and any(parameter in self._places for parameter in iterate_parameters(optimizer)):
                raise ValueError(objection)
        for optimizer in (optimizer for optimizer, objection in objections.items() if objection is None):
            refill_accumulators(optimizer, self._places)
            self._convert_states(optimizer)
            # Hooks run once, around all chunks, and see the optimizer as it is.
            step = partial(Optimizer.profile_hook_step(self._step), optimizer)
            self._stand_ins += [
                OptimizerShadow(optimizer, "step", partial(_return_other, step)),
                OptimizerShadow(optimizer, "load_state_dict", partial(partial, self._load, optimizer)),
            ]
            self._optimizers.append(optimizer)
            keep_beside(optimizer, partial(_rests, self._chunks))  # a method of self would hold the optimizer

    def full_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Replace the bf16 weights in a ``state_dict`` by what they stand for, so that it can be loaded anywhere.

        Args:
            state_dict: Of any module with lean parameters. Is not changed.

        Returns:
            A copy with the same keys. The exact weights are fp32 and in host memory, so that saving them needs no more
            of the device's; what is not the memory of a lean parameter is what it was.
        """
        return put_full_weights(state_dict, self._chunks)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps taken, by all optimizers together: it seeds the rounding."""
        return {"num_steps": self._num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the number of steps.

        Args:
            state_dict: What :meth:`state_dict` returned.
        """
        self._num_steps = state_dict["num_steps"]

    @torch.no_grad()
    def restore(self) -> None:
        """Give the parameters their dtype back, with the exact weights, on the device where they are now.

        The optimizers step as they did before. Calling it again does nothing.
        """
        for stand_in in reversed(self._stand_ins):
            stand_in.remove()
        for chunk in self._chunks:
            chunk.restore()
        for optimizer in self._optimizers:
            forget_beside(optimizer)
            convert_states(optimizer, self._places, None, None)
        self._stand_ins, self._optimizers, self._chunks, self._places = [], [], [], {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy is attached to no optimizer."""
        return {**vars(self), "_stand_ins": [], "_optimizers": []}

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        vars(optimizer)["_opt_called"] = True  # what learning-rate schedulers look for
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._num_steps += 1
        step = ChunkedStep(optimizer, self._make_generator, has_narrow_states=self._scheme in _NARROW_STATES)
        step.run(self._places)
        return loss

    def _make_generator(self, chunk: WeightChunk, device: torch.device) -> torch.Generator:
        # Another for each chunk and step; the generator of the CPU looks at half of the bits only.
        digest = blake2b(f"{self._num_steps} {chunk.number}".encode(), digest_size=8).digest()
        return torch.Generator(device).manual_seed(int.from_bytes(digest, "little", signed=True))

    def _load(self, optimizer: Optimizer, load: Callable[[dict[str, Any]], None], state_dict: dict[str, Any]) -> None:
        load_wide(optimizer, state_dict, load, self._places)
        self._convert_states(optimizer)

    def _convert_states(self, optimizer: Optimizer) -> None:
        full_dtype = torch.bfloat16 if self._scheme in _NARROW_STATES else torch.float32
        convert_states(optimizer, self._places, torch.float32, full_dtype)


def _rests(chunks: Iterable[WeightChunk]) -> list[Tensor]:
    return [chunk.rest for chunk in chunks if chunk.rest is not None]


def _return_other(call: Callable[..., Any], inner: Callable[..., Any]) -> Callable[..., Any]:
    return call
