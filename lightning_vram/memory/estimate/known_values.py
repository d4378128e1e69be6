"""Values of fake tensors: fakes of operators that torch's own fake kernels refuse, and answers to reads.

Results of known numbers are known. Other reads are answered from a recorded real run (:mod:`.recorded_reads`); without
one a float is taken for 1, since programs log it, and compared tensors for equal. An integer, a truth value or a size
decides about shapes and branches: asking for it raises, and the caller has to record a real run.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from lightning_vram.memory.estimate.recorded_reads import (
    EQUAL,
    INDEX,
    MOST_NUMBERS,
    Read,
    RecordedReads,
    is_mask,
    is_number_for_lightning,
)
from lightning_vram.private_names.dispatcher import (
    CTC_BACKWARDS,
    EMBEDDING_BAG,
    GROUPED_MM,
    PACK_SEQUENCES,
    READ_NUMBER,
    TO_COPY,
    UNKNOWN_VALUES,
    UNSAFE_VIEW,
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    UnwrappedMode,
    schema_of,
    without_dispatch,
)
from lightning_vram.private_names.torch import storage_identity, tensors_in, tree_map

_aten = torch.ops.aten
_BINCOUNT = _aten.bincount.default
_ALIGNMENT_BYTES = 16  # of each row, on a card


def call_fake(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator on fake tensors; of a sparse result, values say how many rows it has: that is refused."""
    kernel = _KERNELS.get(func)
    result = func(*args, **kwargs) if kernel is None else kernel(*args, **kwargs)
    if isinstance(result, FakeTensor) and result.layout is not torch.strided:
        raise DynamicOutputShapeException(func)
    return result


