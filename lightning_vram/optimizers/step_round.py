"""Step a few parameters of an optimizer at a time, on local shards, in any thread; replace the steps of optimizers.

``StepRound`` is one step in pieces. ``StepTakeOver`` replaces ``optimizer.step`` of attached optimizers, and of those
created during training. ``WholeSteps`` steps unknown classes.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from lightning_vram.core.gradients import apply_clip_factor
from lightning_vram.core.tensors.properties import stored_like
from lightning_vram.private_names import fsdp2
from lightning_vram.private_names.dispatcher import without_dispatch
from lightning_vram.private_names.torch import group_reader, is_initialized, is_wrapped_by_scheduler, local_shard_of
from lightning_vram.techniques.sharding import low_precision_of, scale_low_precision

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
WHOLE = (optim.Adafactor, optim.Muon)  # look at the rows and columns of a matrix
_NEVER = {
    optim.LBFGS: "it evaluates the model within a step, on one long vector of all parameters",
    optim.SparseAdam: "its gradients are sparse, which FSDP2 does not reduce",
}


def unhooked_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the ``step`` of an optimizer class without the hooks that ``Optimizer`` adds."""
    step: Any = kind.step
    unhooked: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return unhooked


def steps_like(kind: type[Optimizer], known: Iterable[type[Optimizer]]) -> bool:
    """Whether an optimizer class has the step of one of ``known``, which reads groups and creates states alike."""
    parts = unhooked_step(kind), group_reader(kind)
    return any(parts == (unhooked_step(one), group_reader(one)) for one in known)


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
    calls: list[None] = []  # of its closure, by which it is stepped here
    try:
        twin = make_twin(type(optimizer), vars(optimizer), [options], states)
        unhooked_step(type(optimizer))(twin, lambda: calls.append(None))
    except Exception:  # another Lion
        return False
    first, second = group["betas"]
    stepped = weights - 0.25 * average.lerp(gradient, 1 - first).sign()
    if not calls or not torch.allclose(proxy, stepped) or set(states[proxy]) != {"exp_avg"}:
        return False
    return torch.allclose(states[proxy]["exp_avg"], average.lerp(gradient, 1 - second))


def is_ruled(optimizer: Optimizer, settings: Mapping[str, Any]) -> bool:
    """Whether compiled rules know the settings of a group: ask before each step."""
    is_other = any(settings.get(name) for name in ("amsgrad", "differentiable", "capturable", "fixed_decay"))
    is_scaled = any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf"))
    values = (*settings.values(), *settings.get("betas", ()))
    if is_other or is_scaled or any(isinstance(one, Tensor) and one.device.type != "cpu" for one in values):
        return False
    return bool(settings.get("momentum", True) and settings.get("weight_decouple", True))


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
    if owner_of(optimizer) is not None or not has_own_step(optimizer):
        return (
            f"{action} this {name}: something else steps it already, as LeanMixedPrecision(parameters=...) and "
            "torch.compile do. Leave one of the two out."
        )
    return None


def refuse_optimizer(optimizer: Optimizer, *, is_split: bool) -> None:
    """Refuse an optimizer whose result on shards would differ; ``is_split``: shards are on several ranks."""
    name = type(optimizer).__name__
    reason = next((reason for kind, reason in _NEVER.items() if isinstance(optimizer, kind)), None)
    if not is_initialized(optimizer):
        reason = "it never called Optimizer.__init__ and cannot have hooks"
    if reason is not None:
        raise ValueError(f"{name} cannot step on shards: {reason}. Use another optimizer, such as AdamW.")
    if is_split and steps_like(type(optimizer), WHOLE):
        raise ValueError(
            f"{name} cannot step on shards: it looks at the rows and columns of whole matrices. Use an optimizer that "
            "steps each element by itself, such as AdamW, or a single device."
        )


