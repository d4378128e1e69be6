"""What ``torch.compile`` leaves behind, and what keeps it away."""

from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._functorch import config

from lightning_vram.private_names.lightning.compile import is_compiled_by_lightning

__all__ = ["OptimizedModule"]

COMPILED_PART = "_orig_mod"
"""What ``torch.compile(module)`` puts between a module and its name."""

_AUTOCAST = "backward_pass_autocast"  # AOTAutograd's, not in all versions
has_backward_autocast = hasattr(config, _AUTOCAST)
read_backward_autocast = partial(getattr, config, _AUTOCAST, None)
set_backward_autocast = partial(setattr, config, _AUTOCAST)
"""``"off"``: what is compiled from now on has a backward that does not autocast."""


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile(module)`` was given; any other unchanged."""
    return module._orig_mod if isinstance(module, OptimizedModule) else module


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` or a part of it is compiled: by ``torch.compile(module)`` or ``module.compile()``.

    A LightningModule that was compiled and then given to a Trainer counts: Lightning compiles its steps. A
    compiled function that a step calls cannot be seen.
    """
    return is_compiled_by_lightning(module) or any(map(is_compiled_part, module.modules()))


def is_compiled_part(module: nn.Module) -> bool:
    """Whether ``module`` itself is compiled, by ``torch.compile(module)`` or ``module.compile()``."""
    return isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None


def modules_in_compiled(model: nn.Module) -> set[nn.Module]:
    """Return the modules of ``model`` that run in compiled code, the compiled ones themselves included."""
    if is_compiled_by_lightning(model):
        return set(model.modules())
    return {inner for part in model.modules() if is_compiled_part(part) for inner in part.modules()}


def is_left_to_python(function: Any) -> bool:
    """Whether ``torch.compiler.disable`` was called on ``function``."""
    return bool(getattr(function, "_torchdynamo_disable", False))


def skip_code(function: Callable[..., object]) -> bool:
    """Keep Dynamo off ``function`` and all that it calls; ``False`` if this torch has no switch for that."""
    frames = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    names = ("set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")
    if frames is None or not all(hasattr(frames, name) for name in names):
        return False
    code: CodeType = function.__code__
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    return True
