"""Moments in fewer bytes, beside parameters and gradients in float32: 4, 2.06 or 1.06 per weight for Adam's, not 8.

A step goes through torch's own kernel, over some million weights at a time, whose moments are float32 for as long, and
are rounded afterwards. That costs reading and writing the moments once more, and 12 bytes for each weight of a part.
Kernels that take moments in bfloat16 round them to the nearest, which loses what a decay of .999 moves. The
fused AdamW on the host is done in one pass, to the same bits, where there is a C compiler: no moment is float32 then.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_vram.optimizers.narrow.libraries import Library, LibraryForm, form_of
from lightning_vram.optimizers.on_host import NarrowStates, step_in_parts, widen_when_stepped
from lightning_vram.optimizers.stepping.state_forms import StateForm, find_unheld
from lightning_vram.optimizers.stepping.step_round import Member, StepRound
from lightning_vram.optimizers.stepping.steppable import iterate_parameters
from lightning_vram.optimizers.stepping.take_over import MembersStep, StepTakeOver
from lightning_vram.optimizers.stepping.update_check import UpdateCheck
from lightning_vram.private_names.torch.optimizers import note_step


class NarrowMoments(StepTakeOver):
    """Optimizers whose moments are in a form until :meth:`let_go`. They stay the same objects.

    Optimizers that are made in the midst of training are taken in when they step first.
    """

    def __init__(
        self, module: nn.Module, form: StateForm, library: Library = "own", check: UpdateCheck | None = None
    ) -> None:
        self._module, self._form, self._library, self._check = module, form, library, check
        self.unheld: set[nn.Parameter] = set()
        self._kept: dict[int, NarrowStates] = {}  # by id of the optimizer
        self._handles: list[RemovableHandle] = []
        super().__init__()

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Have the moments of optimizers in the form from now on, those that they have and those that they load."""
        form = self._form
        fresh = [one for one in optimizers if form.fits(one) and not self._is_taken(one)]
        everything = set(chain.from_iterable(map(iterate_parameters, fresh)))
        names = form.part, f"leave {form.part} out"
        self.unheld = find_unheld(*names, form, fresh, everything, is_late=bool(self._kept))
        forms = [form_of(self._library, form, optimizer) for optimizer in fresh]
        for optimizer, form in zip(fresh, forms, strict=True):
            states = NarrowStates(optimizer, form.takes, form, self._check)
            states.take_in(optimizer)
            self._kept[id(optimizer)] = states
            self._handles += [
                optimizer.register_load_state_dict_pre_hook(states.before_load),
                optimizer.register_load_state_dict_post_hook(states.take_in),
            ]
            self._take_over(optimizer)

    def let_go(self) -> None:
        """Let the optimizers step by themselves again: what they have then becomes float32."""
        self.end_standing_in()
        for handle in self._handles:
            handle.remove()
        for optimizer in self._taken:
            widen_when_stepped(optimizer)
        self._taken, self._stand_ins, self._handles, self._kept = [], [], [], {}

    def _has_ours(self, optimizer: Optimizer) -> bool:
        own = set(self._module.parameters())
        return self._form.fits(optimizer) and any(parameter in own for parameter in iterate_parameters(optimizer))

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        note_step(optimizer)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        step_round = StepRound(optimizer, is_on_host=False)
        self._step_members(optimizer, step_round, step_round.take_rest())
        return loss

    @override
    def members_step(self) -> MembersStep:
        return self._step_members

    def _step_members(self, optimizer: Optimizer, step_round: StepRound, members: Sequence[Member]) -> None:
        states = self._kept[id(optimizer)]
        states.adopt(members)
        step_round.run([member for member in members if not states.has(member.parameter)])
        ours = [member for member in members if states.has(member.parameter)]
        if isinstance(states.form, LibraryForm):
            states.form.step(step_round, ours)
        else:
            step_in_parts(step_round, states, ours)
