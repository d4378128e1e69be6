"""Which weights autocast casts to 16 bit at every use, and never reads otherwise: they need not come in 32 bit."""

from collections import Counter
from collections.abc import Collection

import torch
from torch import nn

from lightning_vram.private_names.torch.modules import own_parameters
from lightning_vram.techniques.mixed_precision.autocast_weights import find_places

_BIASES = {"weight": "bias", "in_proj_weight": "in_proj_bias"}


def find_narrow_weights(module: nn.Module, leave_out: Collection[nn.Module] = ()) -> set[nn.Parameter]:
    """Return the float32 weights and biases that stock layers of ``module`` read under autocast, and nobody else.

    Those of linear layers, convolutions, attention and transformers' ``Conv1D``. A weight with several owners is not
    among them: a tied embedding is read in float32. What is used by name elsewhere, past the layer, is not seen.

    Args:
        module: Any module.
        leave_out: Modules that compute in float32.
    """
    owners = Counter(id(p) for part in module.modules() for p in own_parameters(part).values() if p is not None)
    narrow: set[nn.Parameter] = set()
    for part in module.modules():
        if part in leave_out:
            continue
        for child, name in find_places(part, leave_out):
            holder = part if child is None else part.get_submodule(child)
            found = [own_parameters(holder).get(name), own_parameters(holder).get(_BIASES.get(name, ""))]
            narrow.update(p for p in found if p is not None and p.dtype is torch.float32 and owners[id(p)] == 1)
    return narrow
