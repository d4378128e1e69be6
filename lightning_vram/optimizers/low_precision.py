"""Low-precision moments: 4, 2.06 or 1.06 bytes per weight for Adam instead of 8.

A step runs torch's own kernel on parts of some million weights, with moments upcast to float32 and rounded afterwards:
12 bytes per weight of a part. Kernels with bf16 moments would round to nearest, and lose what a decay of .999 moves.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from typing_extensions import override

from lightning_vram.core.tensors.codecs import Bits, CodeMap, MappedTensor, empty_mapped
from lightning_vram.core.tensors.properties import is_shard
from lightning_vram.optimizers.moment_forms import (
    DIVISORS,
    LowBitForm,
    LowPrecisionStates,
    StateForm,
    UpdateCheck,
    find_unsupported,
    upcast_when_stepped,
)
from lightning_vram.optimizers.step_loop import step_in_parts
from lightning_vram.optimizers.step_plan import StepPlan
from lightning_vram.optimizers.step_round import (
    Member,
    State,
    StepRound,
    is_lion,
    iterate_parameters,
    make_proxy,
    make_twin,
    publish_state,
    steps_like,
    unhooked_step,
)
from lightning_vram.optimizers.take_over import MembersStep, StepTakeOver
from lightning_vram.private_names.dispatcher import FakeTensor, current_dispatch_mode

Library = Literal["auto", "own", "torchao", "bitsandbytes"]


class LibraryForm(LowBitForm):
    """Moments in the form of a library, whose kernels step them."""

    library: Library  # its name
    kinds: tuple[type[Optimizer], ...]  # optimizers whose step it has
    knows_lion = False  # of any package
    unable: tuple[str, ...] = ("amsgrad", "maximize", "fused", "capturable")  # settings that it does not know

    def __init__(self, bits: Bits) -> None:
        super().__init__("8bit" if bits == 8 else "4bit", bits)

    def why_not(self, optimizer: Optimizer) -> str | None:
        """Return what it cannot step; ``None``: it can."""
        name = type(optimizer).__name__
        if any(map(is_shard, iterate_parameters(optimizer))):
            return "sharded parameters"
        if not steps_like(type(optimizer), self.kinds) and not (self.knows_lion and is_lion(optimizer)):
            return name
        found = (f"{name}({key}={group[key]!r})" for group in optimizer.param_groups for key in self._odd(group))
        return next(found, None)

    def _odd(self, group: dict[str, Any]) -> list[str]:
        return [key for key in self.unable if group.get(key)]

    @override
    def holds(self, parameter: nn.Parameter) -> bool:
        return super().holds(parameter) and parameter.is_contiguous()

    @override
    def has(self, key: str, value: Tensor) -> bool:
        return isinstance(value, MappedTensor) and value.code_map is self.code_map(is_positive=key in DIVISORS)

    @override
    def empty(self, key: str, like: Tensor) -> MappedTensor:
        return empty_mapped(like, self.code_map(is_positive=key in DIVISORS))

    def code_map(self, *, is_positive: bool) -> CodeMap:
        """Return the meaning of codes."""
        raise NotImplementedError

    def step(self, step_round: StepRound, members: Sequence[Member]) -> None:
        """Step members with moments in this form."""
        step_round.scale(members)
        for member in members:
            settings = step_round.settings_of(member.group)
            with torch.no_grad():
                publish_state(member, self._step(member, settings))

    def _step(self, member: Member, settings: dict[str, Any]) -> State:
        """Step one member; return its state."""
        raise NotImplementedError

    def _begun(self, member: Member, keys: Sequence[str]) -> State:
        fresh = {key: self.empty(key, member.shard) for key in keys}
        return fresh | {key: value for key, value in member.local_state.items() if value is not None}


class BitsandbytesForm(LibraryForm):
    """Blocks of 256; the last one of a parameter may be smaller."""

    library: Library = "bitsandbytes"
    kinds, knows_lion = (Adam, AdamW, SGD), True
    unable = (*LibraryForm.unable, "nesterov", "dampening")

    @override
    def why_not(self, optimizer: Optimizer) -> str | None:
        return super().why_not(optimizer) if self.bits == 8 else f"moments of {self.bits} bits"

    @override
    def _odd(self, group: dict[str, Any]) -> list[str]:
        is_coupled = group.get("weight_decay") and not group.get("decoupled_weight_decay", True)
        return ["weight_decay"] if is_coupled else super()._odd(group)

    @override
    def code_map(self, *, is_positive: bool) -> CodeMap:
        return _map_of_bitsandbytes(is_positive)

    @override
    def _step(self, member: Member, settings: dict[str, Any]) -> State:
        is_sgd = "momentum" in settings
        keys = ["momentum_buffer"] if is_sgd else ["exp_avg", "exp_avg_sq"] if "eps" in settings else ["exp_avg"]
        is_first = not isinstance(member.local_state.get(keys[0]), Tensor)
        state = self._begun(member, keys)
        name, betas = {1: "momentum" if is_sgd else "lion", 2: "adam"}[len(keys)], settings.get("betas", (0.0, 0.0))
        count = 1
        if is_sgd:
            count, betas = 1 if is_first else 2, (settings["momentum"], 0.0)
        elif len(keys) == 2:
            state["step"] = torch.tensor(0.0) if is_first else state["step"]
            state["step"] += 1
            count = int(state["step"])
        first, second = state[keys[0]], state[keys[1]] if len(keys) == 2 else None
        maps = [None if one is None else one.code_map.on(one.device) for one in (first, second)]
        import_module("bitsandbytes.functional").optimizer_update_8bit_blockwise(
            name,
            member.gradient.contiguous().view(-1),
            member.shard.view(-1),
            first.records,
            None if second is None else second.records,
            *map(float, betas),
            *(0.0, 0.0),
            float(settings.get("eps", 0.0)),
            count,
            float(settings["lr"]),
            *maps,
            first.scales,
            None if second is None else second.scales,
            float(settings["weight_decay"]),
        )
        return state


class TorchaoForm(LibraryForm):
    """Blocks of 256 in 8 bits, of 128 in 4, for parameters of whole blocks. amsgrad fails in torchao 0.18."""

    library: Library = "torchao"
    kinds = (Adam, AdamW)

    @override
    def why_not(self, optimizer: Optimizer) -> str | None:
        if any("max_momentum" in group for group in optimizer.param_groups):  # of OneCycleLR and CyclicLR
            return f"{type(optimizer).__name__} whose betas a schedule moves, as each value would be compiled"
        return super().why_not(optimizer)

    @override
    def takes(self, parameter: nn.Parameter) -> bool:
        return super().takes(parameter) and parameter.numel() % self.code_map(is_positive=True).block_size == 0

    @override
    def code_map(self, *, is_positive: bool) -> CodeMap:
        return _map_of_torchao(self.bits, is_positive)

    @override
    def _step(self, member: Member, settings: dict[str, Any]) -> State:
        keys = ["exp_avg", "exp_avg_sq"]
        state: State = {"step": torch.tensor(0.0)} | self._begun(member, keys)
        proxy = make_proxy(member.shard, member.gradient)
        group = {**settings, "lr": torch.as_tensor(settings["lr"], dtype=torch.float32), "params": [proxy]}
        kind, attributes = _optimizer_of_torchao(self.bits)
        theirs = state | {key: self._as_theirs(state[key]) for key in keys}
        attributes = {**attributes, "is_adamw": settings.get("decoupled_weight_decay", True)}
        twin = make_twin(kind, attributes, [group], {proxy: theirs})
        # Compiled code refuses to run under a dispatch mode, such as one that counts memory.
        is_watched = current_dispatch_mode() is not None
        with torch.compiler.set_stance("force_eager") if is_watched else nullcontext():
            unhooked_step(kind)(twin)
        return state

    def _as_theirs(self, moment: MappedTensor) -> Any:
        """Return a tensor of torchao over the same memory."""
        values, is_signed = moment.code_map.on(moment.device), not moment.is_positive
        kind = import_module(f"torchao.optim.subclass_{self.bits}bit")
        if self.bits == 8:
            records = moment.records.view(moment.shape)
            return kind.OptimState8bit(records, moment.scales, values, is_signed, torch.float32)
        return kind.OptimState4bit(moment.records, moment.scales, values, is_signed, moment.shape, torch.float32)


@lru_cache
def _map_of_bitsandbytes(is_positive: bool) -> CodeMap:  # noqa: FBT001
    functional = import_module("bitsandbytes.functional")
    return CodeMap(functional.create_dynamic_map(signed=not is_positive), 256)


@lru_cache
def _map_of_torchao(bits: Bits, is_positive: bool) -> CodeMap:  # noqa: FBT001
    states, size = import_module(f"torchao.optim.subclass_{bits}bit"), 256 if bits == 8 else 128
    return CodeMap(getattr(states, f"OptimState{bits}bit").zeros((size,), not is_positive, size).qmap, size)


@lru_cache
def _optimizer_of_torchao(bits: Bits) -> tuple[type[Optimizer], dict[str, Any]]:
    """Return a class, and the attributes of its optimizers."""
    kind = getattr(import_module("torchao.optim"), f"AdamW{bits}bit")
    return kind, vars(kind([nn.Parameter(torch.empty(1, device="cpu"))]))


def why_not_installed(library: Library) -> str | None:
    """Return what to install; ``None``: nothing."""
    if library in ("auto", "own") or find_spec(library) is not None:
        return None
    return f"LowBitOptimizer(library={library!r}) needs {library}: pip install {library}."


def form_of(library: Library, form: StateForm, optimizer: Optimizer) -> StateForm:
    """Return the form of a library; ``"auto"``: bitsandbytes or torchao, on CUDA, if installed and able; or ours."""
    parameters = list(iterate_parameters(optimizer))
    if library == "own" or not isinstance(form, LowBitForm) or any(isinstance(p, FakeTensor) for p in parameters):
        return form  # estimates have no memory for kernels
    if library != "auto":
        named = _FORMS[library](form.bits)
        why = named.why_not(optimizer)
        if why is not None:
            raise ValueError(f"LowBitOptimizer(library={library!r}) cannot step {why}: use library='own'.")
        return named
    if any(p.device.type != "cuda" for p in parameters):
        return form
    installed = (kind(form.bits) for name, kind in _FORMS.items() if find_spec(name) is not None)
    return next((one for one in installed if one.why_not(optimizer) is None), form)


_FORMS: dict[str, type[BitsandbytesForm] | type[TorchaoForm]] = {
    "bitsandbytes": BitsandbytesForm,
    "torchao": TorchaoForm,
}


class LowPrecisionMoments(StepTakeOver):
    """Optimizers of a module with moments in a form, until :meth:`let_go`. They stay the same objects.

    Optimizers that are created during training are attached at their first step.
    """

    def __init__(
        self, module: nn.Module, form: StateForm, library: Library = "own", check: UpdateCheck | None = None
    ) -> None:
        self._module, self._form, self._library, self._check = module, form, library, check
        self.unheld: set[nn.Parameter] = set()  # trained parameters whose moments cannot have the form
        self._stored: dict[int, LowPrecisionStates] = {}  # by id of the optimizer
        self._plans: dict[int, StepPlan] = {}
        self._stepped: dict[int, list[int]] = {}  # parameters of the last step, by id, that no plan had
        super().__init__()

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Convert the moments of optimizers, now and after loading; refuse all if one cannot be stepped."""
        form = self._form
        fresh = [one for one in optimizers if form.fits(one) and not self._is_taken(one)]
        parameters = set(chain.from_iterable(map(iterate_parameters, fresh)))
        names = form.part, f"leave {form.part} out"
        self.unheld = find_unsupported(*names, form, fresh, parameters, is_late=bool(self._stored))
        forms = [form_of(self._library, form, optimizer) for optimizer in fresh]
        for optimizer, form in zip(fresh, forms, strict=True):
            states = LowPrecisionStates(optimizer, form.takes, form, self._check)
            states.take_in(optimizer)
            self._stored[id(optimizer)] = states
            self._handles += [
                optimizer.register_load_state_dict_pre_hook(states.before_load),
                optimizer.register_load_state_dict_post_hook(states.take_in),
            ]
            self._take_over(optimizer)

    def let_go(self) -> None:
        """Detach the optimizers; their next step upcasts the moments."""
        self.remove_patches()
        for optimizer in self._taken:
            upcast_when_stepped(optimizer)
        self._taken, self._stored, self._plans = [], {}, {}

    def _has_ours(self, optimizer: Optimizer) -> bool:
        own = set(self._module.parameters())
        return self._form.fits(optimizer) and any(parameter in own for parameter in iterate_parameters(optimizer))

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = self._run_closure(optimizer, closure)
        states, plan = self._stored[id(optimizer)], self._plans.get(id(optimizer))
        if plan is not None and not states.is_counting and plan.step():
            self._step_others(optimizer, plan.others)
        else:
            self._plans.pop(id(optimizer), None)
            members = self._step_others(optimizer, list(iterate_parameters(optimizer)))
            self._plan_next(optimizer, [member for member in members if states.has(member.parameter)])
        return loss

    def _step_others(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> list[Member]:
        if all(parameter.grad is None for parameter in parameters):
            return []
        step_round = StepRound(optimizer, is_on_host=False)
        members = step_round.take(parameters)
        self._step_members(optimizer, step_round, members)
        return members

    def _plan_next(self, optimizer: Optimizer, members: Sequence[Member]) -> None:
        """Plan the next steps once two in a row had the same members."""
        stepped = [id(member.parameter) for member in members]
        if self._stepped.get(id(optimizer)) == stepped:
            self._plans[id(optimizer)] = StepPlan(optimizer, members)
        self._stepped[id(optimizer)] = stepped

    @override
    def members_step(self) -> MembersStep:
        return self._step_members

    def _step_members(self, optimizer: Optimizer, step_round: StepRound, members: Sequence[Member]) -> None:
        states = self._stored[id(optimizer)]
        states.adopt(members)
        step_round.run([member for member in members if not states.has(member.parameter)])
        ours = [member for member in members if states.has(member.parameter)]
        if isinstance(states.form, LibraryForm):
            states.form.step(step_round, ours)
        else:
            step_in_parts(step_round, states, ours)