def iterate_parameters(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    """Yield the parameters of all groups."""
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


State = dict[str, Any]


@dataclass(slots=True, eq=False)
class Member:
    """A parameter to step."""

    group: int  # index of its group in the optimizer
    number: int  # of the parameter in the optimizer
    parameter: nn.Parameter  # of the optimizer
    shard: Tensor  # its local tensor
    gradient: Tensor  # local tensor
    state: State  # of the optimizer; empty before the first step
    local_state: State  # local tensors over the same memory
    own_gradient: Tensor | None = None  # of the parameter, which may have lost it when it is stepped


KnownStates = dict[nn.Parameter, tuple[list[Any], State]]  # values of the optimizer, and local tensors


class StepRound:
    """One step, with the settings (such as learning rates) at the time this is created.

    The step runs on local tensors: an operator on a ``DTensor`` costs ten times as much for small parameters. On the
    host it uses the fused kernel if the user chose none by ``fused`` or ``foreach``: only this one reaches the memory
    bandwidth; its last bit differs from the others. Gradients are multiplied by ``factor`` first, in place. States of
    ``contiguous`` parameters are contiguous, whatever their own order in memory is. ``known``: of sharded parameters,
    kept from step to step, so that states are read again only if code has replaced them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        is_on_host: bool,
        factor: Tensor | None = None,
        contiguous: Container[nn.Parameter] = (),
        known: KnownStates | None = None,
    ) -> None:
        self.optimizer, self.factor = optimizer, factor
        self._known: KnownStates = {} if known is None else known
        self._attributes = dict(vars(optimizer))
        self._is_on_host, self._contiguous = is_on_host, contiguous
        self._groups = [_freeze(group) for group in optimizer.param_groups]
        self._left: dict[nn.Parameter, tuple[int, int]] = {}  # group and number
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                self._left[parameter] = index, len(self._left)

    def holds(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer has ``parameter``, and it was not taken yet."""
        return parameter in self._left

    def take(self, parameters: Iterable[nn.Parameter]) -> list[Member]:
        """Return the parameters with a gradient that were not taken yet. No step of them may be pending."""
        members = []
        for parameter in parameters:
            own_gradient = parameter.grad
            if own_gradient is None or parameter not in self._left:
                continue
            index, number = self._left.pop(parameter)
            state, is_sharded = self.optimizer.state[parameter], isinstance(parameter, DTensor)
            # Past the classes of shards and 16-bit gradients, by which a read would join or upcast them.
            shard = fsdp2.own_shard_of(parameter) if is_sharded else parameter
            gradient = fsdp2.own_shard_of(own_gradient) if isinstance(own_gradient, DTensor) else own_gradient
            values, local = self._known.get(parameter, ([], {}))
            if len(values) == len(state) > 0 and all(map(is_, values, state.values())):
                local = dict(local)
                if isinstance(step := state.get("step"), Tensor):
                    local["step"] = step.detach()  # its memory may be another
            else:
                local = self._read_state(index, parameter, shard)
                if is_sharded:
                    self._known[parameter] = [*state.values()], dict(local)
            members.append(Member(index, number, parameter, shard, gradient, state, local, own_gradient))
        return members

    def _read_state(self, index: int, parameter: nn.Parameter, shard: Tensor) -> State:
        state = self.optimizer.state[parameter]
        local = local_parts(parameter, state, shard, is_contiguous=parameter in self._contiguous)
        for key, value in local.items():
            is_other = isinstance(value, Tensor) and value.dim() and value.shape != shard.shape
            if is_other and self.settings_of(index).get("fused"):  # kernels that check no sizes
                check_state(self.optimizer, parameter, key, value)
        return local

    def take_rest(self) -> list[Member]:
        """Return all parameters with a gradient that were not taken yet."""
        return self.take(list(self._left))

    @torch.no_grad()
    def run(self, members: Sequence[Member]) -> None:
        """Step ``members``, and write their states to the optimizer."""
        self.scale(members)
        proxies = [make_proxy(one.shard, stored_like(one.gradient, one.shard)) for one in members]
        states = [dict(one.local_state) for one in members]
        self.step_proxies([one.group for one in members], proxies, states)
        for member, state in zip(members, states, strict=True):
            if [*map(id, state.values())] != [*map(id, member.local_state.values())]:
                publish_state(member, state)

    @torch.no_grad()
    def step_alone(self, parameter: nn.Parameter) -> None:
        """Step an unsharded parameter itself: a proxy takes 20 us more, if each parameter steps by itself."""
        index, _ = self._left.pop(parameter)
        kind, group = type(self.optimizer), {**self._groups[index], "params": [parameter]}
        unhooked_step(kind)(make_twin(kind, self._attributes, [group], self.optimizer.state))

    def scale(self, members: Sequence[Member]) -> None:
        """Multiply gradients by the factor, if there is one."""
        if self.factor is not None:
            pairs = ((one.gradient, one.own_gradient) for one in members)
            found = (own if own is not None and low_precision_of(own) is not None else one for one, own in pairs)
            scale_gradients(found, self.factor)

    @torch.no_grad()
    def step_proxies(self, groups: Sequence[int], proxies: Sequence[nn.Parameter], states: Sequence[State]) -> None:
        """Step local parameters of some groups, with states that change in place."""
        seen: dict[int, dict[str, Any]] = {}
        for index, proxy in zip(groups, proxies, strict=True):
            if index not in seen:  # some shards may stay on the device
                settings = self.settings_of(index) if proxy.device.type == "cpu" else self._groups[index]
                seen[index] = {**settings, "params": []}
            seen[index]["params"].append(proxy)
        all_states: defaultdict[Tensor, State] = defaultdict(dict, zip(proxies, states, strict=True))
        kind = type(self.optimizer)
        unhooked_step(kind)(make_twin(kind, self._attributes, list(seen.values()), all_states))

    def settings_of(self, index: int) -> dict[str, Any]:
        """Return the settings of a group in this step."""
        settings = self._groups[index]
        is_unnamed = settings.get("fused", False) is None and settings.get("foreach") is None
        is_fused = self._is_on_host and is_unnamed and not settings.get("differentiable")
        return settings | {"fused": True} if is_fused else settings


def scale_gradients(gradients: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply gradients, or their shards, by a scalar in place; 16-bit ones when they are read."""
    wide = []
    for gradient in gradients:
        if low_precision_of(gradient) is None:
            wide.append(fsdp2.local_shard(gradient))
        else:
            scale_low_precision(gradient, factor)
    apply_clip_factor(wide, factor)


def publish_state(member: Member, local: State) -> None:
    """Write a local state to the optimizer, in place: user code may hold the tensors, or may have replaced them."""
    for key, value in local.items():
        old = member.local_state.get(key)
        if value is old:
            continue
        if isinstance(old, Tensor) and isinstance(value, Tensor) and old.shape == value.shape:
            old.copy_(value)
        else:
            member.state[key] = as_sharded(value, member.parameter, member.shard.shape)


def local_parts(
    parameter: nn.Parameter, state: State, shard: Tensor | None = None, *, is_contiguous: bool = False
) -> State:
    """Return the local tensors of a state, for a step in another thread. Reading ``state`` blocks until that has ended.

    Tensors that user code wrote to it get the strides of the ``shard`` (or contiguous ones), as fused kernels check
    none; unsharded ones, whole or this rank's part, are sharded.
    """
    shard = fsdp2.stored_shard(parameter) if shard is None else shard
    local, is_sharded, is_plain = dict(state), isinstance(parameter, DTensor), shard.is_contiguous()
    for key, value in state.items():
        if not isinstance(value, Tensor):
            continue
        now = own = local_shard_of(value) if isinstance(value, DTensor) else value
        is_fresh = is_sharded and now is value and bool(value.dim())
        if is_fresh and value.shape == parameter.shape != shard.shape:
            now = fsdp2.cut_own_shard(value, cast(DTensor, parameter)).clone()
        is_alike = type(now) is Tensor and now.layout is torch.strided and now.shape == shard.shape
        if is_alike and not (is_plain and now.is_contiguous()):
            now = now.contiguous() if is_contiguous else stored_like(now, shard)
        if is_fresh or now is not own:
            state[key] = as_sharded(now, parameter, shard.shape)
        local[key] = now.detach() if is_sharded and now is state[key] else now
    return local


def check_state(optimizer: Optimizer, parameter: nn.Parameter, key: str, value: object) -> None:
    """Refuse a value that user code wrote to an elementwise state if its shape is wrong."""
    if isinstance(value, Tensor) and fsdp2.local_shard(value).shape == fsdp2.stored_shard(parameter).shape:
        return
    number = next(number for number, one in enumerate(iterate_parameters(optimizer)) if one is parameter)
    found = f"shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise ValueError(
        f"{type(optimizer).__name__}.state[parameter {number}][{key!r}] must be a tensor of shape "
        f"{list(parameter.shape)}, got {found}: write torch.zeros_like(parameter), or reset it with "
        "optimizer.state.pop(parameter)."
    )


def as_sharded(value: Any, parameter: nn.Parameter, shape: torch.Size) -> Any:
    """Shard a tensor of the local ``shape`` as ``parameter`` is; return other values unchanged."""
    if not (isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == shape):
        return value
    # DTensor.from_local would move it from the host to the device of the mesh.
    like = fsdp2.TensorMeta(parameter.shape, parameter.stride(), value.dtype)
    spec = fsdp2.DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=like)
    return DTensor(value, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def list_tensors(members: Iterable[Member]) -> list[Tensor]:
    """Return the gradients and states of a step, as user code sees them."""
    # Each state is copied at once: the submitted step may be adding to it.
    found = [value for one in members for value in (one.own_gradient, *one.state.values())]
    return [value for value in found if isinstance(value, Tensor)]


def make_proxy(shard: Tensor, gradient: Tensor) -> nn.Parameter:
    """Return a parameter over ``shard`` that has a gradient."""
    proxy = nn.Parameter(shard)
    proxy.grad = gradient
    return proxy


def _freeze(group: dict[str, Any]) -> dict[str, Any]:
    """Copy the settings of a group: schedulers change it."""
    settings = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items()}
    if any(dtype.is_complex for dtype in {parameter.dtype for parameter in settings.pop("params")}):
        # Fused kernels do not know them.
        settings["fused"] = bool(settings.get("fused"))
    return settings


_living: "WeakKeyDictionary[StepTakeOver, None]" = WeakKeyDictionary()  # in the order of their creation
_hooks: list[RemovableHandle] = []  # one, while there may be any


class StepTakeOver(ABC):
    """Steps attached optimizers in place of their class, and others from their first step on, until :meth:`release`."""

    def __init__(self) -> None:
        self._taken: dict[Optimizer, Any] = {}  # what this steps, with what a subclass needs for it
        self._handles: list[RemovableHandle] = []  # of hooks of optimizers
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_attach_new))
        _living[self] = None

    @abstractmethod
    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Call :meth:`_take` for those that this steps."""

    @abstractmethod
    def _has_ours(self, optimizer: Optimizer) -> bool:
        """Whether it has parameters that only this may step."""

    @abstractmethod
    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        """Step it; its hooks run before and after."""

    def release(self) -> list[Optimizer]:
        """Let all optimizers step and load by themselves again; return those that this has stepped."""
        for handle in self._handles:
            handle.remove()
        taken, self._taken, self._handles = list(self._taken), {}, []
        _living.pop(self, None)
        while _hooks and not _living:
            _hooks.pop().remove()
        return taken

    def _take(self, optimizer: Optimizer, needed: Any = None) -> None:
        self._taken[optimizer] = needed
        self._handles.append(optimizer.register_step_pre_hook(self._replace_step))

    def _replace_step(
        self, optimizer: Optimizer, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]] | None:
        """Replace a step that begins: it cannot be stopped, but a twin without parameters only calls its closure."""
        if owner_of(optimizer) is not self:
            return None
        step = partial(self._step, optimizer, args[1] if len(args) > 1 else kwargs.get("closure"))
        return (make_twin(type(optimizer), vars(optimizer), [], {}), torch.enable_grad()(step)), {}


def owner_of(optimizer: Optimizer) -> StepTakeOver | None:
    """Return the last object that took ``optimizer``, if it still has it."""
    return next((owner for owner in reversed(list(_living)) if optimizer in owner._taken), None)


def _attach_new(optimizer: Optimizer, args: Any, kwargs: dict[str, Any]) -> None:
    """Let an optimizer that was made meanwhile be taken before its first step: a hook of all steps."""
    if owner_of(optimizer) is None:
        for owner in list(_living):
            if owner._has_ours(optimizer):
                owner.attach([optimizer])


class WholeSteps:
    """Steps one optimizer that may look at shapes, on whole parameters over the same memory; others see shards.

    ``written`` is called before a closure runs the model: parameters may have been written by then.
    """

    def __init__(self, optimizer: Optimizer, written: Callable[[], None]) -> None:
        self._optimizer, self._written = optimizer, written
        self._proxies: dict[nn.Parameter, nn.Parameter] = {}  # reused: optimizers may hold more by parameter
        self._given: dict[nn.Parameter, Tensor | None] = {}  # gradients of proxies, when they were set

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
            step = unhooked_step(type(self._optimizer))
            return step(self._optimizer) if closure is None else step(self._optimizer, call_closure)
        finally:
            self._put_back()

    def _put_proxies(self) -> None:
        state = self._optimizer.state
        for parameter in [p for p in iterate_parameters(self._optimizer) if isinstance(p, DTensor)]:
            proxy = self._proxies.setdefault(parameter, nn.Parameter(fsdp2.local_shard(parameter)))
            proxy.data = fsdp2.local_shard(parameter)
            proxy.requires_grad_(parameter.requires_grad)
            proxy.grad = self._given[parameter] = fsdp2.local_shard(parameter.grad)
            if parameter in state:
                state[proxy] = {key: fsdp2.local_shard(value) for key, value in state.pop(parameter).items()}
        self._exchange(self._proxies)

    def _put_back(self) -> None:
        state = self._optimizer.state
        for parameter, given in self._given.items():
            proxy = self._proxies[parameter]
            if proxy.grad is not given:
                parameter.grad = as_sharded(proxy.grad, parameter, proxy.shape)
            proxy.grad = None
            if proxy in state:
                local = state.pop(proxy).items()
                state[parameter] = {key: as_sharded(value, parameter, proxy.shape) for key, value in local}
        self._given = {}
        self._exchange({proxy: parameter for parameter, proxy in self._proxies.items()})

    def _exchange(self, others: dict[nn.Parameter, nn.Parameter]) -> None:
        for group in self._optimizer.param_groups:
            group["params"] = [others.get(parameter, parameter) for parameter in group["params"]]
