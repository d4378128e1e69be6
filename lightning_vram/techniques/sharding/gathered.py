"""Tensor classes of shards, of what a pending step writes, and of gathered weights: reads wait, writes count."""

import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from typing_extensions import override

from lightning_vram.core.ranks import RankAgreement, RankAgreementError
from lightning_vram.core.tensors.properties import OURS, CountedParameter, add_parameter_class, while_plain
from lightning_vram.private_names.dispatcher import DispatchKey, is_key_excluded, is_mutable
from lightning_vram.private_names.fsdp2 import (
    AskedDTensor,
    local_shard,
    own_shard_of,
    read_numbers_by,
    set_own_shard,
)
from lightning_vram.private_names.torch import tree_leaves

_OWNER = f"{OURS}owner"


class OwnedTensor(AskedDTensor):
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
        if owned and is_mutable(func):
            for leaf in tree_leaves((args[:1], kwargs.get("out"))):
                if isinstance(leaf, OwnedTensor):
                    _owner_of(leaf).after_write()
        return result

    # full_tensor() and others read this without dispatch.
    @override
    def give_local(self) -> Tensor:
        _owner_of(self).before_use(self)
        return own_shard_of(self)

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
        return while_plain(self, DTensor, lambda: self.__deepcopy__(memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        _owner_of(self).before_use(self)
        return while_plain(self, DTensor, lambda: self.__reduce_ex__(protocol))


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
    """Undo :func:`own`."""
    if type(tensor) is OwnedTensor:
        tensor.__class__ = DTensor  # type: ignore[assignment]
        del vars(tensor)[_OWNER]


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


_WAIT = f"{OURS}wait_until_written"  # an attribute: what it refers to may refer to the tensor


class WatchedTensor(Tensor):
    """Class of a regular tensor while watched, such as a step count. The writer has an alias."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if type(leaf) is WatchedTensor:
                wait = vars(leaf)[_WAIT]
                unwatch([leaf])
                wait()
        return func(*args, **(kwargs or {}))


def watch(tensors: Iterable[Tensor], wait: Callable[[], None]) -> None:
    """Call ``wait`` once, before one of ``tensors`` is used: gradients and moments; shards have owners for good.

    Tensors of other subclasses are skipped.
    """
    pending = _Pending(wait)
    for tensor in tensors:
        kind = type(tensor)
        if kind is Tensor or kind is WatchedTensor:
            tensor.__class__ = WatchedTensor
            vars(tensor)[_WAIT] = wait
        elif kind is DTensor or (kind is OwnedTensor and type(vars(tensor)[_OWNER]) is _Pending):
            tensor.__class__ = OwnedTensor
            vars(tensor)[_OWNER] = pending


def unwatch(tensors: Iterable[Tensor]) -> None:
    """Undo :func:`watch`."""
    for tensor in tensors:
        if type(tensor) is WatchedTensor:
            tensor.__class__ = Tensor  # type: ignore[assignment]
            del vars(tensor)[_WAIT]
        elif type(tensor) is OwnedTensor and type(vars(tensor)[_OWNER]) is _Pending:
            tensor.__class__ = DTensor  # type: ignore[assignment]
            del vars(tensor)[_OWNER]


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
