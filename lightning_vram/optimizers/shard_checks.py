"""Which optimizers can step on shards."""

from torch import optim
from torch.optim import Optimizer

from lightning_vram.optimizers.steppable import STEPPABLE, plain_step
from lightning_vram.private_names.optimizers import is_wrapped_by_scheduler

_WHOLE = (optim.Adafactor, optim.Muon)  # look at the rows and columns of a matrix
_NEVER = {
    optim.LBFGS: "it evaluates the model within a step, on one long vector of all parameters",
    optim.SparseAdam: "its gradients are sparse, which FSDP2 does not reduce",
}


def can_step_locally(optimizer: Optimizer) -> bool:
    """Whether the step of ``optimizer`` can be run on plain tensors that stand for its parameters."""
    step = vars(optimizer).get("step")
    is_own = step is None or is_wrapped_by_scheduler(step)
    known = {plain_step(kind) for kind in STEPPABLE}
    return is_own and plain_step(type(optimizer)) in known and not optimizer.defaults.get("differentiable")


def refuse_optimizer(optimizer: Optimizer, *, is_split: bool) -> None:
    """Refuse an optimizer whose result on shards would be another one.

    Args:
        optimizer: Any.
        is_split: Whether the parameters are spread over several ranks.

    Raises:
        ValueError: If it is such a one.
    """
    name = type(optimizer).__name__
    for kind, reason in _NEVER.items():
        if isinstance(optimizer, kind):
            raise ValueError(f"{name} cannot step on shards: {reason}. Use another optimizer, such as AdamW.")
    steps = {plain_step(kind) for kind in _WHOLE}
    if is_split and plain_step(type(optimizer)) in steps:
        raise ValueError(
            f"{name} cannot step on shards: it looks at the rows and columns of whole matrices. Use an optimizer that "
            "steps each element by itself, such as AdamW, or a single device."
        )
