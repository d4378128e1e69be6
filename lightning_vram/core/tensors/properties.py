"""Properties of tensors: ordinary classes, versions, memory, layout, shards; and tensors in nested structures.

While saved-tensor hooks are set, autograd does not check whether a saved tensor was overwritten: functions here do.
Nested structures are pytrees, and dataclasses, which torch does not open.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from functools import cache, partial
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_vram.memory.estimate.fake_device import FakeParameter
from lightning_vram.private_names import dispatcher
from lightning_vram.private_names import torch as private
from lightning_vram.private_names.dispatcher import FakeTensor, without_dispatch

Result = TypeVar("Result")
OURS = "_lightning_vram_"  # how attributes begin that we put on tensors
PARAMETER_CLASSES: set[type] = {nn.Parameter, FakeParameter}
REAL_TYPES: set[type] = {Tensor, nn.Parameter}  # ordinary ones that hold values
PLAIN_TYPES: set[type] = {Tensor, nn.Parameter, nn.Buffer, FakeTensor, FakeParameter}


def add_parameter_class(kind: type[nn.Parameter]) -> None:
    """Treat a class of ours, which only watches what is done with a parameter, as an ordinary one."""
    PARAMETER_CLASSES.add(kind)
    PLAIN_TYPES.add(kind)
    REAL_TYPES.add(kind)


def while_plain(tensor: Any, kind: type, do: Callable[[], Result]) -> Result:
    """Copy or save ``tensor`` as one of class ``kind`` that has no attribute of ours."""
    ours, known = type(tensor), vars(tensor)
    tensor.__dict__ = {key: value for key, value in known.items() if not key.startswith(OURS)}  # a file may hold it
    tensor.__class__ = kind
    try:
        return do()
    finally:
        tensor.__class__ = ours
        tensor.__dict__ = known


def is_strided(tensor: Tensor) -> bool:
    """Whether ``tensor`` is an ordinary one: its bytes are its elements."""
    return tensor.layout is torch.strided and not tensor.is_nested


def num_bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor; of a sparse one, as if it were dense, since ``nbytes`` is not defined for all."""
    return tensor.nbytes if tensor.layout is torch.strided else tensor.itemsize * tensor.numel()


def version_counter(tensor: Tensor) -> Tensor:
    """Return an empty tensor with the version counter of ``tensor``: it counts its writes and holds no memory."""
    counter = alias(tensor)
    counter.data = _nothing(tensor.dtype, tensor.device)
    return counter


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def alias(tensor: Tensor) -> Tensor:
    """Return another tensor on the same memory and version counter, without graph, unaffected by ``.data =``."""
    key = dispatcher.DispatchKey.ADInplaceOrView
    if dispatcher.is_key_excluded(key):  # below autograd an alias would count versions on its own
        is_excluded = False
        with dispatcher.set_key_excluded(key, is_excluded):
            return _detach(tensor)
    return _detach(tensor)


def _detach(tensor: Tensor) -> Tensor:
    if type(tensor) in REAL_TYPES:
        with without_dispatch():  # no mode needs to see it
            return tensor.detach()
    with dispatcher.without_modes() if isinstance(tensor, FakeTensor) else nullcontext():
        return tensor.detach()


def check_version(counter: Tensor, expected: int, shape: Sequence[int]) -> None:
    """Raise autograd's error if a saved tensor was overwritten: its own check is off while hooks are set."""
    version = private.num_writes(counter)
    if version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{counter.type()} {list(shape)}] is at version {version}; expected version {expected} instead."
        )


_HANDED_OUT = f"{OURS}handed_out"
_NUM_SET = f"{OURS}num_set"


