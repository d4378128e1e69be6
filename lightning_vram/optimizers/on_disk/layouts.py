"""What an optimizer keeps for each weight, found without asking it for memory: a stand-in of six weights is stepped.

Whoever keeps the states somewhere else has to know their names and dtypes before the first step makes them, and that
the step treats each weight by itself, so that a parameter can be stepped in parts.
"""

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
_STAND_IN_SHAPE = (2, 3)  # nothing else in a state has this shape


@dataclass(frozen=True)
class StateLayout:
    """What is kept for one parameter."""

    # names and dtypes of the tensors that hold one number for each weight
    elementwise: tuple[tuple[str, torch.dtype], ...]
    others: tuple[str, ...]  # names of what is kept once for a parameter: its count of steps and the like
    form: StateForm | None = None  # of float32 moments where they are kept; ``None``: as they are

    def kept_bytes(self, count: int) -> list[int]:
        """Return the bytes that each of the tensors of so many weights takes where it is kept."""
        return [
            dtype.itemsize * count if (form := self.form_of(key)) is None else form.num_bytes(count)
            for key, dtype in self.elementwise
        ]

    def form_of(self, key: str) -> StateForm | None:
        """Return the form of one of the tensors."""
        return self.form if key in MOMENTS else None

    def slot(self, key: str, dtype: torch.dtype, memory: Tensor, count: int) -> Tensor:
        """Return one of the tensors, flat, over the bytes (uint8) of so many weights."""
        form = self.form_of(key)
        return memory.view(dtype) if form is None else form.over(key, memory, count)


def is_elementwise(kind: type[Optimizer]) -> bool:
    """Whether the step of an optimizer class treats each weight by itself: we have read those of PyTorch."""
    return steps_like(kind, _ELEMENTWISE)


def find_layout(optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype) -> StateLayout:
    """Find out what an optimizer keeps for a parameter; neither it nor any source of randomness is touched."""
    kind = type(optimizer)
    if not is_elementwise(kind):
        reasons = (why for whole, why in _WHOLE.items() if steps_like(kind, [whole]))
        raise _refusal(kind, next(reasons, "its step is not known to treat each weight by itself"))
    stand_in = nn.Parameter(torch.zeros(_STAND_IN_SHAPE, dtype=dtype, device="cpu"))
    stand_in.grad = torch.zeros_like(stand_in)
    twin = make_twin(kind, vars(optimizer), [{**group, "params": [stand_in]}], defaultdict(dict))
    if isinstance(optimizer, Adagrad):  # makes its state when it is built
        twin.state[stand_in] = {"step": torch.zeros((), device="cpu"), "sum": torch.zeros_like(stand_in)}
    with torch.no_grad():
        plain_step(kind)(twin)
    state: State = twin.state[stand_in]
    elementwise = {
        key: value for key, value in state.items() if isinstance(value, Tensor) and value.shape == stand_in.shape
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
