"""Step the optimizers of a sharded module during training: on its shards, on the host, in a thread of their own."""

import os
import threading
import warnings
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_vram.core.gradients import clip_factor, sharded_norm
from lightning_vram.core.host.transfers import HostWorker, Ticket
from lightning_vram.core.patching import MethodPatch, replace_by
from lightning_vram.core.tensors.properties import state_stored_like
from lightning_vram.memory.tracking.tracker import forget_optimizer_tensors, register_optimizer_tensors
from lightning_vram.optimizers import step_round as rounds
from lightning_vram.optimizers.moment_forms import LowPrecisionStates, StateForm, find_unsupported, upcast_when_stepped
from lightning_vram.optimizers.on_disk import StreamedStates
from lightning_vram.optimizers.step_loop import step_flat_shards, step_in_parts
from lightning_vram.private_names.fsdp2 import calls_derived_dispatch, local_shard
from lightning_vram.private_names.torch import step_pre_hooks
from lightning_vram.techniques.sharding import FullSharding, ShardedGroup, fp32_part, low_precision_of


class StoredStates:
    """States of one optimizer: in memory or in a file in ``folder``, with moments in a form or float32.

    ``on_device``: parameters on the device, if a callback wants the form for all moments.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Collection[nn.Parameter],
        folder: str | os.PathLike[str] | None,
        form: StateForm | None,
        on_device: Collection[nn.Parameter] | None = None,
    ) -> None:
        self._low_precision: LowPrecisionStates | None = None
        if form is not None and (on_device is None or form.fits(optimizer)):
            takes = form.takes if folder is None and on_device is not None else form.holds
            chosen = set(filter(takes, {*parameters, *(on_device or ())}))
            self._low_precision = LowPrecisionStates(optimizer, chosen.__contains__, form)
        form = None if self._low_precision is None else form
        self._streamed = None if folder is None else StreamedStates(optimizer, parameters, folder, form)

    def begin(self, optimizer: Optimizer) -> list[RemovableHandle]:
        """Convert moments now, and move what is loaded there; return handles."""
        streamed, handles = self._streamed, []
        if streamed is not None:
            handles.append(optimizer.register_load_state_dict_post_hook(lambda _: streamed.load(), prepend=True))
        if self._low_precision is not None:
            handles += self._low_precision.begin()  # its hook runs before that of the disk
        return handles

    def adopt(self, members: Sequence[rounds.Member], wait: Callable[[], None]) -> None:
        """Adopt what user code wrote to states of a group, once other steps are over."""
        if self._streamed is not None:
            self._streamed.adopt(members, wait)
        if self._low_precision is not None:
            self._low_precision.adopt(members)

    def step(self, step_round: rounds.StepRound, group: ShardedGroup, members: Sequence[rounds.Member]) -> None:
        """Step members of one group: with states from disk, in parts, or at once."""
        for flat_shard in group.flat_shards:
            flat_shard.wait_for_copies()  # of a forward without gradients, after the backward
        streamed, low_precision = self._streamed if group.landing is not None else None, self._low_precision
        if any(flat_shard.is_split for flat_shard in group.flat_shards):
            is_whole = streamed is not None
            members = step_flat_shards(step_round, low_precision, group.flat_shards, members, is_whole=is_whole)
        if streamed is not None:
            streamed.run(step_round, members)
        elif low_precision is not None and any(low_precision.has(member.parameter) for member in members):
            step_in_parts(step_round, low_precision, members)
        elif members:
            step_round.run(members)
        for flat_shard in group.flat_shards:
            flat_shard.refresh()


def replace_parameters(optimizer: Optimizer, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters in groups and states of an optimizer."""
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    for parameter, other in replaced.items():
        if parameter in optimizer.state:
            state = optimizer.state.pop(parameter)
            is_alone = isinstance(parameter, DTensor) and parameter.device_mesh.size() == 1
            local = {key: local_shard(value) if is_alone else value for key, value in state.items()}
            optimizer.state[other] = state_stored_like(local, local_shard(other))


