"""FSDP2's parameter group with shards on the host: gathering, releasing, and the way of its gradients."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lightning_vram.core.host.transfers import HostWorker, Ticket
from lightning_vram.core.tensors.properties import count_writes
from lightning_vram.private_names.dispatcher import FakeTensor
from lightning_vram.private_names.fsdp2 import FSDPParamGroup, GroupBase, free_storage
from lightning_vram.private_names.torch import num_writes
from lightning_vram.techniques.sharding.flat_shards import FlatShard, Place, ShardSteps
from lightning_vram.techniques.sharding.parameter import ShardedParameter, make_announcement

if TYPE_CHECKING:
    from lightning_vram.techniques.sharding.apply import FullSharding


class ShardedGroup(GroupBase):
    """Replaces the class of FSDP2's object, see :func:`take_over`.

    * One copy per dtype brings shards to the device, on its own stream even with one rank, so that it overlaps with the
      computation of the layer before: FSDP2 would start it when the layer is needed.
    * Gradients are copied to the host and accumulated there by another thread, without blocking.
    * A parameter without a gradient on this rank contributes zeros if another rank has one; FSDP2 would reduce the
      gradient of another parameter with theirs.
    * Gathering waits for a pending step that writes the shards.
    * On one rank nothing is all-gathered or reduced: FSDP2 would copy each parameter and gradient once more.
    """

    flat_shards: list[FlatShard]
    owner: "FullSharding"
    home: torch.device  # of its shards
    landing: HostWorker | None  # where its gradients come from another device
    steps: ShardSteps
    present: set[ShardedParameter]  # that had a gradient here, in this backward
    doubtful: list[tuple[ShardedParameter, Tensor]]  # of those that had none
    _fetched: torch.Event | None = None
    _landing: Ticket | None = None
    _num_calls: int = 0
    _num_returns: int = 0
    _last_calls: int = 0
    _most_calls: int = 1  # before one backward, in the batches that were looked at
    has_more_calls: bool = False  # in the last backward
    _may_return: bool = False  # called without a graph, which a reentrant checkpoint builds in the backward

    # --- before a layer is computed ---

    def unshard(self, async_op: bool = False) -> None:  # noqa: FBT001, FBT002 - FSDP2's
        """Fetch the shards, and all-gather them."""
        is_skipped = not self.unshard_in_backward and self.is_before_backward
        if self.is_sharded and not self.is_gathering and not is_skipped:
            self.steps.wait_for_writes()
            self._choose_dtype()
            self._fetch(async_op)
        super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        """Wait for the fetch: with one rank FSDP2 reads it now."""
        is_waiting = self.is_gathering
        if is_waiting and self._fetched is not None:
            # Not torch.accelerator's stream: it does not know events of torch.cuda, and would not wait.
            self.device_handle.current_stream().wait_event(self._fetched)
        self._fetched = None
        if is_waiting and self.num_shards == 1:
            for flat in self.flat_shards:
                self.fill(flat.parameters)
            with self.showing(()):
                super().wait_for_unshard()
        else:
            super().wait_for_unshard()
        if is_waiting:
            for flat in self.flat_shards:
                flat.note_read()

    def use_wholes(self) -> None:
        """Put the gathered parameters into the modules, and remember how often they were written."""
        for parameter in self.parameters:
            shard, whole, wants = parameter.sharded_param, parameter.whole, parameter.wants_gradient
            if shard.requires_grad != wants or whole.requires_grad != wants:
                parameter.agree_on_gradient()
            for place, name in parameter.places:
                if place.get(name) is not shard:
                    parameter.refuse_replacement()
                place[name] = whole
            parameter.version = count_writes(whole) if vars(whole) else num_writes(whole)
            parameter.all_gather_inputs = ()

    def use_shards(self) -> None:
        """Put the shards into the modules, with what was written to the gathered parameters, and free those."""
        for parameter in self.parameters:
            shard, whole, wants = parameter.sharded_param, parameter.whole, parameter.wants_gradient
            if shard.requires_grad != wants or whole.requires_grad != wants:
                parameter.agree_on_gradient()
            if num_writes(whole) != parameter.version or vars(whole):  # code has got .data, or sets attributes
                parameter.take_over_writes()
            for place, name in parameter.places:
                place[name] = shard
            free_storage(parameter.all_gather_outputs[0])

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Count the calls whose gradients will follow."""
        is_new = torch.is_grad_enabled() and not self.is_in_forward
        result = super().pre_forward(module, args, kwargs)
        self._num_calls += is_new
        self._may_return |= not torch.is_grad_enabled()
        if is_new:
            self.owner.called(self)
        return result

    def _choose_dtype(self) -> None:
        # Autocast is off in the backward, where a user turned it off, and in calls outside of a step.
        if not self.is_before_backward and not self._num_calls:
            is_autocast = torch.is_autocast_enabled(self.device.type)
            for flat in self.flat_shards:
                if flat.needs_fp32:
                    flat.stay_fp32()
                flat.set_fp32(is_fp32=not is_autocast or flat.is_on_trial)

    def _fetch(self, async_op: bool) -> None:  # noqa: FBT001 - FSDP2's
        stream = self.gather_stream(async_op=async_op)
        with nullcontext() if stream is None else self.device_handle.stream(stream):
            for flat in self.flat_shards:
                for parameter, shard in zip(flat.parameters, flat.fetch(), strict=True):
                    parameter.all_gather_inputs = (shard,)
            self._fetched = stream.record_event() if stream is not None and self.num_shards == 1 else None

    # --- when its gradients are there ---

    def post_backward(self, *unused: Any) -> None:
        """Reduce the gradients, and copy them to the host."""
        self.leave_backward()
        if not self.reduce_grads:
            super().post_backward(*unused)
            return
        self.wait_for_gradients()
        for flat in (flat for flat in self.flat_shards if flat.is_on_trial):
            wholes = (one.whole for one in flat.parameters if one.is_counted and one.whole is not None)
            flat.seen_in_fp32 |= not all(_has_16_bits(one.grad, flat.dtype) for one in wholes if one.grad is not None)
        absent = self._fill_in()
        self._reduce()
        self._num_returns += 1
        arrivals = [(parameter, parameter.sent) for parameter in self.parameters if parameter.sent is not None]
        for parameter in self.parameters:
            parameter.sent = parameter.buffer = None
        if not arrivals:
            return
        if absent:
            self.doubtful += [arrival for arrival in arrivals if arrival[0] in absent]
            arrivals = [arrival for arrival in arrivals if arrival[0] not in absent]
        self.present.update(dict(arrivals))
        if self.landing is None:
            with self.device_handle.stream(self.reduce_stream):
                self._land(arrivals, None)
                self.await_reduce_stream()
        else:
            self._landing = self.landing.submit(partial(self._land, arrivals, self.reduced_event))

    def finalize_backward(self) -> None:
        """Wait until the gradients are on the host."""
        super().finalize_backward()  # type: ignore[no-untyped-call]
        self.wait_for_gradients()
        self._last_calls, self.has_more_calls = self._num_calls, self._num_calls > self._most_calls
        self._num_calls, self._num_returns, self._may_return = 0, 0, False
        self.owner.finalized(self)

    def allow_calls(self) -> None:
        """Accept as many calls before a backward as there were before the last one."""
        self._most_calls = max(self._most_calls, self._last_calls)

    @property
    def is_complete(self) -> bool:
        """Whether no more gradients will follow in this backward."""
        return self._num_returns >= self._num_calls and not self._may_return

    def settle(self, is_present: Callable[[ShardedParameter], bool]) -> None:
        """Give parameters without a gradient on this rank one if another rank has one."""
        doubtful, self.doubtful = self.doubtful, []
        for parameter, gradient in doubtful:
            if is_present(parameter):
                parameter.land(gradient)
        self.present = set()

    def wait_for_gradients(self) -> None:
        """Wait for the copy to the host."""
        landing, self._landing = self._landing, None
        if landing is not None:
            landing.wait()

    def _fill_in(self) -> set[ShardedParameter]:
        """Give zeros to parameters without a gradient, which another rank may have."""
        if self.mesh_info.mesh.size() == 1:
            return set()
        absent = set()
        for parameter in self.parameters:
            whole = parameter.whole
            if whole is not None and whole.requires_grad and whole.grad is None:
                whole.grad = torch.zeros(whole.shape, dtype=parameter.gathered_dtype, device=whole.device)
                absent.add(parameter)
        return absent

    def _reduce(self) -> None:
        """Reduce the gradients, and send them to the host."""
        for flat in self.flat_shards:
            flat.release_gradients()
            if self.device != self.home:  # each gradient has its place in host memory, one after the other
                sizes = [parameter.sharded_size.numel() for parameter in flat.parameters]
                parts = torch.split(self.owner.buffers.take(sum(sizes), flat.transfer_dtype), sizes)
                for parameter, part in zip(flat.parameters, parts, strict=True):
                    parameter.buffer = part
        if self.mesh_info.mesh.size() == 1 and self.gradient_divide_factor is None:
            self._send_alone()
            return
        for parameter in self.parameters:
            parameter.begin_reduction()
        try:
            dtype = torch.float32 if self.mesh_info.mesh.size() > 1 else None
            kinds = ((flat.parameters, flat.transfer_dtype.itemsize < 4) for flat in self.flat_shards)
            self.reduce_parts((parameters, dtype if is_low else None) for parameters, is_low in kinds)
        finally:
            for parameter in self.parameters:
                parameter.end_reduction()

    def _send_alone(self) -> None:
        stream = self.reduce_stream
        gradients = self.take_gradients()
        stream.wait_stream(self.device_handle.current_stream())
        with self.device_handle.stream(stream):
            for parameter, gradient in gradients.items():
                parameter.send(gradient)
            self.await_reduce_stream()

    def _land(self, arrivals: Sequence[tuple[ShardedParameter, Tensor]], event: torch.Event | None) -> None:
        if event is not None:
            event.synchronize()
        for parameter, gradient in arrivals:
            parameter.land(gradient)
        if self.owner.on_landed is not None:
            self.owner.on_landed(self)

    def show_writes(self) -> None:
        """Let gather streams of all groups wait for a step on the device, as FSDP2 does in the root's forward."""
        if self.copy_in_stream is not None:
            self.copy_in_stream.wait_stream(self.device_handle.current_stream())

    def given_up(self) -> None:
        """Reset after an error: gradients in transfer are dropped."""
        self.owner.lost()
        if self.owner.landing is not None:
            self.owner.landing.drain()
        self._num_calls, self._num_returns, self._may_return = 0, 0, False
        self._landing, self._fetched, self.present, self.doubtful = None, None, set(), []


