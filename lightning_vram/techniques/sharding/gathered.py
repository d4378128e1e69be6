"""Tensor classes of shards and gathered weights: assignment to ``data``, waits before reads, observed uses."""

import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_vram.core.ranks import RankAgreement, RankAgreementError
from lightning_vram.core.tensors.properties import OURS, CountedParameter, add_parameter_class, while_plain
from lightning_vram.private_names.dispatcher import DispatchKey, FakeTensor, is_key_excluded
from lightning_vram.private_names.fsdp2 import AskedDTensor, local_shard, read_numbers_by, set_own_shard
from lightning_vram.private_names.torch import current_graph_task_id, local_shard_of, tree_leaves

_GATHERED = f"{OURS}gathered"


class SettableShard(DTensor):
    """Class of sharded parameters. A ``DTensor`` ignores ``parameter.data = values``, as averages of weights do it."""

    @property
    def data(self) -> Tensor:
        """That of the gathered parameter, if there is one."""
        gathered: Tensor | None = gathered_of(self)
        if gathered is not None:
            return gathered.data
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, values: Tensor) -> None:
        gathered = gathered_of(self)
        set_values(self if gathered is None else gathered.data, values)

    # Copies and files have DTensor's class.
    def __deepcopy__(self, memo: Any) -> Any:
        return while_plain(self, DTensor, lambda: self.__deepcopy__(memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return while_plain(self, DTensor, lambda: self.__reduce_ex__(protocol))


class GatheredParameter(CountedParameter):
    """Class of gathered parameters: counts writes, which the shard gets in the end.

    Its memory is FSDP2's, so ``parameter.data = values`` copies.
    """

    @property
    def data(self) -> Tensor:
        """As of any parameter."""
        return super().data

    @data.setter
    def data(self, values: Tensor) -> None:
        set_values(self.data, values)


add_parameter_class(GatheredParameter)


def gathered_of(shard: Tensor) -> Tensor | None:
    """Return the gathered parameter of a shard, if any."""
    return vars(shard).get(_GATHERED)


def set_gathered(shard: Tensor, gathered: Tensor | None) -> None:
    """Set or clear (``None``) the gathered parameter of a shard."""
    vars(shard)[_GATHERED] = gathered


def make_settable(shards: Iterable[Tensor]) -> None:
    """Let ``shard.data = values`` write to ``shards``."""
    for shard in shards:
        if type(shard) is DTensor:
            shard.__class__ = SettableShard


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


_WAIT = f"{OURS}wait_until_written"  # an attribute: what it refers to may refer to the tensor
_CLASS, _AFTER = f"{OURS}class_when_written", f"{OURS}after_use"


class WatchedShard(AskedDTensor):
    """First base of a watched ``DTensor``'s class. The writer uses the local tensor, which is not watched."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        watched = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, WatchedShard)]
        after = [notify for leaf in watched if (notify := vars(leaf).get(_AFTER)) is not None]
        for leaf in watched:
            wait_until_written(leaf)
        result = func(*args, **(kwargs or {}))
        for notify in after:
            notify(func)
        return result

    # full_tensor() and others read this without dispatch.
    @override
    def give_local(self) -> Tensor:
        wait_until_written(self)
        return local_shard_of(self)

    @property
    def data(self) -> Tensor:
        """Wait, then as of its own class."""
        if _AFTER in vars(self) and (gathered := gathered_of(self)) is not None:  # nothing is being written
            return gathered.data
        wait_until_written(self)
        return self.data

    @data.setter
    def data(self, values: Tensor) -> None:
        wait_until_written(self)
        self.data = values

    def __deepcopy__(self, memo: Any) -> Any:
        wait_until_written(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        wait_until_written(self)
        return self.__reduce_ex__(protocol)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        wait_until_written(self)
        return repr(self)


class WatchedTensor(Tensor):
    """Class of a regular tensor while watched, such as a step count. The writer has an alias."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            wait_until_written(leaf)
        return func(*args, **(kwargs or {}))


_WATCHED = WatchedShard, WatchedTensor


@cache
def _watched(kind: type) -> type:
    return type(f"Watched{kind.__name__}", (WatchedShard, kind), {}) if issubclass(kind, DTensor) else WatchedTensor


def watch(tensors: Iterable[Tensor], wait: Callable[[], None], *, after: Callable[[Any], None] | None = None) -> None:
    """Call ``wait`` once, before one of ``tensors`` is read, and ``after`` with the operator that used it.

    Tensors of other subclasses are skipped.
    """
    for tensor in tensors:
        if isinstance(tensor, DTensor) or type(tensor) in (Tensor, WatchedTensor):
            if not isinstance(tensor, _WATCHED):
                vars(tensor)[_CLASS] = type(tensor)
                tensor.__class__ = _watched(type(tensor))
            vars(tensor)[_WAIT] = wait
            vars(tensor).pop(_AFTER, None)
            if after is not None:
                vars(tensor)[_AFTER] = after


def unwatch(tensors: Iterable[Tensor]) -> None:
    """Undo :func:`watch`."""
    for tensor in tensors:
        if isinstance(tensor, _WATCHED):
            tensor.__class__ = vars(tensor).pop(_CLASS)
            vars(tensor).pop(_WAIT, None)
            vars(tensor).pop(_AFTER, None)


def wait_until_written(value: Any) -> None:
    """Wait until ``value``, if it is a watched tensor, is written."""
    if isinstance(value, _WATCHED):
        wait = vars(value).get(_WAIT)
        unwatch([value])
        if wait is not None:
            wait()


_READS = f"{OURS}reads"
_CASTING = {F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}
_CASTING |= {F.multi_head_attention_forward, torch.addmm}  # addmm: of transformers' Conv1D
_PROPERTIES: Any = Tensor
_HARMLESS = {_PROPERTIES.grad.__get__, _PROPERTIES.grad.__set__, _PROPERTIES.grad_fn.__get__}
_HARMLESS |= {_PROPERTIES.requires_grad.__set__, Tensor.requires_grad_}
# Compares dtypes to choose a path that autocast excludes.
_ATTENTION = nn.MultiheadAttention.forward.__code__
# Not values of the weight, such as its shape. Not its dtype: tensors cast to that differ.
_FACTS = (int, str, torch.device, torch.layout, RemovableHandle)


class WeightReads:
    """Observed uses of a gathered weight until the end of a backward: whether 16 bit give the same results.

    They do if only autocast reads the values, which casts at each use, and no backward sums gradients of several uses:
    the baseline does that in fp32.
    """

    def __init__(self) -> None:
        self.is_used = False
        self.needs_fp32 = False
        self._num_uses = [0, 0]  # before the backward, and in it, where checkpoints compute again

    def note(self, weight: Tensor, func: Any, result: Any) -> None:
        """Record a function of the weight and its result."""
        if func in _CASTING:
            self.is_used = True
            self.needs_fp32 |= not torch.is_autocast_enabled(weight.device.type)
            self._num_uses[current_graph_task_id() != -1] += torch.is_grad_enabled() and weight.requires_grad
        elif func not in _HARMLESS and not _is_asked_by_attention(func):
            self.needs_fp32 |= not all(isinstance(leaf, _FACTS) for leaf in tree_leaves(result))

    def end_backward(self) -> None:
        """Evaluate the uses of this backward."""
        self.needs_fp32 |= max(self._num_uses) > 1
        self.forget_uses()

    def forget_uses(self) -> None:
        """Count from zero."""
        self._num_uses = [0, 0]


def _is_asked_by_attention(func: Any) -> bool:
    """Whether torch's attention reads the dtype of a weight: the caller of :meth:`WeightReads.note`'s caller."""
    return func == _PROPERTIES.dtype.__get__ and sys._getframe(3).f_code is _ATTENTION


class ObservedParameter(GatheredParameter):
    """Class of a gathered weight on trial: same results, some microseconds later."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        weights = [leaf for leaf in tree_leaves((args, kwargs)) if type(leaf) is ObservedParameter]
        for weight in weights:
            weight.__class__ = GatheredParameter  # type: ignore[assignment]
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            for weight in weights:
                weight.__class__ = ObservedParameter
        for weight in weights:
            vars(weight)[_READS].note(weight, func, result)
        return result


add_parameter_class(ObservedParameter)


def observe(weight: Any, reads: WeightReads | None) -> None:
    """Let ``reads`` record uses of a gathered weight; ``None``: none. A fake tensor keeps its class: it is cast."""
    if isinstance(weight, FakeTensor):
        if reads is not None:
            reads.is_used = True
        return
    if type(weight) in (nn.Parameter, GatheredParameter, ObservedParameter):  # else it refuses writes
        weight.__class__ = GatheredParameter if reads is None else ObservedParameter
        vars(weight)[_READS] = reads


_LOW_PRECISION = f"{OURS}low_precision"
_FACTORS = f"{OURS}factors"


def keep_low_precision(gradient: Tensor, values: Tensor) -> None:
    """Let ``gradient``, an empty ``DTensor``, have the values of ``values`` until :func:`upcast`."""
    vars(gradient)[_LOW_PRECISION], vars(gradient)[_FACTORS] = values, []


def low_precision_of(gradient: Tensor | None) -> Tensor | None:
    """Return these values, not scaled; ``None`` if a gradient has its own values, or there is none."""
    return None if gradient is None else vars(gradient).get(_LOW_PRECISION)


def scale_low_precision(gradient: Tensor, factor: Tensor) -> None:
    """Multiply ``gradient`` by a scalar."""
    if factor != 1:
        vars(gradient)[_FACTORS].append(factor)


@torch.no_grad()
def fp32_part(gradient: Tensor, part: slice | None = None) -> Tensor:
    """Return the local values of a gradient in its own dtype, upcast for this call if it is stored in 16 bit.

    ``part``: some of them, flat; ``None``: all, in their shape.
    """
    values = low_precision_of(gradient)
    if values is None:
        own: Tensor = local_shard(gradient)
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
        set_own_shard(gradient, fp32)
        unwatch([gradient])


_INSIDE = ("torch", "lightning_vram")


class WholeNumbers:
    """Makes ``item()``, ``float()``, ``bool()`` and ``torch.tensor([...])`` of sharded tensors collectives.

    PyTorch returns the rank's part of a pending sum, so that ranks decide differently. A vote before each read finds
    ranks that do not take part, within ``timeout``. Creating one is a collective, too; :meth:`remove` ends it.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._agreement = RankAgreement(timeout)
        read_numbers_by(self._read)

    def remove(self) -> None:
        """Restore reads of each rank's own part."""
        read_numbers_by(None)
        self._agreement.close()

    def _read(self, tensor: Any) -> Any:
        if is_key_excluded(DispatchKey.Python):
            # torch.tensor([...]) turns DTensor's operators off, in its own thread only.
            with ThreadPoolExecutor(1) as thread:
                return thread.submit(self._read, tensor).result()
        if all(place.is_replicate() for place in tensor.placements) or self._agreement.is_alone:
            return local_shard(tensor).item()
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
