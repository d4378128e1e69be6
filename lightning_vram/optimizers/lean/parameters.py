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

Split takes weights below 2^-134, which bf16 rounds to zero, for zero; all others are right to the bit. Forward
and backward see the nearest bf16 number. Of a half between two, master shows the even one, as autocast does, and split
the one away from zero, as sixteen bits beside could not tell all numbers apart else: another one for one weight of
131072. So both step alike on the same gradients, to the bit, while those of a whole run come to differ by roundings.
For each parameter of the chunk that is being stepped, a step needs 8 bytes more (16 with Kahan and stochastic rounding)
and what the optimizer itself needs. A chunk has four million parameters, or one larger one. A step costs reading and
writing the weights once more. Forward and backward need no copies of the weights in 16 bits, as they do under autocast;
but modules that ask for fp32 weights get them rounded, so keep those out.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer

from lightning_vram.optimizers.lean.checks import check_memory, check_parameter, check_values
from lightning_vram.optimizers.lean.full_weights import put_full_weights
from lightning_vram.optimizers.lean.optimizers import LeanOptimizers
from lightning_vram.optimizers.lean.weight_chunks import list_rests, make_chunks
from lightning_vram.optimizers.lean.weight_codecs import CODECS
from lightning_vram.optimizers.stepping import UpdateCheck

SCHEMES = tuple(CODECS)


class LeanParameters:
    """Keeps floating parameters in bf16 until :meth:`restore`: the same objects, with other memory.

    The rest of a frozen parameter lies in host memory. A parameter that several modules share is converted once. What
    is written to a parameter between steps is kept as bf16 rounds it: zeros and NaNs exactly, others to
    half a unit in the last place of bf16, because split and Kahan add what they kept. All ranks that have the same
    weights and gradients have the same weights after a step, random as it may be, and the global random state is not
    used.

    Args:
        parameters: fp32, fp16 or bf16. Those that are not floating are passed over.
        scheme: One of ``SCHEMES``.
        names: All names of parameters in their module, for :meth:`full_state` and for messages.

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

    def __init__(
        self, parameters: Iterable[nn.Parameter], scheme: str, names: Mapping[str, nn.Parameter] | None = None
    ) -> None:
        if scheme not in SCHEMES:
            raise ValueError(f"LeanParameters(scheme) must be one of {', '.join(SCHEMES)}, got {scheme!r}.")
        unique = [
            p for p in dict.fromkeys(parameters) if isinstance(p, UninitializedParameter) or p.is_floating_point()
        ]
        for parameter in unique:
            check_parameter(parameter)
        check_memory(unique)
        self._names = dict(names or {})
        with torch.no_grad():
            self._chunks = make_chunks(unique, scheme)
        self._optimizers = LeanOptimizers(self._chunks, scheme, self._names)

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers step in fp32 from now on. They stay the same objects.

        Others that hold lean parameters are attached when they step first, or their step raises what this raises.

        An optimizer without lean parameters may get some later, if it can step them at all. One that is attached
        already is passed over.

        Args:
            optimizers: Any number, over any of the parameters and over others: those are stepped as they are.

        Raises:
            ValueError: If an optimizer with lean parameters cannot step in chunks; then none is changed.
        """
        self._optimizers.attach(optimizers)

    def full_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Replace the bf16 weights in a ``state_dict`` by what they stand for, so that it can be loaded anywhere.

        Args:
            state_dict: Of any module with lean parameters. Is not changed.

        Returns:
            A copy with the same keys. The exact weights are fp32 and in host memory, so that saving them needs no more
            of the device's; what is neither the memory of a lean parameter, nor an equal copy under its name, is what
            it was.
        """
        return put_full_weights(state_dict, self._chunks, self._names)

    def parameters(self) -> set[nn.Parameter]:
        """Return those that are lean."""
        return {parameter for chunk in self._chunks for parameter in chunk.parameters}

    @torch.no_grad()
    def exact_weights(self) -> Iterator[tuple[tuple[nn.Parameter, ...], list[Tensor]]]:
        """Yield some parameters at a time, and what they stand for: fp32, not to be written to, of no use later.

        Of parameters that are frozen it is in host memory.
        """
        for chunk in self._chunks:
            yield chunk.parameters, chunk.views(chunk.read())

    @torch.no_grad()
    def take(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Set exact weights, as of a checkpoint.

        Args:
            values: For any of the lean parameters: floating, on any device, of the same shape.

        Raises:
            ValueError: If a parameter is not lean, or a shape differs; then nothing is set.
            RuntimeError: If somebody has changed the dtype of a parameter.
        """
        places = {parameter: chunk for chunk in self._chunks for parameter in chunk.parameters}
        check_values(values, places)
        chunks = dict.fromkeys(places[parameter] for parameter in values)
        for chunk in chunks:
            chunk.check()
        for chunk in chunks:
            chunk.take(values)
        self._optimizers.pass_over_writes(values)

    @torch.no_grad()
    def lend(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Let parameters be exactly what they are given, whatever the scheme, in 4 bytes more of the host for each.

        Args:
            values: As :meth:`exact_weights` yields them: fp32, on any device.
        """
        for chunk in self._chunks:
            if chunk.parameters[0] in values:
                chunk.lend([values[parameter] for parameter in chunk.parameters])
        self._optimizers.pass_over_writes(values)

    @torch.no_grad()
    def take_back(self) -> None:
        """Let all parameters, which were lent, have the bits of before."""
        for chunk in self._chunks:
            chunk.take_back()
            self._optimizers.pass_over_writes(chunk.parameters)

    def check_updates(self, is_due: Callable[[], bool]) -> None:
        """Count from now on, in steps in which ``is_due`` says so, updates that rounding takes back."""
        self._optimizers.check = UpdateCheck(is_due)

    @property
    def lost_updates(self) -> Tensor | None:
        """Share of the last step's updates, 0 to 1, that left weights as they are kept; ``None``: not counted.

        With random rounding such updates are right on average.
        """
        check = self._optimizers.check
        return None if check is None else check.share

    def rests(self) -> list[Tensor]:
        """Return what is kept beside the bf16 weights, itself: flat, in the same order on all ranks.

        int16, bf16 or fp32; of frozen parameters in host memory. Viewed as ``torch.uint8``, any backend of
        ``torch.distributed`` can broadcast them.
        """
        return list_rests(self._chunks)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps taken, by all optimizers together: it seeds the rounding."""
        return {"num_steps": self._optimizers.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the number of steps.

        Args:
            state_dict: What :meth:`state_dict` returned.
        """
        self._optimizers.num_steps = state_dict["num_steps"]

    @torch.no_grad()
    def restore(self) -> None:
        """Give the parameters their dtype back, with the exact weights, on the device where they are now.

        The optimizers step as they did before. What is no longer bf16 is left as it is. Calling it again does nothing.
        """
        self._optimizers.end_standing_in()
        for chunk in self._chunks:
            chunk.restore()
        self._optimizers.let_go()
        self._chunks = []
