"""Step each parameter in the backward of a closure, and free its gradient.

Prior art: LOMO (arXiv:2306.09782), ``torch.distributed.optim._apply_optimizer_in_backward``, torchtune's
``OptimizerInBackwardWrapper``; those change the optimizer that users, schedulers and checkpoints see.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_vram.core.gradients.clipping import join_norms, norm_part
from lightning_vram.core.surgery.shadow import Shadow
from lightning_vram.core.tensors.shards import is_shard
from lightning_vram.optimizers.in_backward.accumulation import refuse_accumulation, take_in
from lightning_vram.optimizers.in_backward.buckets import ReducedBuckets
from lightning_vram.optimizers.in_backward.one_step import Clipping, OneStep
from lightning_vram.optimizers.stepping.steppable import (
    has_own_step,
    iterate_parameters,
    refuse_optimizer,
    why_not_steppable,
)
from lightning_vram.optimizers.stepping.take_over import MembersStep, StepTakeOver, owner_of
from lightning_vram.private_names.torch.optimizers import note_step

NAME = "OptimizerInBackward"


class BackwardSteps(StepTakeOver):
    """Optimizers that step in the backward of their closure, until :meth:`let_go`. They stay the same objects.

    A backward outside a closure accumulates gradients as usual; gradients that are left are stepped with at the end of
    the step. Under ``DistributedDataParallel`` parameters step when their bucket is reduced.

    ``may_be_early`` gets the closure before a step and returns whether gradients may be used as soon as they exist;
    otherwise parameters step one by one after the closure. ``None``: never. Without ``keeps_gradients``, moments
    accumulate the gradients (approximate).
    """

    def __init__(
        self,
        module: nn.Module,
        clipping: Clipping,
        *,
        may_be_early: Callable[[Any], bool] | None = lambda closure: True,
        keeps_gradients: bool = True,
    ) -> None:
        self._module = module
        self._clipping = clipping
        self._may_be_early = may_be_early
        self._keeps_gradients = keeps_gradients
        self._groups: dict[nn.Parameter, dict[str, Any]] = {}  # during a backward whose moments accumulate gradients
        self._taken_in: set[nn.Parameter] = set()  # since the last step
        self._stepped: set[nn.Parameter] = set()  # in any step
        self.has_zeros = False  # set if gradients are zeroed in place: stepped parameters always have one
        self._handles: dict[nn.Parameter, RemovableHandle] = {}
        self._owners: dict[nn.Parameter, Optimizer] = {}
        self._steps_of_others: dict[int, MembersStep | None] = {}  # by id of the optimizer
        self._current: OneStep | None = None
        self._again: Callable[[], None] | None = None  # runs the measured backward a second time
        self._buckets: ReducedBuckets | None = None
        self.previous_norm: Tensor | None = None
        super().__init__()
        if may_be_early is not None and isinstance(module, DistributedDataParallel):
            self._buckets = ReducedBuckets(module, self._on_gradient)

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Step these in the backward from now on; refuse all if one cannot."""
        fresh = [one for one in optimizers if not self._is_taken(one)]
        for optimizer in fresh:
            owner = owner_of(optimizer)
            members_step = None if owner is None else owner.members_step()
            if members_step is None and not has_own_step(optimizer):
                raise ValueError(
                    f"{NAME} cannot step this {type(optimizer).__name__}: something else steps it already, as "
                    "LeanMixedPrecision(parameters=...) and torch.compile do. Leave one of the two out."
                )
            why = why_not_steppable(optimizer, f"{NAME} cannot step", f"leave {NAME} out")
            if why is not None and members_step is None:
                raise ValueError(why)
            refuse_optimizer(optimizer, is_split=any(map(is_shard, iterate_parameters(optimizer))))
            if not self._keeps_gradients:
                refuse_accumulation(f"{NAME}(keep_gradients=False)", optimizer, is_stepped_here=members_step is None)
            self._steps_of_others[id(optimizer)] = members_step
        for optimizer in fresh:
            self._take_over(optimizer)

    def let_go(self) -> None:
        """Let the optimizers step by themselves again."""
        self.remove_patches()
        for handle in self._handles.values():
            handle.remove()
        self._taken, self._patches, self._handles, self._owners = [], [], {}, {}
        self._current = self._again = self._buckets = None

    @contextmanager
    def scaled(self, optimizer: Optimizer, scaler: GradScaler, closure: Any) -> Iterator[None]:
        """Measure in a backward of this block whether ``optimizer`` steps; if so, it runs again, with the steps."""
        self._hook(optimizer)
        step = self._current = self._begin(optimizer, closure, scaler)
        patch = Shadow(scaler, "unscale_", partial(partial, _unscale, step))
        try:
            yield
        finally:
            patch.remove()
            self._current = self._again = None

    def run_twice(self, backward: Callable[..., None]) -> None:
        """Run ``backward`` to measure all gradients, and again with the steps, now or in the step."""
        step = self._current
        assert step is not None
        step.is_measuring = True
        backward(retain_graph=True)
        self._end_backward()
        step.end_measuring()
        if self._buckets is not None:
            self._buckets.expect_another()
        if step.scaler is not None:
            self._again = backward
        else:
            self.run_once(backward)

    def run_once(self, backward: Callable[..., None], *, is_last: bool = False) -> None:
        """Run ``backward`` with the steps that are due; ``is_last``: of an accumulation whose gradients are needed."""
        if self._current is None and is_last:
            self._refuse_taken_in()
        elif self._current is None and not self._keeps_gradients:
            for optimizer in self._taken:
                self._hook(optimizer)
            groups = (group for optimizer in self._taken for group in optimizer.param_groups)
            self._groups = {parameter: group for group in groups for parameter in group["params"]}
        try:
            backward()
        finally:
            self._groups = {}
        self._end_backward()

    @property
    def needs_two(self) -> bool:
        """Whether the next backward must run twice: all gradients must be known before the first step."""
        step = self._current
        if step is None or not step.has_to_measure:
            return False
        if any(parameter.grad is not None for parameter in iterate_parameters(step.optimizer)):
            step.is_early = False  # of earlier micro-batches: gradients are saved anyway
        return step.is_early

    def _end_backward(self) -> None:
        if self._buckets is not None:
            self._buckets.land()

    def leaves_clipping(self) -> bool:
        """Whether gradients exist and are clipped elsewhere, now."""
        step = self._current
        if step is not None and step.is_early:
            if not any(parameter.grad is not None for parameter in iterate_parameters(step.optimizer)):
                return False
            step.is_early = False  # optimizer_step called the closure before the step
        if step is not None and self._clipping.by_previous:
            norms = [norm_part(one.grad) for one in iterate_parameters(step.optimizer) if one.grad is not None]
            self.previous_norm = join_norms(norms) if norms else None
        return True

    def _has_ours(self, optimizer: Optimizer) -> bool:
        own = set(self._module.parameters())
        return any(parameter in own for parameter in iterate_parameters(optimizer))

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        note_step(optimizer)
        step, loss = self._current, None
        if step is None or step.optimizer is not optimizer:
            self._hook(optimizer)  # new parameters
            step = self._current = self._begin(optimizer, closure)
        again, self._again = self._again, None
        try:
            with torch.enable_grad():
                if again is not None:
                    self.run_once(again)
                if closure is not None:
                    loss = closure()
            for parameter in iterate_parameters(optimizer):
                had_one = parameter in self._taken_in or (self.has_zeros and parameter in self._stepped)
                if had_one and parameter.grad is None and not step.has_run(parameter):
                    parameter.grad = torch.zeros_like(parameter)  # none in the last micro-batch, or zeroed in place
                if parameter.grad is not None:
                    self._take(step, parameter)
            self._taken_in.clear()
        finally:
            self._current = None
        if step.is_early and self._clipping.by_previous:
            self.previous_norm = step.norm()
        return loss

    def _refuse_taken_in(self) -> None:
        if self._taken_in:
            raise RuntimeError(
                f"{NAME}(keep_gradients=False) does not work with an optimizer_step that calls its closure or wraps "
                "it, which may use gradients: those of all but the last micro-batch are used up by then. Call "
                "optimizer.step(closure=closure) with the closure that it gets, or use keep_gradients=True."
            )

    def _begin(self, optimizer: Optimizer, closure: Any, scaler: GradScaler | None = None) -> OneStep:
        is_early = self._may_be_early is not None and self._may_be_early(closure)
        if not is_early:
            self._refuse_taken_in()
        if self._clipping.norm is not None or scaler is not None:
            is_unknown = self._clipping.by_previous and self.previous_norm is None
            # The first reduction of DDP defines its buckets: that backward cannot run twice.
            is_early &= not is_unknown and (self._buckets is None or self._buckets.has_reduced)
        return OneStep(
            optimizer,
            self._clipping,
            is_early=is_early,
            previous_norm=self.previous_norm if self._clipping.by_previous else None,
            members_step=self._steps_of_others[id(optimizer)],
            scaler=scaler,
        )

    def _hook(self, optimizer: Optimizer) -> None:
        if self._may_be_early is None:
            return
        for parameter in iterate_parameters(optimizer):
            if parameter.requires_grad and parameter not in self._owners:
                self._owners[parameter] = optimizer
                if self._buckets is None or parameter not in self._buckets.parameters:
                    register: Any = parameter.register_post_accumulate_grad_hook
                    self._handles[parameter] = register(self._after_accumulation)

    def _after_accumulation(self, parameter: nn.Parameter) -> None:  # a hook must return None
        self._on_gradient(parameter)

    def _on_gradient(self, parameter: nn.Parameter) -> bool:
        """Step if it is due; ``False`` if the gradient must stay."""
        step = self._current
        if parameter in self._groups:
            take_in(parameter, self._owners[parameter].state[parameter], self._groups[parameter])
            self._taken_in.add(parameter)
            return True
        if step is None or not step.is_early or self._owners.get(parameter) is not step.optimizer:
            return False
        return self._take(step, parameter)

    def _take(self, step: OneStep, parameter: nn.Parameter) -> bool:
        """Step with a gradient; ``False`` if the optimizer no longer has the parameter."""
        is_taken = step.take(parameter)
        if is_taken:
            self._stepped.add(parameter)
        elif any(one is parameter for one in iterate_parameters(step.optimizer)):
            module = getattr(self._module, "module", self._module)  # of DDP
            names = (name for name, one in module.named_parameters() if one is parameter)
            raise RuntimeError(
                f"OptimizerInBackward: {next(names, 'a parameter')!r} got a second gradient in one step, after it was "
                "stepped with the first. Call backward once per step, and checkpoint with use_reentrant=False."
            )
        return is_taken


def _unscale(step: OneStep, inner: Callable[..., None], /, optimizer: Optimizer) -> None:
    """Patch of ``GradScaler.unscale_``: measured gradients are unscaled already."""
    if step.optimizer is not optimizer or not step.has_measured:
        inner(optimizer)
