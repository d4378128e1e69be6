"""What Lightning leaves behind where it compiles a module. Imports no Lightning: memory asks, too."""

from torch import nn

_STEPS = ("forward", "training_step", "validation_step", "test_step", "predict_step")


def is_compiled_by_lightning(module: nn.Module) -> bool:
    """Whether the steps of ``module`` are compiled: it was compiled before a Trainer got it."""
    return getattr(module, "_compiler_ctx", None) is not None


def forget_compiled_steps(module: nn.Module) -> None:
    """Let a copy of a module run its own code: the compiled steps that it was copied with are those of the original."""
    if is_compiled_by_lightning(module):
        for name in _STEPS:
            vars(module).pop(name, None)
        vars(module)["_compiler_ctx"] = None
