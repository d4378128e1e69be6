"""Low-precision moments: 4, 2.06 or 1.06 bytes per weight for Adam instead of 8.

Steps are planned where compiled rows can run (``row_steps.py``). The others run torch's own kernel on parts of some
million weights (``step_loop.py``), with moments upcast to float32 and rounded afterwards: 12 bytes per weight.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_vram.optimizers.library_moments import Library, LibraryForm, form_of
from lightning_vram.optimizers.moment_forms import (
    LowPrecisionStates,
    StateForm,
    UpdateCheck,
    find_unsupported,
    upcast_when_stepped,
)
from lightning_vram.optimizers.row_steps import StepPlan, can_run, compile_ahead, rule_of
from lightning_vram.optimizers.step_loop import step_in_parts
from lightning_vram.optimizers.step_round import Member, StepRound, StepTakeOver, is_ruled, iterate_parameters


class LowPrecisionMoments(StepTakeOver):
    """Optimizers of a module with moments in a form, until :meth:`let_go`; those made in training, too."""

    def __init__(
        self, module: nn.Module, form: StateForm, library: Library = "own", check: UpdateCheck | None = None
    ) -> None:
        self._module, self._form, self._library, self._check = module, form, library, check
        self.unheld: set[nn.Parameter] = set()  # trained parameters whose moments cannot have the form
        self._stored: dict[int, LowPrecisionStates] = {}  # by id of the optimizer
        self._plans: dict[int, StepPlan] = {}
        super().__init__()

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Convert the moments of optimizers, now and after loading; refuse all if one cannot be stepped."""
        form = self._form
        fresh = [one for one in optimizers if form.fits(one) and one not in self._taken]
        parameters = set(chain.from_iterable(map(iterate_parameters, fresh)))
        names = form.part, f"leave {form.part} out"
        self.unheld = find_unsupported(*names, form, fresh, parameters, is_late=bool(self._stored))
        forms = [form_of(self._library, form, optimizer) for optimizer in fresh]
        for optimizer, form in zip(fresh, forms, strict=True):
            states = LowPrecisionStates(optimizer, form.takes, form, self._check)
            self._handles += states.begin()
            self._stored[id(optimizer)] = states
            self._take_over(optimizer)
            groups = () if isinstance(form, LibraryForm) else optimizer.param_groups
            ruled = chain.from_iterable(group["params"] for group in groups if is_ruled(optimizer, group))
            for device in {parameter.device for parameter in filter(form.takes, ruled)}:
                compile_ahead(device, rule_of(optimizer), form)

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
        plan, is_counting = self._plans.pop(id(optimizer), None), self._stored[id(optimizer)].check.is_counting
        if plan is not None and not is_counting and plan.step():
            self._plans[id(optimizer)] = plan
            if any(parameter.grad is not None for parameter in plan.others):
                step_round = StepRound(optimizer, is_on_host=False)
                self.step_members(optimizer, step_round, step_round.take(plan.others))
            return loss
        plan = None  # frees memory of earlier moments
        step_round = StepRound(optimizer, is_on_host=False)
        members = step_round.take_rest()
        if not is_counting and any(map(can_run, {member.shard.device for member in members})):
            members = self._step_planned(optimizer, members)
        self.step_members(optimizer, step_round, members)
        return loss

    def _step_planned(self, optimizer: Optimizer, members: Sequence[Member]) -> list[Member]:
        """Step the members that can be planned, and keep the plan; return the others."""
        states = self._stored[id(optimizer)]
        states.adopt(members)
        # Whether a step is planned depends on states alone, or a resumed run might round otherwise on a GPU.
        ours = [member for member in members if states.has(member.parameter)]
        plan, has_begun = StepPlan(optimizer, ours), all(member.state for member in ours)
        if not plan.step():
            return list(members)
        if has_begun:  # otherwise more will be planned in the next step
            self._plans[id(optimizer)] = plan
        others = set(plan.others)
        return [member for member in members if member.parameter in others]

    def step_members(self, optimizer: Optimizer, step_round: StepRound, members: Sequence[Member]) -> None:
        """Step a few parameters of an attached optimizer."""
        states = self._stored[id(optimizer)]
        states.adopt(members)
        step_round.run([member for member in members if not states.has(member.parameter)])
        ours = [member for member in members if states.has(member.parameter)]
        if isinstance(states.form, LibraryForm):
            states.form.step(step_round, ours)
        else:
            step_in_parts(step_round, states, ours)
