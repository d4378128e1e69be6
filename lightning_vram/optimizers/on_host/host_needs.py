"""Count the host memory that a run needs, before it is allocated."""

import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_vram.optimizers.on_disk.layouts import find_layout, is_elementwise
from lightning_vram.optimizers.stepping.state_forms import FORMS, StateForm
from lightning_vram.optimizers.stepping.steppable import why_not_steppable
from lightning_vram.private_names.fsdp2.sharded_tensors import local_part

_NO_FORMS = (0,) * len(FORMS)


@dataclass(frozen=True)
class HostNeeds:
    """Bytes of host memory between steps."""

    weights: int = 0  # the shards
    low_precision_copies: int = 0  # 16-bit copies for transfers
    gradients: int = 0  # of trained weights
    states: int = 0  # of optimizers of known classes; 0 before they exist
    averages: int = 0  # of weights, for a callback
    can_be_16_bit: bool = True  # all weights have 32 bits: 16 bits would halve everything
    can_be_split: bool = False  # split weights would need no copies
    low_precision_states: tuple[int, ...] = _NO_FORMS  # states in each form of moments; 0 if unsupported

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return self.weights + self.low_precision_copies + self.gradients + self.states + self.averages

    def __add__(self, other: "HostNeeds") -> "HostNeeds":
        """Add another rank."""
        kinds = ("weights", "low_precision_copies", "gradients", "states", "averages")
        return HostNeeds(
            **{kind: getattr(self, kind) + getattr(other, kind) for kind in kinds},
            can_be_16_bit=self.can_be_16_bit and other.can_be_16_bit,
            can_be_split=self.can_be_split or other.can_be_split,
            low_precision_states=tuple(map(operator.add, self.low_precision_states, other.low_precision_states)),
        )


def count_host_needs(
    module: nn.Module,
    num_shards: int,
    narrow: Collection[str] = (),
    narrow_dtype: torch.dtype | None = None,
    averages: Iterable[nn.Module] = (),
) -> HostNeeds:
    """Count what one of ``num_shards`` ranks will have of an unsharded module, without optimizer state.

    ``narrow``: names of parameters with a copy of ``narrow_dtype``. ``averages``: whole copies that will be sharded.
    """
    needs = HostNeeds(
        averages=sum(
            numel * parameter.itemsize for one in averages for _, parameter, numel in _iterate_shards(one, num_shards)
        ),
        can_be_16_bit=all(p.dtype == torch.float32 for p in module.parameters()),
    )
    for name, parameter, numel in _iterate_shards(module, num_shards):
        num_bytes = numel * parameter.itemsize
        has_copy = narrow_dtype is not None and narrow_dtype != parameter.dtype and name in narrow
        if (parameter.dtype, narrow_dtype) == (torch.float32, torch.bfloat16) and not parameter.requires_grad:
            has_copy = False  # frozen ones are split
        needs += HostNeeds(
            weights=num_bytes,
            low_precision_copies=numel * narrow_dtype.itemsize if has_copy and narrow_dtype is not None else 0,
            gradients=num_bytes if parameter.requires_grad else 0,
            can_be_split=has_copy and narrow_dtype == torch.bfloat16,
        )
    return needs


def count_state_bytes(
    optimizers: Iterable[Optimizer], shards: Mapping[nn.Parameter, nn.Parameter], form: StateForm | None = None
) -> int:
    """Count optimizer state of trained weights on this rank; 0 for unknown classes."""
    return sum(sum(_iterate_states(one, shards, form)) for one in optimizers)


def add_states(
    needs: HostNeeds,
    optimizers: Sequence[Optimizer],
    shards: Mapping[nn.Parameter, nn.Parameter],
    form: StateForm | None,
) -> HostNeeds:
    """Add optimizer state, and what it would be in other forms."""
    states = count_state_bytes(optimizers, shards, form)
    others = tuple(
        count_state_bytes(optimizers, shards, one) if needs.can_be_16_bit and all(map(one.fits, optimizers)) else 0
        for one in FORMS.values()
    )
    can_be_16_bit = needs.can_be_16_bit and form is None  # a form is for float32 weights
    return replace(needs, states=states, low_precision_states=others, can_be_16_bit=can_be_16_bit)


def _iterate_shards(module: nn.Module, num_shards: int) -> Iterator[tuple[str, nn.Parameter, int]]:
    """Yield names and parameters that will be sharded, and the elements of a shard."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) or not parameter.dim() or not parameter.numel():
            continue  # scalars stay on the device
        yield name, parameter, math.ceil(parameter.shape[0] / num_shards) * (parameter.numel() // parameter.shape[0])


def _iterate_states(
    optimizer: Optimizer, shards: Mapping[nn.Parameter, nn.Parameter], form: StateForm | None
) -> Iterator[int]:
    if why_not_steppable(optimizer) is not None or not is_elementwise(type(optimizer)):
        return
    for group in optimizer.param_groups:
        parameters = [shards.get(parameter, parameter) for parameter in group["params"]]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        for dtype in {parameter.dtype for parameter in trained}:
            layout = replace(find_layout(optimizer, group, dtype), form=form if dtype == torch.float32 else None)
            sizes = (local_part(parameter).numel() for parameter in trained if parameter.dtype == dtype)
            yield sum(sum(layout.stored_bytes(size)) for size in sizes)
