"""bf16 weights with the remainder that training needs, for any optimizer of ``torch.optim``.

A step of an optimizer runs in fp32, on one chunk of the parameters after another. The bytes per parameter, with AdamW:

==================  ======  ========  ====  =====  =====  ==================================================
scheme              weight  gradient  rest  state  total  result
==================  ======  ========  ====  =====  =====  ==================================================
fp32                4       4         0     8      16
bf16+master         2       2         4     8      16     bit-exact steps
bf16+split          2       2         2     8      14     bit-exact steps
bf16+kahan          2       2         2     4      10     weights of 16 significant bits, states of 8
bf16+stochastic     2       2         0     4      8      both of 8, stochastic rounding
==================  ======  ========  ====  =====  =====  ==================================================

Split flushes weights below 2^-134 to zero. Forward and backward see the nearest bf16 number. Between two, master shows
the even one, as autocast does, and split the one away from zero: a different one for one weight of 131072. So both take
the same bit-exact steps on the same gradients, while whole runs differ by roundings. A step needs 8 more bytes (16 with
Kahan and stochastic rounding) for each weight of the current chunk: four million weights, or one larger parameter.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer

from lightning_vram.core.tensors.properties import is_dense, is_strided
from lightning_vram.memory.storages import storage_address
from lightning_vram.optimizers.bf16_chunks import WeightChunk, list_rests, make_chunks
from lightning_vram.optimizers.bf16_steps import LeanOptimizers
from lightning_vram.optimizers.moment_forms import UpdateCheck
from lightning_vram.optimizers.step_round import iterate_parameters, steps_like
from lightning_vram.private_names.dispatcher import is_traceable_wrapper_subclass
from lightning_vram.private_names.torch import forward_pre_hooks

_LOW_PRECISION = (torch.bfloat16, torch.float16)
_DTYPES = (torch.float32, *_LOW_PRECISION)
SCHEMES = ("bf16+master", "bf16+split", "bf16+kahan", "bf16+stochastic")
_KINDS = {kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)} - {Optimizer}


def check_parameter(parameter: nn.Parameter) -> None:
    """Refuse a parameter that cannot be converted in place without loss."""
    kind: Any = type(parameter)
    if issubclass(kind, DTensor) or isinstance(parameter.data, DTensor):
        raise ValueError(
            "Sharded parameters (FSDP2) cannot be stored in bfloat16: the shards are the fp32 master weights already. "
            "Give fully_shard(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)) to compute in 16 bits."
        )
    data: Any = parameter.data
    if isinstance(parameter, UninitializedParameter) or parameter.is_meta or is_traceable_wrapper_subclass(data):
        raise ValueError(
            f"A parameter of type {kind.__name__} on {parameter.device} cannot be stored in bfloat16: only plain "
            "tensors with values can. Initialize lazy and meta parameters first, and leave quantized ones out."
        )
    if parameter.dtype not in _DTYPES:
        raise ValueError(
            f"A parameter of shape {tuple(parameter.shape)} is {parameter.dtype}: only float32, float16 and bfloat16 "
            "parameters can be stored in bfloat16. Convert it first, or leave it out."
        )


def check_memory(parameters: Iterable[nn.Parameter]) -> None:
    """Refuse different parameters that share memory: each would get its own."""
    spans: dict[Any, list[tuple[int, int, torch.Size]]] = defaultdict(list)
    for parameter in parameters:
        if is_strided(parameter) and parameter.numel() and is_dense(parameter):
            start, end = int(parameter.storage_offset()), int(parameter.storage_offset()) + parameter.numel()
            spans[parameter.device, storage_address(parameter)].append((start, end, parameter.shape))
    for alike in spans.values():
        alike.sort(key=lambda span: span[:2])
        for (_, end, one), (start, _, other) in pairwise(alike):
            if start < end:
                raise ValueError(
                    f"Two parameters of shapes {tuple(one)} and {tuple(other)} that share memory cannot be stored in "
                    "bfloat16: each would get its own. Tie them as one parameter (head.weight = embedding.weight), not "
                    "by their data."
                )


def check_values(values: Mapping[nn.Parameter, Tensor], lean: Container[nn.Parameter]) -> None:
    """Refuse weights for parameters that are not stored in bf16, or of another shape."""
    for parameter, value in values.items():
        if parameter not in lean:
            raise ValueError(
                f"A parameter of shape {tuple(parameter.shape)} is not stored in bfloat16: copy its weights into it."
            )
        if value.shape != parameter.shape:
            raise ValueError(
                f"A bfloat16 parameter of shape {tuple(parameter.shape)} cannot take weights of shape "
                f"{tuple(value.shape)}."
            )


def iterate_computing(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that compute a weight, as parametrizations do: that needs fp32, and their buffers are fp32."""
    for part in module.modules():
        if is_parametrized(part):
            yield part
            yield from part.get_submodule("parametrizations").modules()
        elif any(isinstance(hook, SpectralNorm | WeightNorm) for hook in forward_pre_hooks(part).values()):
            yield part


def refuse_lost_updates(optimizers: Iterable[Optimizer]) -> None:
    """Refuse optimizers of ``torch.optim`` that would step 16-bit weights; others are trusted."""
    for optimizer in optimizers:
        if not steps_like(type(optimizer), _KINDS):  # may have no defaults
            continue
        if getattr(optimizer, "bf16_stochastic_round", False) or optimizer.defaults.get("kahan_sum"):
            continue
        rounded = [p for p in iterate_parameters(optimizer) if p.requires_grad and p.dtype in _LOW_PRECISION]
        if rounded:
            dtypes = " and ".join(sorted({str(parameter.dtype) for parameter in rounded}))
            raise ValueError(
                f"{type(optimizer).__name__} would train {len(rounded)} parameters that are {dtypes}, and lose every "
                "update below half a unit in the last place (in a test the loss ended at .105 instead of .0266). Use "
                'LeanMixedPrecision("bf16", parameters="bf16+split"), one of its other schemes, or fp32 weights.'
            )


