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
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from lightning_vram.core.surgery.shadow import Shadow, instead
from lightning_vram.core.tensors.versions import storage_address
from lightning_vram.optimizers.lean.checks import check_memory, check_parameter, check_values
from lightning_vram.optimizers.lean.optimizers import LeanOptimizers
from lightning_vram.optimizers.lean.weight_chunks import CODECS, WeightChunk, list_rests, make_chunks
from lightning_vram.optimizers.stepping.averaging import move_average
from lightning_vram.optimizers.stepping.update_check import UpdateCheck
from lightning_vram.private_names.torch.dispatch import is_traceable_wrapper_subclass

SCHEMES = tuple(CODECS)


class LeanParameters:
    """Keeps floating parameters in bf16 until :meth:`restore`: the same objects, with other memory.

    The rest of a frozen parameter lies in host memory. A parameter that several modules share is converted once. What
    is written to a parameter between steps is kept as bf16 rounds it: zeros and NaNs exactly, others to
    half a unit in the last place of bf16, because split and Kahan add what they kept. All ranks that have the same
    weights and gradients have the same weights after a step, random as it may be, and the global random state is not
    used.

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
        """
        self._optimizers.attach(optimizers)

    def full_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Replace the bf16 weights in a ``state_dict`` by what they stand for, so that it can be loaded anywhere."""
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
        """Set exact weights, as of a checkpoint."""
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
        """Let parameters be exactly what they are given, whatever the scheme, in 4 bytes more of the host for each."""
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
        """Take over the number of steps."""
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


@torch.no_grad()
def put_full_weights(
    state_dict: dict[str, Any], chunks: Iterable[WeightChunk], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """Replace each tensor that is the memory of a lean parameter by the exact weights, in host memory.

    A copy of a lean parameter is replaced, too, where it goes by the parameter's name.
    """
    names: dict[Any, list[str]] = {}
    for name, value in state_dict.items():
        if _is_plain(value) and value.dtype is torch.bfloat16:
            named = parameters.get(name)
            owner = value if named is None or not _is_copy(value, named) else named
            names.setdefault(_memory(owner), []).append(name)
    full = copy(state_dict)  # with its metadata
    for chunk in chunks:
        wanted = [names.get(_memory(parameter), []) for parameter in chunk.parameters]
        if any(wanted):
            full.update(_copy_values(chunk, wanted))
    return full


def _copy_values(chunk: WeightChunk, wanted: Iterable[Sequence[str]]) -> dict[str, Tensor]:
    """Copy the exact weights to host memory, by name. Returning frees the chunk before the next is read."""
    copies = {}
    for keys, values in zip(wanted, chunk.views(chunk.read()), strict=True):
        if keys:
            copies.update(dict.fromkeys(keys, values.to("cpu", copy=True)))
    return copies


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not is_traceable_wrapper_subclass(value)


def _is_copy(value: Tensor, parameter: nn.Parameter) -> bool:
    """Whether both hold the same bits."""
    if value.dtype is not parameter.dtype or value.shape != parameter.shape:
        return False
    return torch.equal(value.to(parameter.device).view(torch.int16), parameter.detach().view(torch.int16))


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, storage_address(tensor), tensor.storage_offset(), tensor.shape


class LeanAverage:
    """Has an ``AveragedModel`` average what lean parameters stand for, until :meth:`remove`."""

    def __init__(self, average: AveragedModel, module: nn.Module, lean: LeanParameters) -> None:
        self._average, self._lean = average, lean
        self._is_lent = False
        self._averages = dict(zip(module.parameters(), average.module.parameters(), strict=True))
        for own in self._averages.values():
            if own.dtype is torch.bfloat16:
                own.data = own.data.float()
        self._stand_in = Shadow(average, "update_parameters", instead(self.update))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the average towards the weights."""
        number = self._average.n_averaged.clone()
        for parameters, values in self._lean.exact_weights():
            device = parameters[0].device  # what is frozen comes on the host
            theirs = [value.to(device) for value in values]
            move_average(self._average, number, ([self._averages[p] for p in parameters], ()), (theirs, ()))
        plain = self._plain()
        buffers = (self._average.module.buffers(), model.buffers())
        move_average(self._average, number, (plain.values(), buffers[0]), (plain, buffers[1]))
        self._average.n_averaged += 1

    @torch.no_grad()
    def swap(self, model: nn.Module) -> None:
        """Let the module have the average, and the average the weights; and the other way round the next time."""
        for parameters, values in self._lean.exact_weights():
            averages = {parameter: self._averages[parameter] for parameter in parameters}
            if not self._is_lent:
                self._lean.lend(averages)
            for average, value in zip(averages.values(), values, strict=True):
                average.copy_(value)
        if self._is_lent:
            self._lean.take_back()
        self._is_lent = not self._is_lent
        for ours, theirs in self._others(model):
            kept = ours.clone()
            ours.copy_(theirs)
            theirs.copy_(kept)

    @torch.no_grad()
    def put(self, model: nn.Module) -> None:
        """Let the module have the average from now on."""
        self._lean.lend({parameter: self._averages[parameter] for parameter in self._lean.parameters()})
        for ours, theirs in self._others(model):
            theirs.copy_(ours)

    def remove(self) -> None:
        """Let the average be moved as others are."""
        self._stand_in.remove()

    def _plain(self) -> dict[nn.Parameter, nn.Parameter]:
        """Parameters that are not lean, with their averages."""
        lean = self._lean.parameters()
        return {parameter: average for parameter, average in self._averages.items() if parameter not in lean}

    def _others(self, model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what is not lean: of the average, and of the module."""
        for parameter, average in self._plain().items():
            yield average.data, parameter.data
        yield from zip(self._average.module.buffers(), model.buffers(), strict=True)