class CountedParameter(nn.Parameter):
    """The class of a parameter while it counts writes through ``.data``: averages, clipping, normalisation."""

    @property
    def data(self) -> Tensor:
        """As of any parameter; all tensors that it returns share one count of writes."""
        known = vars(self)
        if _HANDED_OUT not in known:
            known[_HANDED_OUT] = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return alias(known[_HANDED_OUT])

    @data.setter
    def data(self, values: Tensor) -> None:
        known = vars(self)
        known[_NUM_SET] = count_writes(self) - private.num_writes(self) + 1
        known.pop(_HANDED_OUT, None)
        torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]

    # Copies and files are plain ones.
    def __deepcopy__(self, memo: Any) -> Any:
        return while_plain(self, nn.Parameter, lambda: self.__deepcopy__(memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return while_plain(self, nn.Parameter, lambda: self.__reduce_ex__(protocol))


add_parameter_class(CountedParameter)


def count_writes(parameter: nn.Parameter) -> int:
    """Return how often a counted parameter was written, since it is counted."""
    known = vars(parameter)
    handed_out: Tensor | None = known.get(_HANDED_OUT)
    num_set: int = known.get(_NUM_SET, 0)
    return private.num_writes(parameter) + num_set + (0 if handed_out is None else private.num_writes(handed_out))


def count(parameter: nn.Parameter) -> None:
    """Begin to count; a parameter of another class stays what it is."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = CountedParameter


def stop_counting(parameter: nn.Parameter) -> None:
    """Let a parameter be an ordinary one again, if it is counted."""
    if type(parameter) is CountedParameter:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        for key in (_HANDED_OUT, _NUM_SET):
            vars(parameter).pop(key, None)


WHOLE_LAYOUT = "lightning_vram_layout"
"""Attribute of a sharded parameter, if it was not contiguous: a meta tensor that is as that was."""


def is_dense(tensor: Tensor) -> bool:
    """Whether the numbers of a strided tensor fill their part of memory, in any order; not if expanded or a slice."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return not tensor.numel()
        expected *= size
    return True


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a new tensor like this one: its own, and those of a contiguous one where it is expanded."""
    return tensor.stride() if is_dense(tensor) else torch.empty_like(tensor, device="meta").stride()


def flat_as_stored(tensor: Tensor) -> Tensor:
    """Return a flat view of a dense tensor: its numbers in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def stored_as(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Return ``tensor`` with these strides, which overlap nowhere; itself if it has them."""
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def stored_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return ``tensor`` with its numbers in the order of a new tensor like ``like``; itself if they are already."""
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor
    stride = dense_stride(like)
    orders = zip(tensor.shape, tensor.stride(), stride, strict=True)
    is_so = all(size == 1 or own == other for size, own, other in orders)
    return tensor if is_so else stored_as(tensor, stride)


def state_stored_like(state: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
    """Return an optimizer's state of a parameter, tensors stored in its order, as fused kernels need it."""
    return {
        key: stored_like(value, like) if type(value) is Tensor and value.shape == like.shape else value
        for key, value in state.items()
    }


def is_shard(parameter: Tensor | None) -> bool:
    """Whether ``parameter`` is a part of one that lies on several ranks."""
    return type(parameter) is not nn.Parameter and isinstance(parameter, DTensor)  # the first is quick


def sharded_modules(module: nn.Module) -> Iterator[Any]:
    """Yield the parts of ``module`` that FSDP2 shards, itself included: their parameters come and go with the calls."""
    yield from (part for part in module.modules() if isinstance(part, FSDPModule))


def is_sharded(module: nn.Module) -> bool:
    """Whether there are FSDP2 modules in ``module``."""
    return next(sharded_modules(module), None) is not None


Rebuild = Callable[[Sequence[Any]], Any]


def flatten_arguments(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[list[Any], Rebuild]:
    """Return the leaves of positional and keyword arguments, and a function that rebuilds them from as many others."""
    # Flat ones, as most are, without tree_flatten: each call of it leaves garbage that only the cyclic collector finds.
    args, kwargs = arguments
    values, num_args, names = [*args, *kwargs.values()], len(args), tuple(kwargs)
    if all(map(private.tree_is_leaf, values)):
        return values, lambda new: (tuple(new[:num_args]), dict(zip(names, new[num_args:], strict=True)))
    leaves, structure = private.tree_flatten(arguments)
    return leaves, partial(private.tree_unflatten, treespec=structure)


def flatten_output(output: Any) -> tuple[list[Any], Rebuild]:
    """Return the leaves of an output, and a function that rebuilds it from as many others."""
    if isinstance(output, Tensor):
        return [output], itemgetter(0)
    if type(output) is tuple and all(map(private.tree_is_leaf, output)):
        return list(output), tuple
    leaves, structure = private.tree_flatten(output)
    return leaves, partial(private.tree_unflatten, treespec=structure)


def iterate_leaves(tree: Any) -> Iterator[Any]:
    """Yield the leaves of a pytree, those in the fields of its dataclasses included."""
    if isinstance(tree, Tensor):  # what most modules take
        yield tree
        return
    for leaf in private.tree_leaves(tree, is_leaf=_is_opened):
        if _is_opened(leaf):
            yield from iterate_leaves(_read(leaf))
        else:
            yield leaf


def cast_where(is_meant: Callable[[object], bool], dtype: torch.dtype, tree: Any) -> Any:
    """Return ``tree`` with its tensors that ``is_meant`` accepts cast; what does not change is returned itself."""
    if isinstance(tree, Tensor):
        return tree.to(dtype) if is_meant(tree) else tree
    if not any(is_meant(leaf) for leaf in iterate_leaves(tree)):
        return tree

    def cast(leaf: Any) -> Any:
        if not _is_opened(leaf):
            return leaf.to(dtype) if is_meant(leaf) else leaf
        values = _read(leaf)
        changed = {name: cast_where(is_meant, dtype, value) for name, value in values.items()}
        if all(changed[name] is value for name, value in values.items()):
            return leaf
        twin = copy.copy(leaf)  # not by its __init__: checks and computed fields ran once
        for name, value in changed.items():
            object.__setattr__(twin, name, value)  # frozen ones too
        return twin

    return private.tree_map(cast, tree, is_leaf=_is_opened)


def _read(data: Any) -> dict[str, Any]:
    return {field.name: getattr(data, field.name) for field in fields(data) if hasattr(data, field.name)}


def _is_opened(leaf: object) -> bool:
    """Whether ``leaf`` is an object with fields. Registered classes (transformers' outputs) are opened by torch."""
    return is_dataclass(leaf) and not isinstance(leaf, type | nn.Module | Tensor) and private.tree_is_leaf(leaf)
