"""Recognise modules that ``torch.compile`` has a hand in."""

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` or a part of it is compiled: by ``torch.compile(module)`` or ``module.compile()``.

    A LightningModule that was compiled and then given to a Trainer counts: Lightning compiles its steps and leaves
    ``_compiler_ctx`` behind. A compiled function that a step calls cannot be seen.
    """
    if getattr(module, "_compiler_ctx", None) is not None:
        return True
    return any(
        isinstance(part, OptimizedModule) or getattr(part, "_compiled_call_impl", None) is not None
        for part in module.modules()
    )
