"""Recompute norms and activations inside of compiled code, where no dispatch mode sees them.

The compiler's partitioner decides what a compiled forward keeps, and keeps more than it must: the results of
LayerNorm and GELU, or both sides of a ReLU. A module that runs under ``torch.utils.checkpoint`` in compiled code is
not run twice as a whole: its operators are marked to be recomputed, fused into the kernels that read them. The graph
stays whole, and the results are those of the compiled run to the bit.

Batch norms are left to the partitioner: marked, they cost memory (10.0 against 6.0 maps on four convolution blocks
with inductor's decompositions); it recomputes them by itself once the activation behind them is marked.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_vram.core.patching import Swaps

_KEY = "_compiled_recomputation"

_NORMS: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
_ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.Mish,
    nn.ReLU,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Tanh,
)
_FORWARDS = frozenset(vars(kind)["forward"] for kind in (*_NORMS, *_ACTIVATIONS))


class CompiledRecomputationHandle(Swaps):
    """Undoes :func:`apply_compiled_recomputation`."""

    @property
    def num_modules(self) -> int:
        """Norms and activations that are recomputed where they are compiled."""
        return len(self.modules)


def apply_compiled_recomputation(model: nn.Module) -> CompiledRecomputationHandle:
    """Let the norms and activations of ``model`` be recomputed in backward where they run compiled.

    In eager code they run as they did. Modules inside of a layer that is checkpointed are left out: what marks them
    marks all of it already.

    Args:
        model: Any module; what is compiled, it or parts of it, may be compiled before or after.

    Returns:
        The undo.
    """
    handle = CompiledRecomputationHandle(_KEY)
    for module in model.modules():
        if (
            getattr(type(module), "forward", None) not in _FORWARDS
            or "forward" in vars(module)
            or getattr(module, "inplace", False)
        ):
            continue
        with suppress(ValueError):  # scripted, or taken by another technique
            handle.add(module, None, _run)
    return handle


def _run(module: nn.Module, state: None, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return plain(*args, **kwargs)
    return checkpoint(plain, *args, use_reentrant=False, **kwargs)
