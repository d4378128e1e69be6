"""Recompute norms and activations inside of compiled code, where no dispatch mode sees them.

``torch.utils.checkpoint`` in compiled code marks operators to be recomputed, fused into the kernels that read them; the
graph stays whole and the results bit-exact. Batch norms are left to the partitioner: marked, they cost memory (10.0
against 6.0 maps on four convolution blocks); it recomputes them itself once the activation behind them is marked.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_vram.core.patching import Swaps

_MODULES: tuple[type[nn.Module], ...] = (
    *(nn.LayerNorm, nn.RMSNorm, nn.GroupNorm),
    *(nn.CELU, nn.ELU, nn.GELU, nn.LeakyReLU, nn.Mish, nn.ReLU, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Tanh),
    *(nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh),
)
_FORWARDS = frozenset(vars(kind)["forward"] for kind in _MODULES)


def apply_compiled_recomputation(model: nn.Module) -> Swaps:
    """Let the norms and activations of ``model`` be recomputed in backward where they run compiled; return the undo.

    Eager code runs unchanged. Parts of ``model`` may be compiled before or after. Inside a checkpointed layer all is
    marked already.
    """
    handle = Swaps("_compiled_recomputation")
    for module in model.modules():
        is_stock = getattr(type(module), "forward", None) in _FORWARDS and "forward" not in vars(module)
        if is_stock and not getattr(module, "inplace", False):
            with suppress(ValueError):  # scripted, or taken by another technique
                handle.add(module, None, _run)
    return handle


def _run(module: nn.Module, state: None, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return original(*args, **kwargs)
    return checkpoint(original, *args, use_reentrant=False, **kwargs)
