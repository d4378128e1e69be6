"""Low-precision moments: 4, 2.06 or 1.06 bytes per weight for Adam instead of 8.

Parameters are stepped by compiled rows where these can run (``row_steps.py``). The others run torch's own kernel on
parts of some million weights (``step_loop.py``), with moments upcast to float32 and rounded afterwards: 12 bytes per
weight.
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
from lightning_vram.optimizers.row_steps import Rule, rule_of, step_rows
from lightning_vram.optimizers.step_loop import step_in_parts
from lightning_vram.optimizers.step_round import Member, StepRound, StepTakeOver, iterate_parameters


class LowPrecisionMoments(StepTakeOver):
    """Optimizers of a module with moments in a form, until :meth:`let_go`; those made in training, too."""

    def __init__(
        self, module: nn.Module, form: StateForm, library: Library = "own", check: UpdateCheck | None = None
    ) -> None:
        self._module, self._form, self._library, self._check = module, form, library, check
        self.unheld: set[nn.Parameter] = set()  # trained parameters whose moments cannot have the form
        self._stored: dict[int, LowPrecisionStates] = {}  # by id of the optimizer
        self._rules: dict[int, Rule | None] = {}  # by id of the optimizer
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
            self._rules[id(optimizer)] = None if isinstance(form, LibraryForm) else rule_of(optimizer)

    def let_go(self) -> None:
        """Detach the optimizers; their next step upcasts the moments."""
        self.remove_patches()
        for optimizer in self._taken:
            upcast_when_stepped(optimizer)
        self._taken, self._stored, self._rules = [], {}, {}

    def _has_ours(self, optimizer: Optimizer) -> bool:
        own = set(self._module.parameters())
        return self._form.fits(optimizer) and any(parameter in own for parameter in iterate_parameters(optimizer))

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = self._run_closure(optimizer, closure)
        step_round = StepRound(optimizer, is_on_host=False)
        self.step_members(optimizer, step_round, step_round.take_rest())
        return loss

    def step_members(self, optimizer: Optimizer, step_round: StepRound, members: Sequence[Member]) -> None:
        """Step a few parameters of an attached optimizer."""
        states = self._stored[id(optimizer)]
        states.adopt(members)
        step_round.run([member for member in members if not states.has(member.parameter)])
        ours = [member for member in members if states.has(member.parameter)]
        if isinstance(states.form, LibraryForm):
            states.form.step(step_round, ours)
            return
        if not states.check.is_counting:
            ours = step_rows(step_round, self._rules[id(optimizer)], ours)
        step_in_parts(step_round, states, ours)