class LeanParameters:
    """Stores floating parameters as bf16 until :meth:`restore`: the same objects, with other memory.

    The remainder of a frozen parameter is in host memory. Values that user code writes to a parameter are rounded:
    zeros and NaNs exact, others to half a unit in the last place of bf16, because split and Kahan add their remainder.
    Ranks with the same weights and gradients have the same weights after a step; the global random state is unused.

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
        unique = list(dict.fromkeys(parameters))
        unique = [p for p in unique if isinstance(p, UninitializedParameter) or p.is_floating_point()]
        for parameter in unique:
            check_parameter(parameter)
        check_memory(unique)
        self._names = dict(names or {})
        with torch.no_grad():
            self._chunks = make_chunks(unique, scheme)
        self._optimizers = LeanOptimizers(self._chunks, scheme, self._names)

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Step optimizers in fp32 from now on; refuse all if one with bf16 weights cannot step in chunks.

        Other optimizers of these parameters are attached at their first step. Repeated calls do nothing.
        """
        self._optimizers.attach(optimizers)

    @torch.no_grad()
    def full_state(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a ``state_dict`` that can be loaded anywhere: with exact fp32 weights, in host memory.

        Equal copies of bf16 weights under the parameter's name are replaced, too. Shared weights remain shared.
        """
        names: dict[Any, list[str]] = {}
        for name, value in state_dict.items():
            is_strided = isinstance(value, Tensor) and value.layout is torch.strided
            if is_strided and not is_traceable_wrapper_subclass(value) and value.dtype is torch.bfloat16:
                named = self._names.get(name)
                owner = value if named is None or not _is_copy(value, named) else named
                names.setdefault(_memory(owner), []).append(name)
        full = copy(state_dict)  # with its metadata
        for chunk in self._chunks:
            wanted = [names.get(_memory(parameter), []) for parameter in chunk.parameters]
            if any(wanted):
                full.update(_copy_values(chunk, wanted))
        return full

    def parameters(self) -> set[nn.Parameter]:
        """Return the parameters that are stored as bf16."""
        return {parameter for chunk in self._chunks for parameter in chunk.parameters}

    @torch.no_grad()
    def exact_weights(self) -> Iterator[tuple[tuple[nn.Parameter, ...], list[Tensor]]]:
        """Yield some parameters at a time, with exact fp32 weights: read-only, valid until the next, frozen on host."""
        for chunk in self._chunks:
            yield chunk.parameters, chunk.views(chunk.read())

    @torch.no_grad()
    def take(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Set exact weights, such as those of a checkpoint; refuse all if one does not match."""
        places = {parameter: chunk for chunk in self._chunks for parameter in chunk.parameters}
        check_values(values, places)
        chunks = dict.fromkeys(places[parameter] for parameter in values)
        for chunk in chunks:
            chunk.check()
        for chunk in chunks:
            chunk.take(values)
        self._optimizers.frozen_writes.pass_over(values)

    @torch.no_grad()
    def lend(self, values: Mapping[nn.Parameter, Tensor]) -> None:
        """Set exact fp32 values until :meth:`take_back`, in 4 bytes of host memory per weight."""
        for chunk in self._chunks:
            if chunk.parameters[0] in values:
                chunk.lend([values[parameter] for parameter in chunk.parameters])
        self._optimizers.frozen_writes.pass_over(values)

    @torch.no_grad()
    def take_back(self) -> None:
        """Undo :meth:`lend`, bit-exact."""
        for chunk in self._chunks:
            chunk.take_back()
            self._optimizers.frozen_writes.pass_over(chunk.parameters)

    def check_updates(self, is_due: Callable[[], bool]) -> None:
        """Count updates that rounding undoes, in steps that are due."""
        self._optimizers.check = UpdateCheck(is_due)

    @property
    def lost_updates(self) -> Tensor | None:
        """Share of the last step's updates, 0 to 1, that rounding undid; ``None``: not counted."""
        check = self._optimizers.check
        return None if check is None else check.share

    def rests(self) -> list[Tensor]:
        """Return the remainders of bf16 weights: flat int16, bf16 or fp32, in the same order on all ranks."""
        return list_rests(self._chunks)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps of all optimizers: it seeds the rounding."""
        return {"num_steps": self._optimizers.num_steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the number of steps."""
        self._optimizers.num_steps = state_dict["num_steps"]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the dtype of the parameters that are still bf16, with exact weights, and detach the optimizers."""
        self._optimizers.remove_patches()
        for chunk in self._chunks:
            chunk.restore()
        self._optimizers.let_go()
        self._chunks = []


def _copy_values(chunk: WeightChunk, wanted: Iterable[Sequence[str]]) -> dict[str, Tensor]:
    """Copy exact weights to the host. Returning frees the chunk before the next is read."""
    copies = {}
    for keys, values in zip(wanted, chunk.views(chunk.read()), strict=True):
        if keys:
            copies.update(dict.fromkeys(keys, values.to("cpu", copy=True)))
    return copies


def _is_copy(value: Tensor, parameter: nn.Parameter) -> bool:
    """Whether both hold the same bits."""
    if value.dtype is not parameter.dtype or value.shape != parameter.shape:
        return False
    return torch.equal(value.to(parameter.device).view(torch.int16), parameter.detach().view(torch.int16))


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, storage_address(tensor), tensor.storage_offset(), tensor.shape
