"""Step an optimizer of an unknown class on a sharded module."""

import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_vram.optimizers.stepping.step_round import State, as_sharded
from lightning_vram.optimizers.stepping.steppable import has_own_step, iterate_parameters, plain_step
from lightning_vram.private_names.fsdp2.sharded_tensors import local_part


def can_step_wholes(optimizer: Optimizer) -> bool:
    """Whether its step is its own: an optimizer within it would have the parameters, too."""
    others = (value for key, value in vars(optimizer).items() if key != "step")
    return has_own_step(optimizer) and not any(isinstance(value, Optimizer) for value in others)


class WholeSteps:
    """Steps one optimizer that may look at shapes: on whole parameters over the same memory.

    Outside its own code, groups and state hold sharded tensors.

    ``written`` is called before a closure runs the model: parameters may have been written by then.
    """

    def __init__(self, optimizer: Optimizer, written: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._written = written
        self._proxies: dict[nn.Parameter, nn.Parameter] = {}  # reused: optimizers may hold more by parameter
        self._given: dict[nn.Parameter, Tensor | None] = {}  # gradients of proxies, when they were set
        self._states: dict[nn.Parameter, State] = {}  # of the optimizer, during a step

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run the step as its class has it, without hooks. Its closure sees shards."""

        def call_closure() -> Any:
            assert closure is not None
            self._put_back()
            try:
                self._written()
                with torch.enable_grad():
                    return closure()
            finally:
                self._put_proxies()

        self._put_proxies()
        try:
            step = plain_step(type(self._optimizer))
            return step(self._optimizer) if closure is None else step(self._optimizer, call_closure)
        finally:
            self._put_back()

    def _put_proxies(self) -> None:
        state = self._optimizer.state
        sharded = [p for p in iterate_parameters(self._optimizer) if isinstance(p, DTensor)]
        for parameter in sharded:
            proxy = self._proxies.setdefault(parameter, nn.Parameter(local_part(parameter)))
            proxy.data = local_part(parameter)
            proxy.requires_grad_(parameter.requires_grad)
            proxy.grad = self._given[parameter] = local_part(parameter.grad)
            if parameter in state:
                own = self._states[parameter] = state.pop(parameter)
                state[proxy] = {key: local_part(value) for key, value in own.items()}
        self._exchange(self._proxies)

    def _put_back(self) -> None:
        state = self._optimizer.state
        for parameter, given in self._given.items():
            proxy = self._proxies[parameter]
            if proxy.grad is not given:
                parameter.grad = as_sharded(proxy.grad, parameter, proxy.shape)
            proxy.grad = None
            before = self._states.pop(parameter, {})
            if proxy in state:
                now = state.pop(proxy)
                fresh = {key: as_sharded(value, parameter, proxy.shape) for key, value in now.items()}
                known = {key: value for key, value in before.items() if key in now and local_part(value) is now[key]}
                state[parameter] = fresh | known
        self._given = {}
        self._exchange({proxy: parameter for parameter, proxy in self._proxies.items()})

    def _exchange(self, others: dict[nn.Parameter, nn.Parameter]) -> None:
        for group in self._optimizer.param_groups:
            group["params"] = [others.get(parameter, parameter) for parameter in group["params"]]


def explain_failures(optimizer: Optimizer, *, is_split: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a patch of the step that explains errors of sharded tensors."""
    advice = "such as AdamW, or a single device" if is_split else "such as AdamW"
    message = (
        f"{type(optimizer).__name__} cannot step on shards: it does with a parameter what a sharded one cannot do. Use "
        f"an optimizer of torch.optim that steps each element by itself, {advice}."
    )
    return partial(_make_step, message)


def _make_step(message: str, inner: Callable[..., Any]) -> Callable[..., Any]:
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
            modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__))
            # An error raised in C++ has no such frame, but names the class.
            is_sharding = "DTensor" in str(error) or any(name.startswith(DTensor.__module__) for name in modules)
            if error in of_model or not is_sharding:
                raise
            raise ValueError(message) from error

    return step
