"""Let an optimizer that nobody has read step on sharded tensors, and say so where they cannot do what it asks."""

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

Step = Callable[..., Any]


def explain_failures(optimizer: Optimizer, *, is_split: bool) -> Callable[[Step], Step]:
    """Return what makes a step of ``optimizer`` another one that is the same until it fails.

    Args:
        optimizer: Of any class.
        is_split: Whether the parameters are spread over several ranks.
    """
    advice = "such as AdamW, or a single device" if is_split else "such as AdamW"
    message = (
        f"{type(optimizer).__name__} cannot step on shards: it does with a parameter what a sharded one cannot do. Use "
        f"an optimizer of torch.optim that steps each element by itself, {advice}."
    )
    return partial(_make_step, message)


def _make_step(message: str, inner: Step) -> Step:
    def step(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        of_model: list[Exception] = []

        def call_closure() -> Any:
            assert closure is not None
            try:
                return closure()
            except Exception as error:
                of_model.append(error)
                raise

        try:
            return inner(*args, **kwargs) if closure is None else inner(call_closure, *args, **kwargs)
        except Exception as error:
            if error in of_model or not _is_of_sharded_tensors(error):
                raise
            raise ValueError(message) from error

    return step


def _is_of_sharded_tensors(error: Exception) -> bool:
    modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
    # What comes from C++ has no such frame, but names the class.
    return "DTensor" in str(error) or any(module.startswith(DTensor.__module__) for module in modules)