def pad_packed_sequence(
    data: Tensor,
    batch_sizes: Tensor,
    batch_first: bool,  # noqa: FBT001 - as torch has it
    padding_value: float,
    total_length: int,
) -> tuple[Tensor, Tensor]:
    """Pad packed sequences with the operators that C++ calls: it writes lengths, and fakes have no memory."""
    sizes = [int(size) for size in batch_sizes]
    length, offset, start = max(total_length, len(sizes)), 0, 0
    padded = data.new_full((length, sizes[0], *data.shape[1:]), padding_value)
    for size, steps in groupby(sizes):
        num_steps = sum(1 for _ in steps)
        part = data[offset : offset + num_steps * size].view(num_steps, size, *data.shape[1:])
        padded[start : start + num_steps, :size].copy_(part)
        offset, start = offset + num_steps * size, start + num_steps
    lengths = torch.tensor([sum(size > place for size in sizes) for place in range(sizes[0])])
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _grouped_mm(
    first: Tensor, second: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Matrices of a mixture of experts: torch's takes bf16 only, the real ones take fp16 and fp32 as well."""
    num_groups = first.shape[0] if offs is None else offs.shape[0]
    shape: tuple[int, ...] = (first.shape[-2], second.shape[-1])
    if first.dim() == second.dim():
        shape = (num_groups, *shape)
    dtype = out_dtype or first.dtype
    aligned = 1 if first.device.type == "cpu" else _ALIGNMENT_BYTES // dtype.itemsize
    row = -(-shape[-1] // aligned) * aligned
    strides = (shape[-2] * row, row, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype, device=first.device)


def _bincount(indices: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """With a least length, as metrics over classes have it, that is the length: classes are within their number."""
    if not minlength:
        raise DynamicOutputShapeException(_BINCOUNT)
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    return torch.empty(minlength, dtype=dtype, device=indices.device)


_KERNELS: dict[OpOverload, Callable[..., Tensor]] = {
    **{GROUPED_MM: _grouped_mm, _BINCOUNT: _bincount},
    **dict.fromkeys(CTC_BACKWARDS, lambda grad, log_probabilities, *_: torch.empty_like(log_probabilities)),
}
_TRUTHS = {
    **{_aten.isnan.default: False, _aten.isinf.default: False, _aten.isfinite.default: True},
    **{_aten.ones.default: True, _aten.zeros.default: False},
}
_WITH_ITSELF = {_aten.eq.Tensor: True, _aten.ne.Tensor: False}
_WITH_INFINITY = {_aten.eq.Scalar: False, _aten.ne.Scalar: True}
_NOT = (_aten.bitwise_not.default, _aten.logical_not.default)
_AND = (_aten.mul.Tensor, _aten.bitwise_and.Tensor, _aten.logical_and.default)
_OR = (_aten.bitwise_or.Tensor, _aten.logical_or.default)
_SAME = (
    *(_aten.any.default, _aten.all.default, _aten.any.dim, _aten.all.dim, TO_COPY, _aten.clone.default),
    *(_aten.unsqueeze.default, _aten.expand.default, _aten.view.default, _aten.slice.Tensor, _aten.select.int),
    *(_aten.permute.default, _aten.upsample_nearest2d.default, UNSAFE_VIEW),
)


_KEEPS_VALUES = (
    "aten::_amp_foreach_non_finite_check_and_unscale_",  # nothing is infinite
    "c10d::allreduce_",  # all ranks do the same
    "c10d::broadcast_",
)
MOST_INTEGERS = 1 << 20  # that are known of a tensor: positions of a long sequence
_PICKS_ROWS = (_aten.embedding.default, EMBEDDING_BAG, INDEX)
_PICKS_ALONG_DIM = (_aten.index_select.default, _aten.gather.default)
_UNKNOWN_MAKERS = ("empty", "rand", "bernoulli", "multinomial", "normal", "new_empty")
_UNKNOWN = 1.0


class KnownValues(UnwrappedMode):
    """Answers reads of fake tensors: from what follows from the program alone, from a record, or with 1 for floats."""

    def __init__(self, reads: RecordedReads | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.guesses: dict[str, None] = {}  # notes on unknown values, as keys, in order
        self._reads = reads or RecordedReads()
        self._values: Any = WeakIdKeyDictionary()
        self._of_data: Any = WeakIdKeyDictionary()  # those that answer for nothing but indices out of range
        self._truths: Any = WeakIdKeyDictionary()  # of all elements of a tensor, which are finite numbers or truths

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        is_known = all(map(self._knows, tensors)) and not _makes_unknown(func)
        is_of_data = is_known and any(tensor in self._of_data for tensor in tensors)
        if func is EQUAL:
            return self._are_equal(tensors)
        if func is READ_NUMBER:
            return self._answer(func, args, tensors[0], is_known=is_known and not is_of_data)
        self._check_rows(func, args)
        try:
            result = call_fake(func, (args[0], self._without_masks(args[1])) if func is INDEX else args, kwargs)
        except UNKNOWN_VALUES:
            return self._recall(func, args, kwargs, tensors, is_known=is_known and not is_of_data)
        self._note_truths(func, args, tensors, result)
        results = [one for one in (result if isinstance(result, list | tuple) else [result]) if one is not None]
        if is_known and all(isinstance(one, FakeTensor) and _is_short(one) for one in results):
            self._note(results, func, args, kwargs)
            if is_of_data:
                self._of_data.update((one, True) for one in results)
        elif schema_of(func).is_mutable and schema_of(func).name not in _KEEPS_VALUES:
            self._forget(tensors)
        return result

    def _recall(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor], *, is_known: bool
    ) -> Any:
        """Return what an operator returns whose result has a size that depends on values: called where it raised."""
        device = tensors[0].device
        if func is PACK_SEQUENCES and self._knows(args[1]) and args[1] not in self._of_data:
            return self._packed(*args)
        if is_known:
            values = self._on_host(func, args, kwargs)
            values = [values] if isinstance(values, Tensor) else values
            return _as_returned(func, [self._fake(one, device) for one in values])
        read = self._reads.find(func)
        if read is None:
            raise
        if not isinstance(read.answer, tuple):
            return read.answer
        return _as_returned(func, self._results(read, tensors, device))

    def _results(self, read: Read, tensors: list[Tensor], device: torch.device) -> list[Tensor]:
        made = []
        for one in read.answer:
            shape = read.scaled(one.shape, [tuple(tensor.shape) for tensor in tensors])
            if one.value is not None and shape == one.shape:
                made.append(one.value if read.place[0] is PACK_SEQUENCES else self._fake(one.value, device))
            else:
                made.append(torch.empty(shape, dtype=one.dtype, device=device))
        return made

    def _packed(self, sequences: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        """Return packed sequences of known lengths. How many there are at each step is a real tensor: C++ reads it."""
        with without_dispatch():
            zeros = torch.zeros(sequences.shape, dtype=sequences.dtype)
        data, num_sequences = self._on_host(PACK_SEQUENCES, (zeros, *rest), {})
        return torch.empty(data.shape, dtype=data.dtype, device=sequences.device), num_sequences

    def _fake(self, value: Tensor, device: torch.device) -> Tensor:
        """Return a fake that has a value, if that is short enough to be kept."""
        fake = torch.empty(value.shape, dtype=value.dtype, device=device)
        if _is_short(value):
            self._values[fake] = value
        return fake

    def _without_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return indices with the places of what masks select in the place of the masks: how many, not which."""
        made: list[Tensor | None] = []
        for index in indices:
            if index is None or not is_mask(index):
                made.append(index)
                continue
            value = None if index in self._of_data else self._values.get(index)
            if value is not None:
                with without_dispatch():
                    num_selected = int(value.count_nonzero())
            else:
                read = self._reads.find(INDEX)
                if read is None:
                    raise DynamicOutputShapeException(INDEX)
                (num_selected,) = read.scaled(read.answer[0].shape, [tuple(index.shape)])
            made += [torch.empty(num_selected, dtype=torch.int64, device=index.device)] * index.dim()
        return made

    def read_all(self, what: str, tensor: Tensor, original: Callable[..., Any]) -> Any:
        """Return all numbers of a tensor, as ``.numpy()`` and ``.tolist()`` do."""
        if not isinstance(tensor, FakeTensor):
            return original(tensor)
        value = None if tensor in self._of_data else self._values.get(tensor)
        if value is None:
            read = self._reads.find(what)
            if read is None and not tensor.is_floating_point():
                raise DataDependentOutputException(READ_NUMBER)
            value = self._guess() if read is None else read.answer
        with without_dispatch():
            numbers = torch.as_tensor(value, dtype=tensor.dtype).flatten()
            if not numbers.numel():
                numbers = numbers.new_zeros(1)
            return original(numbers[torch.arange(tensor.numel()) % numbers.numel()].view(tensor.shape))

    def _note_truths(self, func: Any, args: tuple[Any, ...], tensors: list[Tensor], result: Any) -> None:
        if self._truths and schema_of(func).is_mutable:
            written = {storage_identity(tensor) for tensor in tensors if isinstance(tensor, FakeTensor)}
            for tensor in [one for one in self._truths if storage_identity(one) in written]:
                del self._truths[tensor]
        truth = self._truth(func, args)
        if truth is not None:
            self._truths[result] = truth

    def _truth(self, func: Any, args: tuple[Any, ...]) -> bool | None:
        """Return what holds for each element of a result; ``torch.isfinite`` multiplies two such results."""
        if func in _TRUTHS:
            return _TRUTHS[func]
        if func in _WITH_ITSELF and args[0] is args[1]:
            return _WITH_ITSELF[func]
        if func in _WITH_INFINITY and isinstance(args[1], float) and math.isinf(args[1]):
            return _WITH_INFINITY[func]
        if func not in (*_SAME, *_NOT, *_AND, *_OR):
            return None
        truths = [self._truths.get(arg) for arg in args if isinstance(arg, Tensor)]
        if None in truths or (func in (*_AND, *_OR) and len(truths) == 1):  # times a number
            return None
        return (not truths[0]) if func in _NOT else any(truths) if func in _OR else all(truths)

    def _forget(self, tensors: list[Tensor]) -> None:
        """Forget what may have been written, and all that shares its memory."""
        written = {storage_identity(self._values[tensor]) for tensor in tensors if tensor in self._values}
        if written:
            for tensor, value in list(self._values.items()):
                if storage_identity(value) in written:
                    self._values.pop(tensor, None)

    def _answer(self, func: Any, args: tuple[Any, ...], tensor: Tensor, *, is_known: bool) -> Any:
        if is_known:
            return self._on_host(func, args, {})
        truth = self._truths.get(tensor)
        if truth is not None:
            return bool(truth)
        if is_number_for_lightning(func, [tensor]):
            return _UNKNOWN
        read = self._reads.find(func)
        if read is not None:
            return read.answer
        return self._guess() if tensor.is_floating_point() else func(*args)  # which raises

    def _guess(self) -> float:
        self._reads.want()
        self.guesses["The step reads numbers that depend on the data. Each was taken to be 1."] = None
        return _UNKNOWN

    def _are_equal(self, tensors: list[Tensor]) -> bool:
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            read = self._reads.find(EQUAL)
            if read is not None:
                return bool(read.answer)
            self._reads.want()
            self.guesses["The step compares tensors by value. They were taken to be equal."] = None
            return True
        with without_dispatch():  # such as states of random generators
            return torch.equal(*tensors)

    def _check_rows(self, func: Any, args: tuple[Any, ...]) -> None:
        """Refuse indices out of range as the real operator does: fake ones do not look at them."""
        if func not in (*_PICKS_ROWS, *_PICKS_ALONG_DIM):
            return
        first_dim, found = (0, args[1]) if func in _PICKS_ROWS else args[1:3]
        for dim, index in enumerate(found if isinstance(found, list | tuple) else [found], first_dim):
            value = self._values.get(index) if isinstance(index, FakeTensor) else None
            if value is None or not value.numel() or value.dtype is torch.bool:
                continue
            with without_dispatch():
                least, most = map(int, value.aminmax())
            num_rows = args[0].shape[dim]
            if not -num_rows <= least <= most < num_rows:
                wrong = most if most >= num_rows else least
                raise IndexError(f"index {wrong} is out of bounds for dimension {dim} with size {num_rows}")

    def know(self, tensor: Tensor, value: Tensor) -> None:
        """Let a fake of data have a value, so that bad indices are noticed, and for all reads if some were recorded."""
        if _is_short(value):
            self._values[tensor] = value
            self._of_data.update([] if self._reads.runs else [(tensor, True)])

    def is_unknown(self, tensor: Any) -> bool:
        """Whether ``tensor`` is a fake whose values cannot be read."""
        has_value = tensor in self._values and tensor not in self._of_data
        return isinstance(tensor, FakeTensor) and not has_value and tensor not in self._truths

    def fresh_like(self, mode: FakeTensorMode, template: Tensor) -> Tensor:
        """Return a new tensor of the shape and the value of another, made under ``mode`` by an operator."""
        with mode:
            fresh = torch.empty_strided(template.shape, template.stride(), dtype=template.dtype, device=template.device)
        self.carry_over(template, fresh)
        return fresh

    def carry_over(self, source: Tensor, target: Tensor) -> None:
        """Let ``target`` have the value of ``source``, if that is known."""
        value = self._values.get(source)
        if value is not None:
            with without_dispatch():
                self._values[target] = value.clone()
            if source in self._of_data:
                self._of_data[target] = True

    def _knows(self, tensor: Tensor) -> bool:
        return tensor in self._values if isinstance(tensor, FakeTensor) else _is_short(tensor) and tensor.is_cpu

    def _note(self, results: Sequence[FakeTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = self._on_host(func, args, kwargs)  # which writes to values where the operator writes
        values = [values] if isinstance(values, Tensor) else values or []
        for result, value in zip(results, values, strict=False):
            if isinstance(value, Tensor) and value.shape == result.shape:
                self._values[result] = value

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with without_dispatch(), torch.no_grad():  # past the fake mode as well
            args, kwargs = tree_map(self._real, (args, kwargs))
            return func(*args, **kwargs)

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if isinstance(leaf, FakeTensor):
            return self._values[leaf]
        return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _as_returned(func: OpOverload, results: list[Tensor]) -> Any:
    return results[0] if len(schema_of(func).returns) == 1 else tuple(results)


def _is_short(tensor: Tensor) -> bool:
    has_fractions = tensor.is_floating_point() or tensor.is_complex()
    return tensor.numel() <= (MOST_NUMBERS if has_fractions else MOST_INTEGERS)


@cache
def _makes_unknown(func: OpOverload) -> bool:
    name: str = schema_of(func).name.partition("::")[2]
    return name.startswith(_UNKNOWN_MAKERS)