def _has_16_bits(gradient: Tensor, dtype: torch.dtype) -> bool:
    """Whether a gradient is exact in ``dtype``: autocast has cast the weight, and nothing has added up."""
    if isinstance(gradient, FakeTensor):
        return True
    parts = torch.split(gradient.flatten(), 2**22)  # not all at once: it may be as large as what is free
    return all(torch.allclose(one, one.to(dtype).to(one.dtype), rtol=0, atol=0, equal_nan=True) for one in parts)


def take_over(
    group: FSDPParamGroup, owner: "FullSharding", dtype_of: Callable[[Any], torch.dtype | None], place: Place
) -> ShardedGroup:
    """Turn FSDP2's object into a :class:`ShardedGroup`.

    ``dtype_of``: what autocast casts a parameter (FSDP2's object) to, if it does. ``place``: on the device only if
    FSDP2 has put the shards there.
    """
    host: Any = group
    host.__class__ = ShardedGroup
    host.owner, host.present, host.doubtful = owner, set(), []
    host.home, host.landing = (host.device, None) if place == "device" else (owner.home, owner.landing)
    host.parameters, host.flat_shards = list(host.fsdp_params), []
    host.steps = ShardSteps(host.flat_shards)
    options, alike = owner.options, defaultdict(list)
    for parameter in host.parameters:
        parameter.__class__ = ShardedParameter
        own, is_trained = parameter.sharded_param.dtype, parameter.sharded_param.requires_grad
        # Adapters are read in forms that need fp32; the frozen weights next to them are not.
        alike[own, dtype_of(parameter) or own, is_trained].append(parameter)
    announcement = make_announcement(owner) if owner.module in host.modules else None
    for (_, dtype, is_trained), parameters in alike.items():
        kinds = {"is_resident": place == "copy", "is_split": place != "device" and (options.is_split or not is_trained)}
        flat = FlatShard(parameters, dtype, host.home, host.device, pin_memory=options.pin_memory, **kinds)
        flat.may_grow = options.device_bytes is None
        host.flat_shards.append(flat)
        for parameter in parameters:
            parameter.take_over(host, flat, announcement)
    host.flat_shards.sort(key=lambda flat: flat.numel)  # the computation waits for all but the last to be reduced
    return host  # type: ignore[no-any-return]
