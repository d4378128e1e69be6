"""Which optimizers can step on shards."""

from torch import optim
from torch.optim import Optimizer

from lightning_vram.optimizers.stepping import STEPPABLE, plain_step
from lightning_vram.private_names.torch.optimizers import is_wrapped_by_scheduler

_WHOLE = (optim.Adafactor, optim.Muon)  # look at the rows and columns of a matrix
_NEVER = {
    optim.LBFGS: "it evaluates the model within a step, on one long vector of all parameters",
    optim.SparseAdam: "its gradients are sparse, which FSDP2 does not reduce",
}


def can_step_locally(optimizer: Optimizer) -> bool:
    """Whether the step of ``optimizer`` can be run on plain tensors that stand for its parameters."""
    known = {plain_step(kind) for kind in STEPPABLE}
    is_known = plain_step(type(optimizer)) in known
    return is_known and _has_own_step(optimizer) and not optimizer.defaults.get("differentiable")


def can_step_wholes(optimizer: Optimizer) -> bool:
    """Whether plain parameters may take the place of those of ``optimizer`` for a step.

    Not where its step was replaced, nor where it lets another optimizer step, which has the parameters, too.
    """
    others = (value for key, value in vars(optimizer).items() if key != "step")
    return _has_own_step(optimizer) and not any(isinstance(value, Optimizer) for value in others)


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


def _has_own_step(optimizer: Optimizer) -> bool:
    step = vars(optimizer).get("step")
    return step is None or is_wrapped_by_scheduler(step)
