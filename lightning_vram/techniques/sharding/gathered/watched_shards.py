"""Tensors that another thread is writing: reading one blocks until the write has finished."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_vram.core.tensors.parameter_classes import OURS
from lightning_vram.private_names.fsdp2.sharded_tensors import AskedDTensor
from lightning_vram.private_names.torch.tensors import local_part_of
from lightning_vram.private_names.torch.trees import tree_leaves
from lightning_vram.techniques.sharding.gathered.settable_shards import gathered_of

_WAIT = f"{OURS}wait_until_written"  # an attribute: what it refers to may refer to the tensor
_CLASS = f"{OURS}class_when_written"
_AFTER = f"{OURS}after_use"


class WatchedShard(AskedDTensor):
    """What the class of a ``DTensor`` is derived from, first, while it is watched; nothing else changes.

    The writer works on the local tensor, which is not watched.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Wait for all that is read, and go on as for any ``DTensor``."""
        watched = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, WatchedShard)]
        after = [tell for leaf in watched if (tell := vars(leaf).get(_AFTER)) is not None]
        for leaf in watched:
            wait_until_written(leaf)
        result = func(*args, **(kwargs or {}))
        for tell in after:
            tell(func)
        return result

    # What full_tensor() and others read past any dispatch.
    @override
    def give_local(self) -> Tensor:
        wait_until_written(self)
        return local_part_of(self)

    @property
    def data(self) -> Tensor:
        """As that of its own class, when it is written."""
        if _AFTER not in vars(self):  # else nothing is being written
            wait_until_written(self)
            return self.data
        gathered = gathered_of(self)
        assert gathered is not None
        return gathered.data

    @data.setter
    def data(self, values: Tensor) -> None:
        wait_until_written(self)
        self.data = values

    def __deepcopy__(self, memo: Any) -> Any:
        wait_until_written(self)
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As that of ``DTensor``, when it is written."""
        wait_until_written(self)
        return self.__reduce_ex__(protocol)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:  # type: ignore[override]
        """As that of ``DTensor``, when it is written."""
        wait_until_written(self)
        return repr(self)


class WatchedTensor(Tensor):
    """What the class of a plain tensor is while it is watched: a count of steps, say. The writer has an alias."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Wait for all that is used, and go on as for plain tensors."""
        for leaf in tree_leaves((args, kwargs)):
            wait_until_written(leaf)
        return func(*args, **(kwargs or {}))


_WATCHED = WatchedShard, WatchedTensor


@cache
def _watched(kind: type) -> type:
    return type(f"Watched{kind.__name__}", (WatchedShard, kind), {}) if issubclass(kind, DTensor) else WatchedTensor


def watch(tensors: Iterable[Tensor], wait: Callable[[], None], *, after: Callable[[Any], None] | None = None) -> None:
    """Let ``wait`` be called before one of ``tensors`` is read, once. Other classes than these two are passed over.

    ``after`` is called with the operator that has used one.
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
    """Take that back."""
    for tensor in tensors:
        if isinstance(tensor, _WATCHED):
            tensor.__class__ = vars(tensor).pop(_CLASS)
            vars(tensor).pop(_WAIT, None)
            vars(tensor).pop(_AFTER, None)


def wait_until_written(value: Any) -> None:
    """Wait until ``value``, should it be a tensor that is watched, is written."""
    if isinstance(value, _WATCHED):
        wait = vars(value).get(_WAIT)
        unwatch([value])
        if wait is not None:
            wait()
