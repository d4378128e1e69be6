"""FSDP2's parameter with its shard on the host: transfers to the device, and gradients back."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.tensors.properties import count_writes
from lightning_vram.private_names.dispatcher import is_mutable
from lightning_vram.private_names.fsdp2 import ParameterBase, cut_own_shard, look_past_attribute
from lightning_vram.private_names.torch import gradient_hooks, has_accumulation_hooks, local_shard_of, own_parameters
from lightning_vram.techniques.sharding.flat_shards import FlatShard
from lightning_vram.techniques.sharding.gathered import (
    WeightReads,
    gathered_of,
    keep_low_precision,
    low_precision_of,
    observe,
    set_gathered,
    upcast,
    watch,
)


class _NotifyHook:
    """A hook on a gathered parameter that only calls a method, so micro-batches may continue with it.

    It refers weakly: the garbage collector does not see hooks, and would leak a cycle of tensor, hook and owner.
    """

    only_tells = True

    def __init__(self, notify: Callable[[], None]) -> None:
        self._notify = weakref.WeakMethod(notify)

    def __call__(self, _: Tensor) -> None:
        if (notify := self._notify()) is not None:
            notify()


def _read(owner: "weakref.ref[ShardedParameter]", gradient: "weakref.ref[Tensor]") -> None:
    if (parameter := owner()) is not None:
        parameter.read_gradient()
    else:
        upcast(gradient())


class ShardedParameter(ParameterBase):
    """Replaces the class of FSDP2's object, see :func:`~lightning_vram.techniques.sharding.group.take_over`.

    FSDP2 casts on the device, so that shards and gradients are transferred in fp32, and blocks on a gradient when there
    is one already.
    """

    flat_shard: FlatShard
    fetched: Tensor | None
    is_reducing: bool
    _sent: Tensor | None  # a gradient in transfer
    _held: Any  # the gradient that is set aside during a reduction
    _buffer: Tensor | None
    _proxy: Any  # a gradient for FSDP2 to set
    _has_landed: bool
    _version: int  # of the gathered parameter, when it was gathered
    _wants_gradient: bool
    on_gradient: Callable[[], None] | None  # called when a backward reaches the gathered parameter; may be set
    _hooked: Tensor | None  # the one with this hook
    _touch: Callable[[], None]  # the shard may have been written
    read_gradient: Callable[[], None]  # called before reads of a gradient in 16 bit
    _low_precision: "weakref.ref[Tensor] | None"  # the last such gradient
    reads: WeightReads | None  # of a weight that may be transferred in 16 bit, until that is proven

    def begin(self, flat_shard: FlatShard, touch: Callable[[], None]) -> None:
        """Initialize. ``touch`` is called when code accesses the shard, which it may write to."""
        look_past_attribute(self)
        self.flat_shard, self._touch = flat_shard, touch
        self.fetched = self._sent = self._held = self._buffer = self._proxy = None
        self.on_gradient = self._hooked = self.reads = self._low_precision = None
        self.read_gradient = self.upcast_gradient
        self.is_reducing = self._has_landed = False
        self._wants_gradient = self.sharded_param.requires_grad

    def agree_on_gradient(self) -> None:
        """Make ``requires_grad`` of the gathered parameter and the shard equal: the one that has changed wins.

        Optimizers hold the shard, code within a training step the gathered parameter: either may be frozen.
        """
        shard, whole, before = self.sharded_param, self.whole, self._wants_gradient
        if shard.requires_grad != before or (whole is not None and whole.requires_grad != before):
            self._wants_gradient = not before
            for one in (shard, whole):
                if one is not None:
                    one.requires_grad_(not before)

    def to_sharded(self) -> None:
        """Free the gathered parameter, after its ``requires_grad`` and writes were taken over."""
        self.agree_on_gradient()
        self._take_over_writes()
        super().to_sharded()
        if gathered_of(self.sharded_param) is not None:
            set_gathered(self.sharded_param, None)
            watch([self.sharded_param], self._touch)

    def to_unsharded(self) -> None:
        """Use the gathered parameter; observe and count what is done with it."""
        self.agree_on_gradient()
        self._check_place()
        super().to_unsharded()
        whole, notify = self.whole, self.on_gradient
        assert whole is not None
        observe(whole, self.reads)
        self._version = count_writes(whole)
        if notify is None:
            return
        set_gathered(self.sharded_param, whole)  # of the root: code in a step may write to it through optimizers
        self._watch_shard()
        if whole is not self._hooked and whole.requires_grad:
            whole.register_post_accumulate_grad_hook(_NotifyHook(notify))  # type: ignore[no-untyped-call]
            self._hooked = whole

    @property
    def all_gather_inputs(self) -> list[Tensor]:
        """The shard on the device, which the group has fetched."""
        if not self.is_shard or self.fetched is None:
            inputs: list[Tensor] = super().all_gather_inputs
            return inputs
        fetched, self.fetched = self.fetched, None
        return [fetched]

    @property
    def gathered_dtype(self) -> torch.dtype:
        """Dtype of the gathered parameter."""
        return self.flat_shard.transfer_dtype

    @property
    def offload_to_cpu(self) -> bool:
        """Whether FSDP2 copies a gradient to the host: :meth:`to_sharded_dtensor` does it."""
        return not self.is_reducing

    @offload_to_cpu.setter
    def offload_to_cpu(self, value: bool) -> None:
        """Ignore FSDP2's choice."""

    def begin_reduction(self, host_buffer: Tensor | None) -> None:
        """Set the shard's gradient aside: FSDP2 would block to accumulate.

        The new one goes to ``host_buffer``, flat; ``None`` if it is on the host already.
        """
        self._held, self.sharded_param.grad = self.sharded_param.grad, None
        self._buffer = host_buffer
        self.is_reducing, self._has_landed = True, False

    def end_reduction(self) -> Tensor | None:
        """Put the gradient back; return the new one, in transfer, which has to :meth:`land`."""
        sent, self._sent, self._buffer = self._sent, None, None
        self.is_reducing = False
        if not self._has_landed:
            self.sharded_param.grad = self._held
        self._held = None
        return sent

    def to_sharded_dtensor(self, tensor: Tensor) -> Any:
        """Take the reduced gradient from FSDP2, on the stream that reduced it."""
        if not self.is_reducing:
            return super().to_sharded_dtensor(tensor)
        self._sent = self._send(tensor)
        if gradient_hooks(self.sharded_param):
            self._sent = self._call_hooks(self._sent)
        if has_accumulation_hooks(self.sharded_param):  # they read the gradient at once
            if tensor.device.type != "cpu":
                torch.accelerator.current_stream().synchronize()
            self.sharded_param.grad = self._held
            self.land(self._sent)
            self._sent, self._has_landed = None, True
            return self.sharded_param.grad
        if self._proxy is None:
            empty = self.memory.new_empty(())
            self._proxy = super().to_sharded_dtensor(empty.expand(self.sharded_size))
        return self._proxy

    @torch.no_grad()
    def land(self, gradient: Tensor) -> None:
        """Accumulate a gradient that is on the host."""
        shard: Any = self.sharded_param
        if shard.grad is None and self.flat_shard.keeps_gradients and gradient.dtype != shard.dtype:
            nothing = torch.full((), torch.nan, dtype=shard.dtype)
            shard.grad = proxy = super().to_sharded_dtensor(nothing.expand(gradient.shape))
            keep_low_precision(proxy, gradient)
            self._low_precision = weakref.ref(proxy)
            self.watch_gradient()
        elif shard.grad is None:
            shard.grad = super().to_sharded_dtensor(gradient.to(shard.dtype))
        else:
            local_shard_of(shard.grad).add_(gradient)

    @property
    def low_precision_gradient(self) -> Tensor | None:
        """The 16-bit gradient, while it is one and alive."""
        gradient = self._low_precision() if self._low_precision is not None else None
        return gradient if low_precision_of(gradient) is not None else None

    def watch_gradient(self) -> None:
        """Call :attr:`read_gradient` before reads of the 16-bit gradient, which holds no reference to this."""
        gradient = self.low_precision_gradient
        if gradient is not None:
            watch([gradient], partial(_read, weakref.ref(self), weakref.ref(gradient)))

    def upcast_gradient(self) -> None:
        """Upcast the 16-bit gradient."""
        upcast(self.low_precision_gradient)

    def _call_hooks(self, gradient: Tensor) -> Tensor:
        """Call ``Tensor.register_hook`` hooks of the shard; autograd calls those of the gathered parameter."""
        if self.flat_shard.own_device.type != self.flat_shard.device.type:
            torch.accelerator.current_stream().synchronize()
        sharded: Any = super().to_sharded_dtensor(gradient.to(self.sharded_param.dtype))
        for hook in gradient_hooks(self.sharded_param):
            changed = hook(sharded)
            sharded = sharded if changed is None else changed
        return local_shard_of(sharded)

    def reset_sharded_param(self) -> None:
        """Follow a ``load_state_dict``, which must have loaded in place: flat shards own the memory."""
        self._check_place()
        super().reset_sharded_param()  # type: ignore[no-untyped-call]

    def _watch_shard(self) -> None:
        watch([self.sharded_param], self._before_use, after=self._shard_was_used)

    def _before_use(self) -> None:
        """Update the shard from the gathered parameter, in memory of its own."""
        self._touch()
        self._take_over_writes()

    @torch.no_grad()
    def _shard_was_used(self, function: Any) -> None:
        """Update the gathered parameter from a write to the shard."""
        whole: Any = self.whole
        shard: Any = self.sharded_param
        if not self.is_whole or whole is None:
            return
        if is_mutable(function):
            if shard.device_mesh.size() > 1:
                raise RuntimeError(
                    f"Parameter {self.name!r} was written through optimizer.param_groups during a step, in which the "
                    "ranks compute with a copy of it. Write to the parameters of the module instead."
                )
            whole.copy_(local_shard_of(shard))
            self._version = count_writes(whole)
            self.flat_shard.touch()
        self._watch_shard()

    @torch.no_grad()
    def _take_over_writes(self) -> None:
        """Update the shard from writes to the gathered parameter."""
        whole = self.whole
        if not self.is_whole or whole is None or count_writes(whole) == self._version:
            return
        self._version = count_writes(whole)
        shard: Any = self.sharded_param
        if shard.device_mesh.size() > 1 and getattr(self.module, "max_norm", None) is not None:
            raise RuntimeError(
                f"The embedding of parameter {self.name!r} has max_norm, with which each rank scales the rows of its "
                "own batch: the ranks would diverge. Train on one device, or leave max_norm out."
            )
        self.flat_shard.open()
        local = local_shard_of(shard)
        local.copy_(cut_own_shard(whole, shard))
        if local.device.type != "cpu":  # else the copy has waited, for a step or another stream that follows
            torch.accelerator.current_stream().synchronize()
        self.flat_shard.touch()

    def _check_place(self) -> None:
        """Refuse a parameter that has replaced the shard in the module: FSDP2 would drop it."""
        if self.is_shard and own_parameters(self.module).get(self.key) is not self.sharded_param:
            raise RuntimeError(
                f"Parameter {self.name!r} was replaced while it is sharded, so the new parameter would be ignored. "
                "Copy values into it under torch.no_grad() instead; functional_call and assign=True replace it."
            )

    def _send(self, gradient: Tensor) -> Tensor:
        if gradient.device.type != "cpu":
            # Replicas are reduced on their own stream: the memory must not be reused before this one gets here.
            gradient.record_stream(torch.accelerator.current_stream())
        gradient = gradient.to(self.flat_shard.transfer_dtype)
        if self._buffer is None:
            return gradient
        return self._buffer[: gradient.numel()].view(gradient.shape).copy_(gradient, non_blocking=True)
