"""Refuse to train plain 16-bit weights with an optimizer that would lose most of its updates."""

from collections.abc import Iterable

import torch
from torch import optim
from torch.optim import Optimizer

from lightning_vram.optimizers.stepping import iterate_parameters, plain_step

_KINDS = [kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)]


def refuse_lost_updates(optimizers: Iterable[Optimizer]) -> None:
    """Raise if an optimizer of ``torch.optim`` would step 16-bit weights.

    Other optimizers are taken to know what they do, as are those that say that they round at random
    (``bf16_stochastic_round``) or compensate (``kahan_sum``).

    Args:
        optimizers: Before :class:`~lightning_vram.optimizers.lean.parameters.LeanParameters` is attached to them.

    Raises:
        ValueError: If one holds a trainable fp16 or bf16 parameter.
    """
    plain_steps = {plain_step(kind) for kind in _KINDS if kind is not Optimizer}
    for optimizer in optimizers:
        if plain_step(type(optimizer)) not in plain_steps or _has_remedy(optimizer):
            continue
        narrow = [p for p in iterate_parameters(optimizer) if p.requires_grad and p.dtype in _NARROW]
        if narrow:
            dtypes = " and ".join(sorted({str(parameter.dtype) for parameter in narrow}))
            raise ValueError(
                f"{type(optimizer).__name__} would train {len(narrow)} parameters that are {dtypes}, and lose every "
                "update below half a unit in the last place (in a test the loss ended at .105 instead of .0266). Use "
                'LeanMixedPrecision("bf16", parameters="bf16+split"), one of its other schemes, or fp32 weights.'
            )


_NARROW = (torch.bfloat16, torch.float16)


def _has_remedy(optimizer: Optimizer) -> bool:
    return bool(getattr(optimizer, "bf16_stochastic_round", False) or optimizer.defaults.get("kahan_sum"))
