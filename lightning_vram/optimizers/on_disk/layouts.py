"""What an optimizer stores for each weight, found by a step of six weights."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adafactor, Adagrad, Muon, Optimizer

from lightning_vram.optimizers.stepping.state_forms import MOMENTS, StateForm
from lightning_vram.optimizers.stepping.step_round import State
from lightning_vram.optimizers.stepping.steppable import STEPPABLE, make_twin, plain_step, steps_like

_WHOLE: dict[type[Optimizer], str] = {
    Adafactor: "it keeps sums over rows and columns of whole matrices",
    Muon: "it steps whole matrices",
}
_ELEMENTWISE = tuple(kind for kind in STEPPABLE if kind not in _WHOLE)
_PROXY_SHAPE = (2, 3)  # nothing else in a state has this shape


@dataclass(frozen=True)
class StateLayout:
    """The optimizer state of one parameter."""

    elementwise: tuple[tuple[str, torch.dtype], ...]  # names and dtypes of tensors with one number per weight
    others: tuple[str, ...]  # names of values per parameter, such as the step count
    form: StateForm | None = None  # of stored float32 moments; ``None``: unchanged

    def stored_bytes(self, count: int) -> list[int]:
        """Return the stored bytes of each elementwise tensor of so many weights."""
        return [
            dtype.itemsize * count if (form := self.form_of(key)) is None else form.num_bytes(count)
            for key, dtype in self.elementwise
        ]

    def form_of(self, key: str) -> StateForm | None:
        """Return the form of an elementwise tensor."""
        return self.form if key in MOMENTS else None

    def slot(self, key: str, dtype: torch.dtype, memory: Tensor, count: int) -> Tensor:
        """Return a flat elementwise tensor over its bytes (uint8)."""
        form = self.form_of(key)
        return memory.view(dtype) if form is None else form.over(key, memory, count)


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Whether a class steps each weight by itself, so that a parameter can be stepped in parts."""
    return steps_like(kind, _ELEMENTWISE)


def find_layout(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> StateLayout:
    """Return what an optimizer stores for a parameter after the first step; uses no random numbers."""
    kind = type(optimizer)
    if not is_elementwise(kind):
        reasons = (why for whole, why in _WHOLE.items() if steps_like(kind, [whole]))
        raise _refusal(kind, next(reasons, "its step is not known to treat each weight by itself"))
    proxy = nn.Parameter(torch.zeros(_PROXY_SHAPE, dtype=dtype, device="cpu"))
    proxy.grad = torch.zeros_like(proxy)
    twin = make_twin(kind, vars(optimizer), [{**group, "params": [proxy]}], defaultdict(dict))
    if isinstance(optimizer, Adagrad):  # creates its state in __init__
        twin.state[proxy] = {"step": torch.zeros((), device="cpu"), "sum": torch.zeros_like(proxy)}
    with torch.no_grad():
        plain_step(kind)(twin)
    state: State = twin.state[proxy]
    elementwise = {
        key: value for key, value in state.items() if isinstance(value, Tensor) and value.shape == proxy.shape
    }
    others = {key: value for key, value in state.items() if key not in elementwise}
    odd = [key for key, value in others.items() if isinstance(value, Tensor) and value.numel() != 1]
    if odd:
        raise _refusal(kind, f"{', '.join(odd)} has neither the shape of the parameter nor one element")
    return StateLayout(tuple((key, value.dtype) for key, value in elementwise.items()), tuple(others))


def _refusal(kind: type[Optimizer], why: str) -> ValueError:
    able = ", ".join(known.__name__ for known in _ELEMENTWISE)
    return ValueError(
        f"nvme_path cannot hold the optimizer state of {kind.__name__}: {why}; use one of torch.optim's {able}, "
        "or leave nvme_path out."
    )