class HostOptimizers(rounds.StepTakeOver):
    """All optimizers of one sharded module. They stay the same objects.

    The next forward waits for a step layer by layer, all other code for the tensors that it reads. If nothing changes
    the gradients after the backward, the step begins layer by layer within it: ``may_step_early`` is asked before a
    step, with its closure, whether that is so.

    ``nvme_path``: folder for states; ``form``: of moments on the host, or of all moments if ``is_form_everywhere``.
    Schedulers, ``state_dict`` and hooks of the optimizers work as before; reading a parameter, gradient or state waits
    for the step of its layer. ZeRO-Offload (https://arxiv.org/abs/2101.06840) steps after the backward, and waits.
    """

    def __init__(
        self,
        sharding: FullSharding,
        *,
        num_threads: int,
        nvme_path: str | os.PathLike[str] | None = None,
        form: StateForm | None = None,
        is_form_everywhere: bool = False,
    ) -> None:
        self.may_step_early: Callable[[Callable[[], Any]], bool] = lambda closure: False
        self._sharding = sharding
        self._is_split = sharding.mesh.size() > 1
        self._worker = HostWorker("stepping optimizers", num_threads) if sharding.landing is not None else None
        self._groups = {p.sharded_param: group for group in sharding.groups for p in group.parameters}
        self._attached: list[Optimizer] = []
        self._patches: list[MethodPatch] = []  # of the steps of unknown classes
        self._early: Optimizer | None = None  # in the closure of its step
        self._round: rounds.StepRound | None = None  # begun in the backward
        self._early_lock = threading.Lock()  # gradients on the device land in another thread
        self._submitted: list[tuple[bool, ShardedGroup, Ticket]] = []  # of the step; whether a forward ignores them
        self._nvme_path, self._form, self._is_form_everywhere = nvme_path, form, is_form_everywhere
        self.unheld: set[nn.Parameter] = set()  # trained parameters whose moments cannot have the form
        self._known: dict[Optimizer, rounds.KnownStates] = {}
        self._fresh: list[rounds.Member] = []  # of the step, without states
        self._stateless: set[nn.Parameter] = set()  # without states after a step, as of SGD
        self._factors: dict[Optimizer, Tensor] = {}  # of pending gradient scaling
        sharding.on_landed = self._landed
        super().__init__()

    def attach(self, optimizers: Sequence[Optimizer]) -> None:
        """Step more optimizers here; refuse all if one cannot. Of unknown classes, only the effects are handled."""
        for optimizer in optimizers:  # some were created before sharding
            replace_parameters(optimizer, self._sharding.shards)
        fresh = [one for one in optimizers if self._has_ours(one) and one not in self._attached]
        for optimizer in fresh:
            rounds.refuse_optimizer(optimizer, is_split=self._is_split)
        on_host = [parameter for parameter, group in self._groups.items() if group.landing is not None]
        others = [parameter for parameter, group in self._groups.items() if group.landing is None]
        on_device = others if self._is_form_everywhere else None
        self._check_form(fresh, self._groups if self._is_form_everywhere else set(on_host))
        stored = [StoredStates(one, on_host, self._nvme_path, self._form, on_device) for one in fresh]
        flat_shards = [flat_shard for group in self._sharding.groups for flat_shard in group.flat_shards]
        for optimizer, states in zip(fresh, stored, strict=True):
            self._attached.append(optimizer)
            register_optimizer_tensors(
                optimizer, lambda: [one.resident for one in flat_shards if one.resident is not None]
            )
            self._handles += [
                optimizer.register_state_dict_pre_hook(lambda *_: self.finish()),
                optimizer.register_load_state_dict_pre_hook(lambda *_: self.finish()),
            ]
            if rounds.why_not_steppable(optimizer) is None:
                self._handles += states.begin(optimizer)
                self._take(optimizer, states)
            else:
                self._attach_foreign(optimizer)

    def _check_form(self, optimizers: Sequence[Optimizer], parameters: Container[object]) -> None:
        form = self._form
        if form is None:
            return
        names = f"host_state={form.name!r}", "host_state='fp32'"
        if self._is_form_everywhere:
            names, optimizers = (form.part, f"leave {form.part} out"), [one for one in optimizers if form.fits(one)]
        self.unheld = find_unsupported(*names, form, optimizers, parameters, is_late=bool(self._taken))

    def _attach_foreign(self, optimizer: Optimizer) -> None:
        """Step an optimizer of an unknown class synchronously, on whole tensors if possible."""
        # An optimizer within it would have the parameters, too.
        has_inner = any(isinstance(value, Optimizer) for key, value in vars(optimizer).items() if key != "step")
        is_whole = not self._is_split and rounds.has_own_step(optimizer) and not has_inner
        tensors = "whole tensors" if is_whole else "sharded tensors, which may raise errors of DTensor"
        warnings.warn(
            f"{type(optimizer).__name__} is not one of torch.optim's elementwise optimizers, such as AdamW: it steps "
            f"on {tensors}, and training waits for it.",
            stacklevel=3,
        )
        self._handles += [
            optimizer.register_step_pre_hook(self._reshard),
            optimizer.register_step_post_hook(self._written),
        ]
        if is_whole:
            whole = rounds.WholeSteps(optimizer, partial(self._written, optimizer))
            step = Optimizer.profile_hook_step(lambda optimizer, closure=None: whole.step(closure))
            self._patches.append(MethodPatch(optimizer, "step", replace_by(partial(step, optimizer))))

    def clip_norm(self, optimizer: Optimizer, max_norm: float, *, may_wait: bool) -> None:
        """Clip gradients to a common 2-norm; ``may_wait``: in the step, which comes next. A collective."""
        parameters = [parameter for parameter in rounds.iterate_parameters(optimizer) if parameter.grad is not None]
        has_16_bits = any(low_precision_of(parameter.grad) is not None for parameter in parameters)
        norm = self._compute(lambda: sharded_norm(parameters, *([fp32_part] if has_16_bits else [])))
        if self._worker is not None:
            norm = norm.cpu()  # scaling on the host needs no wait for the device
        factor = clip_factor(norm, max_norm)
        if may_wait and optimizer in self._taken:
            self._factors[optimizer] = factor
        else:
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            self._compute(lambda: rounds.scale_gradients(gradients, factor))

    def finish(self) -> None:
        """Wait until all steps are over, and raise their errors."""
        self._known.clear()  # code may free states next
        self._sharding.wait_for_steps()
        if self._worker is not None:
            self._worker.check()

    def let_go(self, replaced: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Detach the optimizers, with ``replaced`` parameters."""
        self._sharding.on_landed = None
        if self._worker is not None:
            self._worker.stop()
        for patch in self._patches:
            patch.remove()
        taken = self.release()
        for optimizer in self._attached:
            forget_optimizer_tensors(optimizer)
            replace_parameters(optimizer, replaced)
            if self._form is not None and optimizer in taken:
                upcast_when_stepped(optimizer)
        self._attached, self._patches, self._known, self._groups, self._stateless = [], [], {}, {}, set()

    def _step(self, optimizer: Optimizer, closure: Callable[[], Any] | None) -> Any:
        loss, self._submitted = None, []
        if closure is not None:
            if self.may_step_early(closure) and len(step_pre_hooks(optimizer)) == 1:  # is ours
                self._early, self._round = optimizer, None
            try:
                loss = closure()
            finally:
                self._early = None
        factor = self._factors.pop(optimizer, None)
        step_round, self._round = self._round or self._begin_round(optimizer, factor), None
        for group in self._sharding.groups:
            self._submit(step_round, group, [parameter.sharded_param for parameter in group.fsdp_params])
        step_round.run(step_round.take_rest())
        self.arrange_by_forward()
        self._sharding.gather_root()
        fresh, self._fresh = self._fresh, []
        if fresh:  # later steps write to existing states only: user code may replace them
            self.finish()
            self._stateless.update(member.parameter for member in fresh if not member.state)
        return loss

    def _begin_round(self, optimizer: Optimizer, factor: Tensor | None = None) -> rounds.StepRound:
        known = self._known.setdefault(optimizer, {})
        return rounds.StepRound(optimizer, is_on_host=self._sharding.home.type == "cpu", factor=factor, known=known)

    def arrange_by_forward(self) -> None:
        """Order jobs as the next forward needs them: first layers first, averages last."""
        if self._worker is not None:
            places = {group: place for place, group in enumerate(self._sharding.groups)}
            submitted = sorted(self._submitted, key=lambda item: (item[0], places[item[1]]))  # the rest in their order
            self._worker.arrange([ticket for *_, ticket in submitted])

    def _landed(self, group: ShardedGroup) -> None:
        """Step a group in the backward, as soon as its gradients exist."""
        with self._early_lock:
            if self._early is None or not group.is_complete:
                return
            self._round = self._round or self._begin_round(self._early)  # after the forward
            doubtful = {parameter for parameter, _ in group.doubtful}
            self._submit(self._round, group, [p.sharded_param for p in group.fsdp_params if p not in doubtful])
            if group.landing is not None:  # otherwise this is another thread
                self.arrange_by_forward()

    def _submit(self, step_round: rounds.StepRound, group: ShardedGroup, parameters: Iterable[nn.Parameter]) -> None:
        group.steps.wait()
        members = step_round.take(parameters)
        if not members:
            return
        group.forget_whole()
        states = self._taken[step_round.optimizer]
        states.adopt(members, self._worker.drain if self._worker is not None else self.finish)
        self._fresh += [one for one in members if not one.state and one.parameter not in self._stateless]
        self.work_beside(partial(states.step, step_round, group, members), group, rounds.list_tensors(members))

    def work_beside(
        self, job: Callable[[], None], group: ShardedGroup, watched: Iterable[Tensor], *, is_reader: bool = False
    ) -> None:
        """Run ``job`` after steps of ``group``, in their thread; using ``watched`` tensors waits for it.

        The next forward does not wait for one that ``is_reader`` of whole shards (before torch 2.13: it waits).
        """
        if self._worker is None or group.landing is None:
            job()
            return
        ticket = self._worker.submit(job)
        is_reader = is_reader and calls_derived_dispatch and not any(flat.is_split for flat in group.flat_shards)
        self._submitted.append((is_reader, group, ticket))
        group.steps.begin(ticket, watched, is_reader=is_reader)

    def _compute(self, compute: Callable[[], Any]) -> Any:
        """Run a function in the threads of the steps, and wait."""
        if self._worker is None:
            return compute()
        results: list[Any] = []
        stream = nullcontext() if self._sharding.device.type == "cpu" else torch.accelerator.current_stream()

        def job() -> None:
            with stream:  # gradients may be on the device
                results.append(compute())

        self._worker.submit(job).wait()
        return results[0]

    def _reshard(self, optimizer: Optimizer, *unused: Any) -> None:
        """Reshard, with what was written to gathered parameters, before a step."""
        for group in {self._groups[p] for p in rounds.iterate_parameters(optimizer) if p in self._groups}:
            group.forget_whole()

    def _written(self, optimizer: Optimizer, *unused: Any) -> None:
        for group in {self._groups[p] for p in rounds.iterate_parameters(optimizer) if p in self._groups}:
            group.forget_whole()
            for flat_shard in group.flat_shards:
                flat_shard.refresh()
        self._sharding.gather_root()

    def _has_ours(self, optimizer: Optimizer) -> bool:
        return any(parameter in self._groups for parameter in rounds.iterate_parameters(optimizer))
