"""Which optimizers can step in chunks, on parameters that stand in for the real ones.

Those whose step treats each parameter by itself and looks only at its groups and its state: we have read them.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

from lightning_vram.private_names.torch.optimizers import is_wrapped_by_scheduler

STEPPABLE: tuple[type[Optimizer], ...] = (
    optim.Adadelta,
    optim.Adafactor,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.ASGD,
    optim.Muon,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)


def plain_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the ``step`` of an optimizer class as it was written, without the hooks that ``Optimizer`` adds."""
    step: Any = kind.step
    plain: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return plain


def why_not_steppable(optimizer: Optimizer) -> str | None:
    """Say why an optimizer cannot step in chunks, and the way out; ``None`` if it can.

    Its step has to be one of PyTorch's that treat each parameter by itself, and must be neither differentiable nor
    replaced on the instance.
    """
    name = type(optimizer).__name__
    if plain_step(type(optimizer)) not in {plain_step(kind) for kind in STEPPABLE}:
        able = ", ".join(kind.__name__ for kind in STEPPABLE)
        return (
            f"Lean parameters cannot be stepped by {name}: use one of torch.optim's {able}, a subclass with the same "
            'step, or parameters="fp32".'
        )
    if optimizer.defaults.get("differentiable"):
        return f"Lean parameters cannot be stepped by {name}(differentiable=True): leave that off."
    step = vars(optimizer).get("step")
    # The schedulers' wrapper only notes that the step was called. Ours notes it, too.
    if step is not None and not is_wrapped_by_scheduler(step):
        return (
            f"Lean parameters cannot be stepped by this {name}, because its step was replaced on the instance (by "
            "torch.compile?): replace it afterwards or not at all."
        )
    return None


def iterate_parameters(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    """Yield the parameters in all groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
