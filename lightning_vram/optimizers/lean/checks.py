"""Which parameters can be stored in bf16, and which optimizers would lose updates."""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
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

from lightning_vram.core.tensors.layout import is_dense
from lightning_vram.core.tensors.versions import is_strided, storage_address
from lightning_vram.optimizers.stepping.steppable import iterate_parameters, steps_like
from lightning_vram.private_names.torch.dispatch import is_traceable_wrapper_subclass
from lightning_vram.private_names.torch.modules import forward_pre_hooks

_NARROW = (torch.bfloat16, torch.float16)
_DTYPES = (torch.float32, *_NARROW)
_KINDS = {kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)} - {Optimizer}


def check_parameter(parameter: nn.Parameter) -> None:
    """Refuse a parameter that cannot be converted in place without loss."""
    kind: Any = type(parameter)
    if issubclass(kind, DTensor) or isinstance(parameter.data, DTensor):
        raise ValueError(
            "Sharded parameters (FSDP2) cannot be stored in bfloat16: the shards are the fp32 master weights already. "
            "Give "
            "fully_shard(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)) to compute in 16 bits."
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
        has_remedy = getattr(optimizer, "bf16_stochastic_round", False) or optimizer.defaults.get("kahan_sum")
        if has_remedy or not steps_like(type(optimizer), _KINDS):
            continue
        narrow = [p for p in iterate_parameters(optimizer) if p.requires_grad and p.dtype in _NARROW]
        if narrow:
            dtypes = " and ".join(sorted({str(parameter.dtype) for parameter in narrow}))
            raise ValueError(
                f"{type(optimizer).__name__} would train {len(narrow)} parameters that are {dtypes}, and lose every "
                "update below half a unit in the last place (in a test the loss ended at .105 instead of .0266). Use "
                'LeanMixedPrecision("bf16", parameters="bf16+split"), one of its other schemes, or fp32 weights.'
            )
