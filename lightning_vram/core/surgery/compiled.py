"""Recognise modules that ``torch.compile`` has a hand in."""

from torch import nn

from lightning_vram.private_names.lightning.compile import is_compiled_by_lightning
from lightning_vram.private_names.torch.compiled import is_compiled_part


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` or a part of it is compiled: by ``torch.compile(module)`` or ``module.compile()``.

    A LightningModule that was compiled and then given to a Trainer counts: Lightning compiles its steps. A
    compiled function that a step calls cannot be seen.
    """
    if is_compiled_by_lightning(module):
        return True
    return any(map(is_compiled_part, module.modules()))
