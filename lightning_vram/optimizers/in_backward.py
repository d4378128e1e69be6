"""Step each parameter in the backward of a closure, as soon as its gradient is complete, and free the gradient.

Prior art: LOMO (arXiv:2306.09782), ``torch.distributed.optim._apply_optimizer_in_backward``, torchtune's
``OptimizerInBackwardWrapper``; those change the optimizer that users, schedulers and checkpoints see.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW, Optimizer

from lightning_vram.core.gradients import apply_clip_factor, clip_factor, clip_sharded_values, join_norms, norm_part
from lightning_vram.core.tensors.properties import is_shard
from lightning_vram.optimizers import step_round as rounds
from lightning_vram.optimizers.low_precision import LowPrecisionMoments
from lightning_vram.private_names.ddp import drop_reduced_gradients, prepare_for_backward
from lightning_vram.private_names.fsdp2 import local_shard
from lightning_vram.techniques.mixed_precision import note_unscaled, unscale_part

NAME = "OptimizerInBackward"


@dataclass(frozen=True)
class Clipping:
    """How gradients are clipped before a step; ``None``: not."""

    value: float | None = None  # largest element
    norm: float | None = None  # largest common 2-norm
    by_previous: bool = False  # by the norm of the previous step: that of this step takes a backward of its own

    def factor(self, norm: Tensor | None) -> Tensor | None:
        """Return what gradients of a common ``norm`` are multiplied by."""
        return None if self.norm is None or norm is None else clip_factor(norm, self.norm)


@dataclass(eq=False)
class OneStep:
    """A step of an optimizer, one parameter at a time. Settings are read at the first gradient."""

    optimizer: Optimizer
    clipping: Clipping
    is_early: bool  # whether it happens in the backward; otherwise gradients were clipped before
    has_to_measure: bool  # whether all gradients must be known before the first step
    factor: Tensor | None  # the factor of this step
    moments: LowPrecisionMoments | None  # which step the parameters
    scaler: GradScaler | None
    is_measuring: bool = False  # in the backward before the one with the steps
    checks: list[Tensor] = field(default_factory=list)  # of the scaler
    _norms: dict[nn.Parameter, Tensor | None] = field(default_factory=dict)  # of gradients so far
    _round: rounds.StepRound | None = None

    @torch.no_grad()
    def take(self, parameter: nn.Parameter) -> bool:
        """Use the gradient of ``parameter`` and free it; ``False`` if it is the second one."""
        if self.scaler is not None and self.is_early:
            self.checks += unscale_part(self.scaler, [parameter])
        is_first = self.measure(parameter) if self.is_measuring else self._run(parameter)
        parameter.grad = None
        return is_first

    def measure(self, parameter: nn.Parameter) -> bool:
        """Note the norm of a gradient; ``False`` if it is the second one."""
        assert parameter.grad is not None
        is_first = parameter not in self._norms
        self._norms[parameter] = None if self.clipping.norm is None else norm_part(parameter.grad)
        return is_first

    def end_measuring(self) -> None:
        """Step from now on, clipped by the norm so far."""
        self.factor, self._norms = self.clipping.factor(self.norm()), {}
        self.is_measuring = self.has_to_measure = False

    def norm(self) -> Tensor | None:
        """Return the common norm of all gradients so far, unclipped; ``None`` without any."""
        found = (self._norms.get(one) for one in rounds.iterate_parameters(self.optimizer))
        norms = [norm for norm in found if norm is not None]
        return join_norms(norms) if norms else None

    def has_run(self, parameter: nn.Parameter) -> bool:
        """Whether ``parameter`` was stepped."""
        return self._round is not None and not self._round.holds(parameter)

    def has_gradients(self) -> bool:
        """Whether there are gradients that were not used."""
        return any(parameter.grad is not None for parameter in rounds.iterate_parameters(self.optimizer))

    def _run(self, parameter: nn.Parameter) -> bool:
        self._round = self._round or rounds.StepRound(self.optimizer, is_on_host=False)
        if not self._round.holds(parameter):
            return False
        if self.is_early:
            self._clip(parameter)
        if self.moments is not None:
            self.moments.step_members(self.optimizer, self._round, self._round.take([parameter]))
        elif is_shard(parameter):
            self._round.run(self._round.take([parameter]))
        else:
            self._round.step_alone(parameter)
        return True

    def _clip(self, parameter: nn.Parameter) -> None:
        if self.clipping.by_previous:
            self.measure(parameter)
        if self.clipping.value is not None:
            clip_sharded_values([parameter], self.clipping.value)
        if self.factor is not None:
            apply_clip_factor([local_shard(parameter.grad)], self.factor)


def _refuse_accumulation(optimizer: Optimizer, *, is_stepped_here: bool) -> None:
    """Refuse an optimizer whose moments cannot accumulate gradients; ``is_stepped_here``: nothing else steps it."""
    name, kind, way_out = f"{NAME}(keep_gradients=False)", type(optimizer).__name__, "or keep_gradients=True."
    if not rounds.steps_like(type(optimizer), [Adam, AdamW]):
        raise ValueError(f"{name} is for Adam and AdamW of torch.optim, got {kind}: use one of these, {way_out}")
    if not is_stepped_here:
        raise ValueError(
            f"{name} does not work with low-precision moments, which would be rounded in each micro-batch: leave "
            f"MomentsInBF16 or LowBitOptimizer out, {way_out}"
        )
    betas = [tuple(map(float, group["betas"])) for group in optimizer.param_groups]
    if not all(map(all, betas)):
        raise ValueError(f"{name} needs betas above 0, got {min(betas)} in {kind}: use others, {way_out}")


@torch.no_grad()
def take_in(parameter: nn.Parameter, state: rounds.State, group: dict[str, Any]) -> None:
    """Add the gradient of a parameter to its moments, scaled for the betas of the step that follows, and free it.

    The second moment sums squares of micro-batch gradients, where Adam squares their sum: equal for independent
    gradients, up to the number of micro-batches smaller if they agree.
    """
    gradient = parameter.grad
    assert gradient is not None
    if not state:  # created as Adam does
        is_on_device = group["capturable"] or group["fused"]
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if is_on_device else "cpu")
        for key in ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])):
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    first, second = ((1 - float(beta)) / float(beta) for beta in group["betas"])
    state["exp_avg"].add_(gradient, alpha=-first if group["maximize"] else first)
    state["exp_avg_sq"].addcmul_(gradient, gradient, value=second)
    parameter.grad = None


Sent = tuple[Any, list[Tensor], list[Tensor]]  # pending reduction, parameters, and their gradients in the bucket


class ReducedBuckets:
    """Replaces the reduction of ``ddp`` by a bit-exact one in a communication hook: others run before the reduction.

    ``take`` gets a parameter with its gradient while the next bucket is reduced.
    """

    def __init__(self, ddp: DistributedDataParallel, take: Callable[[Any], None]) -> None:
        self.parameters = {one for one in ddp.parameters() if one.requires_grad}
        self.has_reduced = False
        self.ddp, self._take = ddp, take
        self._under_way: Sent | None = None
        living = ref(self)  # the reducer holds its hook, invisible to the garbage collector
        ddp.register_comm_hook(None, lambda _, bucket: _reduce(living(), bucket))
        drop_reduced_gradients(ddp)

    def land(self) -> None:
        """Wait for the last bucket."""
        last, self._under_way = self._under_way, None
        self._use(last)

    def reduce(self, bucket: Any) -> Any:
        """Begin to reduce a bucket, and use the one before it. A collective."""
        flat, parameters, group = bucket.buffer(), bucket.parameters(), self.ddp.process_group
        for parameter in parameters:
            parameter.grad = None  # is in the bucket
        flat.mul_(1 / dist.get_world_size(group))
        work = dist.all_reduce(flat, group=group, async_op=True)
        before, self._under_way = self._under_way, (work, parameters, bucket.gradients())
        self._use(before)
        return work.get_future().then(lambda future: future.value()[0])

    def _use(self, bucket: Sent | None) -> None:
        if bucket is None:
            return
        work, parameters, gradients = bucket
        work.wait()
        self.has_reduced = True
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
            self._take(parameter)


def _reduce(buckets: ReducedBuckets | None, bucket: Any) -> Any:
    if buckets is None:
        raise RuntimeError(f"{NAME} was undone: wrap the module in a new DistributedDataParallel.")
    return buckets.reduce(bucket)


class BackwardSteps(rounds.StepTakeOver):
    """Optimizers that step in the backward of their closure, until :meth:`let_go`; under DDP as buckets are reduced.

    A backward outside a closure accumulates gradients; what is left is stepped with at the end of the step.
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
        self._module, self._clipping = module, clipping
        self._may_be_early, self._keeps_gradients = may_be_early, keeps_gradients
        self._groups: dict[nn.Parameter, dict[str, Any]] = {}  # during a backward whose moments accumulate gradients
        self._taken_in: set[nn.Parameter] = set()  # since the last step
        self._owners: dict[nn.Parameter, Optimizer] = {}  # of parameters with a hook
        self._current: OneStep | None = None
        self._again: Callable[[], None] | None = None  # runs the measured backward a second time
        self._buckets: ReducedBuckets | None = None
        self.previous_norm: Tensor | None = None
        super().__init__()
        if may_be_early is not None and isinstance(module, DistributedDataParallel):
            self._buckets = ReducedBuckets(module, self._on_gradient)

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Step these in the backward from now on; refuse all if one cannot."""
        fresh: dict[Optimizer, LowPrecisionMoments | None] = {}  # with what steps its parameters
        for optimizer in optimizers:
            owner = rounds.owner_of(optimizer)
            fresh[optimizer] = owner if isinstance(owner, LowPrecisionMoments) else None
            why = rounds.why_not_steppable(optimizer, f"{NAME} cannot step", f"leave {NAME} out")
            if why is not None and fresh[optimizer] is None:
                raise ValueError(why)
            rounds.refuse_optimizer(optimizer, is_split=any(map(is_shard, rounds.iterate_parameters(optimizer))))
            if not self._keeps_gradients:
                _refuse_accumulation(optimizer, is_stepped_here=fresh[optimizer] is None)
        for optimizer, moments in fresh.items():
            self._take(optimizer, moments)

    def let_go(self) -> None:
        """Let the optimizers step by themselves again."""
        self.release()
        self._owners = {}
        self._current = self._again = self._buckets = None

    @contextmanager
    def scaled(self, optimizer: Optimizer, scaler: GradScaler, closure: Any) -> Iterator[None]:
        """Measure in a backward of this block whether ``optimizer`` steps; if so, it runs again, with the steps."""
        self._current = self._begin(optimizer, closure, scaler)
        try:
            yield
        finally:
            self._current = self._again = None

    def run(self, backward: Callable[..., None], *, is_last: bool) -> None:
        """Run ``backward`` with the steps that are due; ``is_last``: of a gradient accumulation.

        If all gradients must be known before the first step, it runs twice: with a scaler again in the step.
        """
        step = self._current
        if step is None:
            self._accumulate(backward, is_last=is_last)
            return
        self._hook(step.optimizer)  # parameters that the forward added, too: they must not get their gradient twice
        if step.has_to_measure and step.has_gradients():
            step.is_early = False  # of earlier micro-batches: gradients are saved anyway
        if step.is_early and step.has_to_measure:
            step.is_measuring = True
            self._run(partial(backward, retain_graph=True))
            step.end_measuring()
            if self._buckets is not None:
                prepare_for_backward(self._buckets.ddp)  # the next backward has no forward of its own
            if step.scaler is not None:
                self._again = backward
                return
        self._run(backward)

    def leaves_clipping(self) -> bool:
        """Whether gradients exist now, and the caller clips them. Reports measured overflows to the scaler, if any."""
        step = self._current
        if step is None:
            return True
        if step.scaler is not None and self._again is not None:
            note_unscaled(step.scaler, step.optimizer, step.checks)
        if step.is_early and not step.has_gradients():
            return False
        step.is_early = False  # optimizer_step called the closure before the step
        if self._clipping.by_previous:
            for parameter in rounds.iterate_parameters(step.optimizer):
                if parameter.grad is not None:
                    step.measure(parameter)
        return True

    def _run(self, backward: Callable[[], None]) -> None:
        backward()
        if self._buckets is not None:
            self._buckets.land()

    def _accumulate(self, backward: Callable[[], None], *, is_last: bool) -> None:
        if is_last:
            self._refuse_taken_in()  # the gradients are needed
        elif not self._keeps_gradients:
            for optimizer in self._taken:
                self._hook(optimizer)
            groups = (group for optimizer in self._taken for group in optimizer.param_groups)
            self._groups = {parameter: group for group in groups for parameter in group["params"]}
        try:
            self._run(backward)
        finally:
            self._groups = {}

    def _has_ours(self, optimizer: Optimizer) -> bool:
        return not set(self._module.parameters()).isdisjoint(rounds.iterate_parameters(optimizer))

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        step, loss = self._current, None
        if step is None or step.optimizer is not optimizer:
            self._hook(optimizer)  # new parameters
            step = self._current = self._begin(optimizer, closure)
        again, self._again = self._again, None
        try:
            if again is not None:
                self._run(again)
            if closure is not None:
                loss = closure()
            for parameter in rounds.iterate_parameters(optimizer):
                if parameter in self._taken_in and parameter.grad is None and not step.has_run(parameter):
                    parameter.grad = torch.zeros_like(parameter)  # none in the last micro-batch
                if parameter.grad is not None:
                    self._use(step, parameter)
            self._taken_in.clear()
        finally:
            self._current = None
        if self._clipping.by_previous:
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
        clipping, norm = self._clipping, self.previous_norm if self._clipping.by_previous else None
        has_to_measure = scaler is not None or (clipping.norm is not None and not clipping.by_previous)
        if has_to_measure and self._buckets is not None:
            # The first reduction of DDP defines its buckets: that backward cannot run twice.
            is_early &= self._buckets.has_reduced
        if clipping.norm is not None and clipping.by_previous:
            is_early &= norm is not None
        moments, factor = self._taken[optimizer], clipping.factor(norm)
        return OneStep(optimizer, clipping, is_early, has_to_measure, factor, moments, scaler)

    def _hook(self, optimizer: Optimizer) -> None:
        if self._may_be_early is None:
            return
        for parameter in rounds.iterate_parameters(optimizer):
            if parameter.requires_grad and parameter not in self._owners:
                self._owners[parameter] = optimizer
                if self._buckets is None or parameter not in self._buckets.parameters:
                    register: Any = parameter.register_post_accumulate_grad_hook
                    self._handles.append(register(self._on_gradient))

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        """Use the gradient if it is due."""
        step = self._current
        if parameter in self._groups:
            take_in(parameter, self._owners[parameter].state[parameter], self._groups[parameter])
            self._taken_in.add(parameter)
        elif step is not None and step.is_early and self._owners.get(parameter) is step.optimizer:
            self._use(step, parameter)

    def _use(self, step: OneStep, parameter: nn.Parameter) -> None:
        """Step with a gradient, unless the optimizer no longer has the parameter."""
        if not step.take(parameter) and any(one is parameter for one in rounds.iterate_parameters(step.optimizer)):
            module = getattr(self._module, "module", self._module)  # of DDP
            names = (name for name, one in module.named_parameters() if one is parameter)
            raise RuntimeError(
                f"{NAME}: {next(names, 'a parameter')!r} got a second gradient in one step, after it was "
                "stepped with the first. Call backward once per step, and checkpoint with use_reentrant=False."
            )
