"""Which modules compute a weight from their parameters, instead of using them as they are."""

from collections.abc import Iterator

from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightning_vram.private_names.torch.modules import forward_pre_hooks


def iterate_computing(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in ``module`` that compute a weight, and the parts that do it for them.

    Such computations want fp32: powers of matrices do not end well in 16 bits, and what they keep in buffers is fp32.

    Args:
        module: Any. Parametrizations are found (``torch.nn.utils.parametrize``), and the hooks of before
            (``torch.nn.utils.spectral_norm`` and ``weight_norm``); those of pruning, which masks, are not.
    """
    for part in module.modules():
        if is_parametrized(part):
            yield part
            yield from part.get_submodule("parametrizations").modules()
        elif any(isinstance(hook, SpectralNorm | WeightNorm) for hook in forward_pre_hooks(part).values()):
            yield part
