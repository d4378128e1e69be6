"""FSDP2's parameter with its shard on the host: writes to it and its gathered values, and gradients.

First the tensor classes of shards, of what a pending step writes, and of gathered weights: reads wait, writes count.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from typing_extensions import override

from lightning_vram.core.ranks import RankAgreement, RankAgreementError
from lightning_vram.core.tensors import properties
from lightning_vram.private_names import fsdp2
from lightning_vram.private_names.dispatcher import DispatchKey, is_key_excluded, schema_of
from lightning_vram.private_names.torch import gradient_hooks, has_accumulation_hooks, local_shard_of, tree_leaves

if TYPE_CHECKING:
    from lightning_vram.techniques.sharding.apply import FullSharding
    from lightning_vram.techniques.sharding.flat_shards import FlatShard
    from lightning_vram.techniques.sharding.group import ShardedGroup

_OWNER = f"{properties.OURS}owner"


class OwnedTensor(fsdp2.AskedDTensor):
    """Class of sharded parameters, and of gradients and moments in a pending step: their use goes through an owner.

    ``parameter.data = values``, which a ``DTensor`` ignores, writes to it. Before torch 2.13 operators are not seen,
    only reads. Steps and transfers use the local tensor, past this class.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, OwnedTensor):
                _owner_of(leaf).before_use(leaf)
        owned = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OwnedTensor)]  # still
        for tensor in owned:
            tensor.__class__ = DTensor  # type: ignore[assignment]
        try:
            result = func(*args, **kwargs)
        finally:
            for tensor in owned:
                tensor.__class__ = OwnedTensor
        if owned and schema_of(func).is_mutable:
            for leaf in tree_leaves((args[:1], kwargs.get("out"))):
                if isinstance(leaf, OwnedTensor):
                    _owner_of(leaf).after_write()
        return result

    # full_tensor() and others read this without dispatch.
    @override
    def give_local(self) -> Tensor:
        _owner_of(self).before_use(self)
        return fsdp2.own_shard_of(self)

    @property
    def data(self) -> Tensor:
        """That of the gathered parameter, while that is used."""
        owner = _owner_of(self)
        if owner.used is not None:
            return owner.used.data  # type: ignore[no-any-return]
        owner.before_use(self)
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, values: Tensor) -> None:
        used = _owner_of(self).used
        set_values(self if used is None else used.data, values)

    # Copies and files have DTensor's class.
    def __deepcopy__(self, memo: Any) -> Any:
        _owner_of(self).before_use(self)
        return properties.while_plain(self, DTensor, lambda: self.__deepcopy__(memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        _owner_of(self).before_use(self)
        return properties.while_plain(self, DTensor, lambda: self.__reduce_ex__(protocol))


def _owner_of(tensor: Tensor) -> Any:
    return vars(tensor)[_OWNER]


def own(tensor: Tensor, owner: Any) -> None:
    """Let ``owner`` stand behind a ``DTensor``; those of other subclasses stay what they are.

    Its ``before_use(tensor)`` makes the tensor hold its values, its ``after_write()`` takes over what an operator has
    written, and ``used`` is the gathered parameter while that is used in place of the shard, or ``None``.
    """
    if type(tensor) is DTensor:
        vars(tensor)[_OWNER] = owner
        tensor.__class__ = OwnedTensor


def disown(tensor: Tensor) -> None:
    """Undo :func:`own`, or :func:`watch` for one."""
    if type(tensor) in _PLAIN:
        tensor.__class__ = _PLAIN[type(tensor)]
        del vars(tensor)[_OWNER]


class GatheredParameter(properties.CountedParameter):
    """Class of gathered parameters, in FSDP2's memory: counts writes, which the shard gets in the end."""

    @property
    def data(self) -> Tensor:
        """As of any parameter."""
        return super().data

    @data.setter
    def data(self, values: Tensor) -> None:
        set_values(self.data, values)


properties.add_parameter_class(GatheredParameter)


@torch.no_grad()
def set_values(parameter: Tensor, values: Tensor) -> None:
    """Copy whole or equally sharded ``values`` into ``parameter``; ``RuntimeError`` for another shape or dtype."""
    if values.shape != parameter.shape or values.dtype != parameter.dtype:
        raise RuntimeError(
            "While fsdp_offload shards a model, `parameter.data = values` needs the same shape and dtype: the "
            f"parameter has {tuple(parameter.shape)} and {parameter.dtype}, the values have {tuple(values.shape)} and "
            f"{values.dtype}."
        )
    if isinstance(parameter, DTensor) and not isinstance(values, DTensor):
        values = values.to(parameter.device)
        values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
    elif isinstance(values, DTensor) and not isinstance(parameter, DTensor):
        values = values.full_tensor()
    parameter.copy_(values)


class _Pending:
    """Owner of a tensor until somebody uses it."""

    used = None

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def before_use(self, tensor: Tensor) -> None:
        disown(tensor)
        self._wait()


class WatchedTensor(Tensor):
    """Class of a regular tensor while watched, such as a step count. The writer has an alias."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if type(leaf) is WatchedTensor:
                _owner_of(leaf).before_use(leaf)
        return func(*args, **(kwargs or {}))


_PLAIN: dict[type[Tensor], Any] = {OwnedTensor: DTensor, WatchedTensor: Tensor}


def watch(tensors: Iterable[Tensor], wait: Callable[[], None]) -> None:
    """Call ``wait`` once, before one of ``tensors`` is used, but for those of other subclasses."""
    pending = _Pending(wait)
    for tensor in tensors:
        if type(tensor) in (Tensor, DTensor) or _is_pending(tensor):
            tensor.__class__ = OwnedTensor if isinstance(tensor, DTensor) else WatchedTensor
            vars(tensor)[_OWNER] = pending


def unwatch(tensors: Iterable[Tensor]) -> None:
    """Undo :func:`watch`."""
    for tensor in filter(_is_pending, tensors):
        disown(tensor)


def _is_pending(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and type(vars(tensor)[_OWNER]) is _Pending


_LOW_PRECISION = f"{properties.OURS}low_precision"
_FACTORS = f"{properties.OURS}factors"


def low_precision_of(gradient: Tensor | None) -> Tensor | None:
    """Return these values, not scaled; ``None`` if a gradient has its own values, or there is none."""
    return None if gradient is None else vars(gradient).get(_LOW_PRECISION)


def scale_low_precision(gradient: Tensor, factor: Tensor) -> None:
    """Multiply ``gradient`` by a scalar."""
    if factor != 1:
        vars(gradient)[_FACTORS].append(factor)


@torch.no_grad()
def fp32_part(gradient: Tensor, part: slice | None = None) -> Tensor:
    """Return local values of a gradient, or a flat part, in its own dtype: upcast for this call if in 16 bit."""
    values = low_precision_of(gradient)
    if values is None:
        own: Tensor = fsdp2.local_shard(gradient)
        return own if part is None else own.reshape(-1)[part]
    fp32 = (values if part is None else values.reshape(-1)[part]).to(gradient.dtype)
    for factor in vars(gradient)[_FACTORS]:
        fp32.mul_(factor)
    return fp32


def low_precision_part(gradient: Tensor | None, part: slice) -> tuple[Tensor, float] | None:
    """Return some 16-bit values, flat, and their factor; ``None`` if there are none, or several factors: they round."""
    values = low_precision_of(gradient)
    if gradient is None or values is None or len(vars(gradient)[_FACTORS]) > 1:
        return None
    return values.reshape(-1)[part], float(next(iter(vars(gradient)[_FACTORS]), 1.0))


def upcast(gradient: Tensor | None) -> None:
    """Give a gradient, if there is one, values in its own dtype."""
    if gradient is not None and low_precision_of(gradient) is not None:
        fp32 = fp32_part(gradient)
        del vars(gradient)[_LOW_PRECISION], vars(gradient)[_FACTORS]
        fsdp2.set_own_shard(gradient, fp32)
        unwatch([gradient])


_INSIDE = ("torch", "lightning_vram")


class WholeNumbers:
    """Makes ``item()``, ``float()``, ``bool()`` and ``torch.tensor([...])`` of sharded tensors collectives.

    PyTorch returns the rank's part of a pending sum, so that ranks decide differently. A vote before each read finds
    ranks that do not take part, within ``timeout``. Creating one is a collective, too; :meth:`remove` ends it.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._agreement = RankAgreement(timeout)
        fsdp2.read_numbers_by(self._read)

    def remove(self) -> None:
        """Restore reads of each rank's own part."""
        fsdp2.read_numbers_by(None)
        self._agreement.close()

    def _read(self, tensor: Any) -> Any:
        if is_key_excluded(DispatchKey.Python):
            # torch.tensor([...]) turns DTensor's operators off, in its own thread only.
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(self._read, tensor).result()
        if all(place.is_replicate() for place in tensor.placements) or self._agreement.is_alone:
            return fsdp2.local_shard(tensor).item()
        self._meet()
        return tensor.detach().full_tensor().item()

    def _meet(self) -> None:
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
            frame = frame.f_back
        line = frame.f_lineno
        try:
            if self._agreement.largest(line, -line) == (line, -line):
                return
            cause = None
        except RankAgreementError as error:
            cause = error
        raise RuntimeError(
            f"Only some ranks read a value of a sharded tensor in {frame.f_code.co_filename}:{line}, but each rank "
            "holds a shard of it. Read it on every rank, for example norm = float(gradient.norm()), before code that "
            "only rank 0 runs, for example logger.log_metrics({'norm': norm})."
        ) from cause


def make_announcement(sharding: "FullSharding") -> Any:
    """Return a hook for gathered parameters that announces a backward within the root's forward.

    FSDP2 misses it if none of its layers takes part. Micro-batches may continue with this hook, which only tells. It
    refers weakly: the garbage collector does not see hooks, and would leak a cycle of tensor, hook and owner.
    """
    owner = weakref.ref(sharding)

    def announce(_: Tensor) -> None:
        if (sharding := owner()) is not None and sharding.is_inside:
            fsdp2.announce_backward(sharding.module)

    announce.only_tells = True  # type: ignore[attr-defined]
    return announce


class ShardedParameter(fsdp2.ParameterBase):
    """Replaces the class of FSDP2's object, see :func:`~lightning_vram.techniques.sharding.group.take_over`.

    The group gathers and releases it, by the attributes. Writes in a training step count on whichever of the two code
    has got hold of: those to the gathered parameter are counted, and taken over when it is released; those to the shard
    (of ``optimizer.param_groups``) pass its class. FSDP2 casts on the device, so that shards and gradients are
    transferred in fp32, and blocks on a gradient when there is one already.
    """

    flat_shard: "FlatShard"
    group: "ShardedGroup"
    announcement: Any  # hook to be on the gathered parameter, or ``None``
    wants_gradient: bool
    is_counted = False  # whether calls of its layer are; compiled code rounds gradients otherwise
    version: int  # of the gathered parameter, when it was gathered
    sent: Tensor | None = None  # a gradient in transfer
    buffer: Tensor | None = None  # where it goes, flat; ``None`` if it is on the host already
    is_reducing = False  # in FSDP2
    _held: Any = None  # the gradient that is set aside during a reduction
    _is_hooked: bool
    _proxy: Any = None  # a gradient for FSDP2 to set
    _low_precision: "weakref.ref[Tensor] | None" = None  # the last gradient in 16 bit

    def take_over(self, group: "ShardedGroup", flat_shard: "FlatShard", announcement: Any) -> None:
        """Initialize."""
        fsdp2.look_past_attribute(self)
        self.begin()
        self.group, self.flat_shard, self.announcement = group, flat_shard, announcement
        self.wants_gradient = self.sharded_param.requires_grad
        own(self.sharded_param, self)

    @property
    def gathered_dtype(self) -> torch.dtype:
        """Dtype of the gathered parameter."""
        return self.flat_shard.transfer_dtype

    def init_unsharded_param(self) -> None:
        """Create the gathered parameter, if there is none, so that it counts writes."""
        if self.whole is None:
            super().init_unsharded_param()
            whole: Any = self.whole
            if type(whole) is nn.Parameter:  # else it is fake, or refuses writes
                whole.__class__ = GatheredParameter
            self._is_hooked = False
            self._hook()

    def _hook(self) -> None:
        whole = self.whole
        if whole is not None and whole.requires_grad and self.announcement is not None and not self._is_hooked:
            whole.register_post_accumulate_grad_hook(self.announcement)
            self._is_hooked = True

    def agree_on_gradient(self) -> None:
        """Make ``requires_grad`` of the gathered parameter and the shard equal: the one that has changed wins.

        Optimizers hold the shard, code within a training step the gathered parameter: either may be frozen.
        """
        both = [one for one in (self.sharded_param, self.whole) if one is not None]
        if any(one.requires_grad != self.wants_gradient for one in both):
            self.wants_gradient = not self.wants_gradient
            for one in both:
                one.requires_grad_(self.wants_gradient)
            self._hook()

    def refuse_replacement(self) -> None:
        """Refuse a parameter that has replaced the shard in the module: FSDP2 would drop it."""
        raise RuntimeError(
            f"Parameter {self.name!r} was replaced while it is sharded, so the new parameter would be ignored. "
            "Copy values into it under torch.no_grad() instead; functional_call and assign=True replace it."
        )

    def reset_sharded_param(self) -> None:
        """Follow a ``load_state_dict``, which must have loaded in place: flat shards own the memory."""
        if self.group.is_sharded and any(place.get(name) is not self.sharded_param for place, name in self.places):
            self.refuse_replacement()
        super().reset_sharded_param()  # type: ignore[no-untyped-call]

    # --- writes in a training step ---

    @property
    def used(self) -> nn.Parameter | None:
        """The gathered parameter while the group is gathered."""
        return self.whole if self.group.is_unsharded else None

    def before_use(self, *unused: object) -> None:
        """Wait until the shard may be read and written, and update it from the gathered parameter."""
        self.group.steps.touch(self.flat_shard)
        if self.used is not None:
            self.take_over_writes()

    @torch.no_grad()
    def after_write(self) -> None:
        """Update the gathered parameter from the shard."""
        used, shard = self.used, cast(DTensor, self.sharded_param)
        if used is None:
            return
        if shard.device_mesh.size() > 1:
            raise RuntimeError(
                f"Parameter {self.name!r} was written through optimizer.param_groups during a step, in which the "
                "ranks compute with a copy of it. Write to the parameters of the module instead."
            )
        used.copy_(fsdp2.own_shard_of(shard))
        self.version = properties.count_writes(used)
        self.flat_shard.touch()

    @torch.no_grad()
    def take_over_writes(self) -> None:
        """Update the shard from writes to the gathered parameter, if there were any."""
        whole, shard, flat = self.whole, cast(DTensor, self.sharded_param), self.flat_shard
        if properties.count_writes(whole) == self.version:
            return
        self.version = properties.count_writes(whole)
        if shard.device_mesh.size() > 1 and getattr(fsdp2.place_of(self)[0], "max_norm", None) is not None:
            raise RuntimeError(
                f"The embedding of parameter {self.name!r} has max_norm, with which each rank scales the rows of its "
                "own batch: the ranks would diverge. Train on one device, or leave max_norm out."
            )
        if flat.transfer_dtype != flat.own_dtype:
            raise RuntimeError(
                f"Parameter {self.name!r} was written in a step, in which it has 16 bits: the write would round all of "
                "it. FSDPOffloadStrategy(narrow_transfers=False) gathers it in 32 bits."
            )
        for other in self.group.flat_shards:  # code may compute what it writes from the others
            other.seen_in_fp32 |= other.is_on_trial
        flat.open()
        local = fsdp2.own_shard_of(shard)
        local.copy_(fsdp2.cut_own_shard(whole, shard))
        if local.device.type != "cpu":  # else the copy has waited, for a step or another stream that follows
            torch.accelerator.current_stream().synchronize()
        flat.touch()

    # --- gradients ---

    def begin_reduction(self) -> None:
        """Set the shard's gradient aside: FSDP2 would block to accumulate."""
        self._held, self.sharded_param.grad = self.sharded_param.grad, None
        self.is_reducing = True

    def end_reduction(self) -> None:
        """Put the gradient back."""
        self.is_reducing = False
        self.sharded_param.grad, self._held = self._held, None

    def to_sharded_dtensor(self, tensor: Tensor) -> Any:
        """Take the reduced gradient from FSDP2, on the stream that reduced it."""
        if not self.is_reducing:
            return super().to_sharded_dtensor(tensor)
        self.send(tensor)
        if self._proxy is None:
            self._proxy = super().to_sharded_dtensor(self.memory.new_empty(()).expand(self.sharded_size))
        return self._proxy

    def send(self, gradient: Tensor) -> None:
        """Send a reduced gradient, which has to :meth:`land`, to the host."""
        if gradient.device.type != "cpu":
            # It was computed, or reduced over replicas, on another stream: its memory must not be reused before this
            # one gets here.
            gradient.record_stream(torch.accelerator.current_stream())
        dtype = self.flat_shard.transfer_dtype
        sent = gradient if gradient.dtype == dtype else gradient.to(dtype)
        if self.buffer is not None:
            sent = self.buffer[: sent.numel()].view(sent.shape).copy_(sent, non_blocking=True)
        self.sent = sent
        if has_accumulation_hooks(self.sharded_param):
            raise RuntimeError(
                f"Parameter {self.name!r} has a hook of register_post_accumulate_grad_hook, which does not run while "
                "it is sharded: use register_hook, or on_before_optimizer_step."
            )
        if gradient_hooks(self.sharded_param):
            self._call_hooks(sent)

    def _call_hooks(self, gradient: Tensor) -> None:
        """Call hooks of the shard; autograd calls those of the gathered parameter."""
        shard: Any = self.sharded_param
        if self.flat_shard.own_device.type != self.flat_shard.device.type:
            torch.accelerator.current_stream().synchronize()
        sharded: Any = super().to_sharded_dtensor(gradient.to(shard.dtype))
        for hook in gradient_hooks(shard):
            changed = hook(sharded)
            sharded = sharded if changed is None else changed
        self.sent = local_shard_of(sharded)

    def land(self, gradient: Tensor) -> None:
        """Accumulate a gradient that is on the host."""
        shard: Any = self.sharded_param
        if shard.grad is not None:
            fsdp2.own_shard_of(shard.grad).add_(gradient)
        elif gradient.dtype == shard.dtype or not self.flat_shard.keeps_gradients:
            shard.grad = fsdp2.wrap_like(gradient.to(shard.dtype), shard)
        else:
            nothing = torch.full((), torch.nan, dtype=shard.dtype)
            shard.grad = proxy = fsdp2.wrap_like(nothing.expand(gradient.shape), shard)
            vars(proxy)[_LOW_PRECISION], vars(proxy)[_FACTORS] = gradient, []  # until upcast
            self._low_precision = weakref.ref(proxy)
            self.watch_gradient()

    @property
    def low_precision_gradient(self) -> Tensor | None:
        """The 16-bit gradient, while it is one and alive."""
        gradient = self._low_precision() if self._low_precision is not None else None
        return gradient if low_precision_of(gradient) is not None else None

    def watch_gradient(self) -> None:
        """Let the 16-bit gradient be upcast before code reads it."""
        gradient = self.low_precision_gradient
        if gradient is not None:
            held = weakref.ref(gradient)
            watch([gradient], lambda: upcast(held()))
