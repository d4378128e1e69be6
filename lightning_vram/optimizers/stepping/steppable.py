"""Which optimizers can step a few proxy parameters at a time."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

from lightning_vram.private_names.torch.dispatch import without_dispatch
from lightning_vram.private_names.torch.optimizers import is_wrapped_by_scheduler

# Their step treats each parameter by itself and reads only groups and state: we have read their code.
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
_WHOLE = (optim.Adafactor, optim.Muon)  # look at the rows and columns of a matrix
_NEVER = {
    optim.LBFGS: "it evaluates the model within a step, on one long vector of all parameters",
    optim.SparseAdam: "its gradients are sparse, which FSDP2 does not reduce",
}


def plain_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the ``step`` of an optimizer class without the hooks that ``Optimizer`` adds."""
    step: Any = kind.step
    plain: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return plain


def steps_like(kind: type[Optimizer], known: Iterable[type[Optimizer]]) -> bool:
    """Whether an optimizer class has the step of one of ``known``."""
    return plain_step(kind) in {plain_step(one) for one in known}


def has_own_step(optimizer: Optimizer) -> bool:
    """Whether the step of ``optimizer`` is that of its class."""
    step = vars(optimizer).get("step")
    # The wrapper of schedulers only records the call; our steps record it, too.
    return step is None or is_wrapped_by_scheduler(step)


def is_lion(optimizer: Optimizer) -> bool:
    """Whether a class ``Lion`` of any package steps as in Chen et al. (2023): compared on six weights."""
    kind = type(optimizer)
    if kind.__name__ != "Lion" or not all("betas" in group for group in optimizer.param_groups):
        return False
    with without_dispatch(), torch.no_grad():
        return all(_steps_as_lion(optimizer, group) for group in optimizer.param_groups)


def _steps_as_lion(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    weights = torch.linspace(-1, 1.5, 6, device="cpu").view(2, 3)
    gradient, average = weights.flip(1) * 3, weights.sin()
    proxy = nn.Parameter(weights.clone())
    proxy.grad = gradient.clone()
    options = {**group, "params": [proxy], "lr": 0.25, "weight_decay": 0.0}
    states = defaultdict(dict, {proxy: {"exp_avg": average.clone()}})
    try:
        plain_step(type(optimizer))(make_twin(type(optimizer), vars(optimizer), [options], states))
    except Exception:  # another Lion
        return False
    first, second = group["betas"]
    stepped = weights - 0.25 * average.lerp(gradient, 1 - first).sign()
    is_same = torch.allclose(proxy, stepped)
    known = set(states[proxy]) == {"exp_avg"}
    return is_same and known and torch.allclose(states[proxy]["exp_avg"], average.lerp(gradient, 1 - second))


def make_twin(kind: type[Optimizer], attributes: Mapping[str, Any], groups: list[dict[str, Any]], state: Any) -> Any:
    """Return an optimizer with the ``attributes`` of another one, but its own groups and state."""
    twin = object.__new__(kind)
    vars(twin).update(attributes, param_groups=groups, state=state)
    return twin


def why_not_steppable(
    optimizer: Optimizer, action: str = "bfloat16 parameters cannot be stepped by", way_out: str = 'parameters="fp32"'
) -> str | None:
    """Return why an optimizer cannot step a few parameters at a time, and the way out; ``None`` if it can."""
    name = type(optimizer).__name__
    if not steps_like(type(optimizer), STEPPABLE) and not is_lion(optimizer):
        able = ", ".join(kind.__name__ for kind in STEPPABLE)
        return f"{action} {name}: use one of torch.optim's {able}, a subclass with the same step, or {way_out}."
    if optimizer.defaults.get("differentiable"):
        return f"{action} {name}(differentiable=True): leave that off."
    if not has_own_step(optimizer):
        return (
            f"{action} this {name}, because its step was replaced on the instance (by torch.compile?): replace it "
            "afterwards or not at all."
        )
    return None


def refuse_optimizer(optimizer: Optimizer, *, is_split: bool) -> None:
    """Refuse an optimizer whose result on shards would differ; ``is_split``: shards are on several ranks."""
    name = type(optimizer).__name__
    for kind, reason in _NEVER.items():
        if isinstance(optimizer, kind):
            raise ValueError(f"{name} cannot step on shards: {reason}. Use another optimizer, such as AdamW.")
    if is_split and steps_like(type(optimizer), _WHOLE):
        raise ValueError(
            f"{name} cannot step on shards: it looks at the rows and columns of whole matrices. Use an optimizer that "
            "steps each element by itself, such as AdamW, or a single device."
        )


def iterate_parameters(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    """Yield the parameters of all groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
