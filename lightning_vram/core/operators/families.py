"""Which operators are cheap to run again, and which write into their arguments."""

from collections.abc import Iterator
from enum import Enum, auto
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_vram.private_names.torch.operator_names import (
    BATCH_NORMS,
    ELEMENTWISE,
    GROWING,
    NORMS,
    SEVERAL_RESULTS,
    VIEWS,
)
from lightning_vram.private_names.torch.operators import BATCH_NORM, OpOverload, overload_name, schema_of

aten = torch.ops.aten


class Family(Enum):
    """The families of operators, by which recomputation treats them."""

    COSTLY = auto()  # or unknown: its results are kept
    ELEMENTWISE = auto()
    VIEW = auto()
    GROWING = auto()  # cheap, and its result may be larger than what it reads
    SEVERAL_RESULTS = auto()  # cheap; each result can be made again
    NORM = auto()  # cheap; the first result is the value, the others are small statistics
    BATCH_NORM = auto()  # a norm that moves running statistics
    DROPOUT = auto()
    BERNOULLI = auto()  # draws a mask of zeros and ones in place


_VIEWS = (
    "view t transpose permute expand squeeze unsqueeze slice select split split_with_sizes "
    "unbind detach alias narrow as_strided unfold view_as_real view_as_complex diagonal movedim unsafe_split "
    "unsafe_chunk unsafe_split_with_sizes"
)
# Reductions give little and are read by what follows; the others move or repeat numbers. No factories: ``zeros`` is
# what extensions write their results into, past all operators.
_OTHERS = (
    "mean sum amax amin var std linalg_vector_norm logsumexp argmax argmin any all glu "
    "avg_pool1d avg_pool2d avg_pool3d "
    "pixel_shuffle pixel_unshuffle channel_shuffle roll flip rot90 index_select gather tril triu "
    "index leaky_relu"  # of the last torch 2.11 does not say that it is pointwise
)
_GROWING = (
    "cat stack constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
    "replication_pad2d replication_pad3d upsample_nearest1d upsample_nearest2d upsample_nearest3d "
    "upsample_linear1d "
    "upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d repeat im2col embedding"
)
_SEVERAL_RESULTS = (
    "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d max min var_mean std_mean "
    "log_sigmoid_forward"
)
_NORMS = "native_layer_norm native_group_norm batch_norm_elemt"
_BATCH_NORMS = "native_batch_norm cudnn_batch_norm miopen_batch_norm"

# Activations whose in-place form gives the same bits: the last of a chain is made in the memory of the one before.
_OVERWRITING_ACTIVATIONS = "relu hardtanh silu leaky_relu hardswish elu gelu mish"


def _overloads(*names: str) -> list[Any]:
    packets = [getattr(aten, name) for name in " ".join(names).split() if hasattr(aten, name)]
    found = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return [function for function in found if not schema_of(function).is_mutable and _returns_tensors(function)]


def _returns_tensors(function: Any) -> bool:
    return all(str(result.type) in ("Tensor", "List[Tensor]") for result in schema_of(function).returns)


_FAMILIES: dict[Any, Family] = {
    **dict.fromkeys(_overloads(_VIEWS, VIEWS), Family.VIEW),
    **dict.fromkeys(_overloads(_OTHERS, ELEMENTWISE), Family.ELEMENTWISE),
    **dict.fromkeys(_overloads(_GROWING, GROWING), Family.GROWING),
    **dict.fromkeys(_overloads(_SEVERAL_RESULTS, SEVERAL_RESULTS), Family.SEVERAL_RESULTS),
    **dict.fromkeys(_overloads(_NORMS, NORMS), Family.NORM),
    # Its schema says that it writes to the running statistics, which a second run does not do.
    **dict.fromkeys([*_overloads(_BATCH_NORMS, BATCH_NORMS), BATCH_NORM], Family.BATCH_NORM),
    aten.native_dropout.default: Family.DROPOUT,
    aten.bernoulli_.float: Family.BERNOULLI,
}


@cache
def family_of(function: Any) -> Family:
    """Return the family of ``function``, an operator overload."""
    if not isinstance(function, OpOverload):
        return Family.COSTLY  # a higher-order operator
    known = _FAMILIES.get(function)
    if known is not None:
        return known
    tags = function.tags
    is_pointwise = torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    is_functional = function.namespace == "aten" and not schema_of(function).is_mutable
    one_new_result = (
        len(schema_of(function).returns) == 1
        and schema_of(function).returns[0].alias_info is None
        and _returns_tensors(function)
    )
    return Family.ELEMENTWISE if is_pointwise and is_functional and one_new_result else Family.COSTLY


_COMPARISONS = frozenset(
    ["eq", "ne", "lt", "gt", "ge", "le", "logical_and", "logical_or", "logical_xor", "logical_not"]
)  # give bool


@cache
def shares_version(function: Any) -> bool:
    """Whether autograd lets results share the version counter of the first argument, as views do."""
    return schema_of(function).returns[0].alias_info is not None


@cache
def functional_form(function: Any) -> Any | None:
    """Return the cheap operator that returns what ``function`` writes to its first argument: ``relu`` for ``relu_``."""
    name = schema_of(function).name.partition("::")[2]
    packet = getattr(aten, name[:-1], None) if name.endswith("_") and function.namespace == "aten" else None
    form = getattr(packet, overload_name(function), None) if packet is not None else None
    if form is None or family_of(form) is not Family.ELEMENTWISE or name[:-1] in _COMPARISONS:
        return None
    of_form, of_function = ([str(argument.type) for argument in schema_of(f).arguments] for f in (form, function))
    return form if of_form == of_function else None  # ``pow_.Scalar`` is not ``pow.Scalar``


@cache
def in_place_form(function: Any) -> Any | None:
    """Return the in-place operator of ``function``, an activation."""
    if function not in _ACTIVATIONS:
        return None
    return getattr(getattr(aten, schema_of(function).name.partition("::")[2] + "_"), overload_name(function))


_ACTIVATIONS = frozenset(_overloads(_OVERWRITING_ACTIVATIONS))


@cache
def written_arguments(function: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that ``function`` writes to. Keyword-only ones count on from the others."""
    if not isinstance(function, OpOverload):
        return ()
    arguments = schema_of(function).arguments
    if function.namespace == "c10d":  # collectives write without saying so, and without a new version
        return tuple(range(len(arguments)))
    return tuple(i for i, argument in enumerate(arguments) if argument.is_write)


def iterate_written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Iterator[Tensor]:
    """Yield the tensors that this call of ``function`` writes to."""
    for position in written_arguments(function):
        name = schema_of(function).arguments[position].name
        target = args[position] if position < len(args) else (kwargs or {}).get(name)
        for tensor in target if isinstance(target, list | tuple) else (target,):
            if isinstance(tensor, Tensor):
                yield tensor
            elif isinstance(tensor, list | tuple):  # c10d: lists of lists
                yield from (item for item in tensor if isinstance(item, Tensor))
