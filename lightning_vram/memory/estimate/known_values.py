"""Values of fake tensors: which are known, and what a program that reads others gets.

Results of known numbers are known. Other reads are answered from a recorded real run; without one a float is taken for
1, since programs log it, and compared tensors for equal. An integer, a truth value or a size decides about shapes and
branches: asking for it raises, and the caller has to record a real run.

A read is ``.item()`` (``if loss > 3``, ``.tolist()``), ``.numpy()``, or an operator whose result's size depends on
values (``nonzero``, ``x[mask]``, ``unique``). Reads are found again by the line that reads and by their order. The
position is a context variable, which recomputation restores. Results for parts of the recorded batch are scaled.
"""

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from lightning_vram.memory.estimate.fake_kernels import call_fake
from lightning_vram.private_names import dispatcher
from lightning_vram.private_names.torch import storage_identity, tensors_in, tree_leaves, tree_map

_aten = torch.ops.aten
_EQUAL, _INDEX = _aten.equal.default, _aten.index.Tensor
ARRAY, LIST = "numpy", "tolist"
_ONE_HOT: Any = functional.one_hot
_MASKS = (torch.bool, torch.uint8)
_BETWEEN = ("torch", "lightning_vram", "lightning_utilities", "contextlib")
_BUILT_IN = ("aten", "prims", "c10d", "_c10d_functional", "profiler")
_MOST_NUMBERS = 4096  # of results whose values are saved
_Shape = tuple[int, ...]
_Place = tuple[Any, Any, int]  # what is asked for, by which code, at which of its lines
_POSITION: ContextVar[tuple[str, int, int]] = ContextVar("position", default=("", 0, 0))  # stage, batch, reads in it


@dataclass(frozen=True)
class Read:
    """One read."""

    place: _Place
    shapes: tuple[_Shape, ...]  # of the tensors that were read
    answer: Any  # what was returned; tensors are on the meta device, but few integers as they are

    def scaled(self, shape: _Shape, shapes: Sequence[_Shape]) -> _Shape:
        """Return the shape of a result for tensors of other shapes than those that were read."""
        if tuple(shapes) == self.shapes or not shape:
            return shape
        pairs = [(one, other) for one, other in zip(self.shapes, shapes, strict=False) if len(one) == len(other)]
        old, new = (prod(next(iter(some), ())) for some in (self.shapes, shapes))
        first = next((other[0] for one, other in pairs if one[:1] == shape[:1]), None)
        if first is None:
            first = round(shape[0] * new / max(1, old))
        changed = {a: b for one, other in pairs for a, b in zip(one[1:], other[1:], strict=True) if a != b}
        return first, *(changed.get(size, size) for size in shape[1:])


@dataclass
class RecordedReads:
    """The reads of a run, by its batches."""

    is_recorded: bool = False
    note: str = ""  # what a reader of the numbers should know
    wanted: str = ""  # the first line whose read was guessed, as "train.py:31"
    batches: dict[tuple[str, int], list[Read]] = field(default_factory=dict)  # by stage and number
    _counts: dict[str, int] = field(default_factory=dict)

    def restart(self) -> None:
        """A run begins."""
        self._counts = {}
        _POSITION.set(("", 0, 0))

    def begin(self, stage: str) -> None:
        """A batch of a stage begins."""
        number = self._counts[stage] = self._counts.get(stage, -1) + 1
        _POSITION.set((stage, number, 0))

    def record_read(self, what: Any, tensors: Sequence[Tensor], answer: Any) -> None:
        """Note a read of a real run. What recomputation reads was noted in its forward."""
        stage, number, index = _POSITION.get()
        reads = self.batches.setdefault((stage, number), [])
        if index == len(reads):
            reads.append(Read(_place_of(what), tuple(tuple(one.shape) for one in tensors), answer))
        _POSITION.set((stage, number, index + 1))

    def find(self, what: Any) -> Read | None:
        """Return the next read of this kind at the place that asks; ``None`` if none was recorded there."""
        if not self.is_recorded:
            return None
        place, (stage, number, index) = _place_of(what), _POSITION.get()
        last = max((one for name, one in self.batches if name == stage and one <= number), default=0)
        reads = self.batches.get((stage, last), [])
        for at in chain(range(index, len(reads)), range(min(index, len(reads)))):
            if reads[at].place == place:
                _POSITION.set((stage, number, at + 1))
                return reads[at]
        return next((read for some in self.batches.values() for read in some if read.place == place), None)


@contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Patch attributes of a module or class inside the block; missing ones are added."""
    with ExitStack() as stack:
        for name, value in values.items():
            before = vars(owner).get(name)
            stack.callback(delattr, owner, name) if before is None else stack.callback(setattr, owner, name, before)
            setattr(owner, name, value)
        yield


class _Recorder(dispatcher.UnwrappedMode):
    def __init__(self, reads: RecordedReads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._reads = reads
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}  # that were drawn from, with states before

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None and id(generator) not in self.generators:
            self.generators[id(generator)] = generator, generator.get_state()
        result = func(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        if func is _INDEX:
            for mask in filter(is_mask, args[1]):
                self._reads.record_read(func, [mask], int(mask.count_nonzero()))
        elif _reads_values(func) and not _is_for_lightning(func, tensors):
            self._reads.record_read(func, tensors, tree_map(_describe, result))
        return result


@contextmanager
def recorded(reads: RecordedReads) -> Iterator[None]:
    """Record what is read of real tensors inside the block, in the place of what was recorded before."""
    originals: dict[str, Any] = {ARRAY: Tensor.numpy, LIST: Tensor.tolist}

    def recording(what: str) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            found = originals[what](tensor, *args, **kwargs)
            with dispatcher.without_dispatch():
                reads.record_read(what, [tensor], tensor.detach().clone())
            return found

        return read

    methods = {what: recording(what) for what in originals}
    recorder = _Recorder(reads)
    reads.is_recorded = False
    reads.batches.clear()
    try:
        with replaced(functional, {"one_hot": one_hot}), replaced(torch, MAKERS), replaced(Tensor, methods), recorder:
            yield
        reads.is_recorded = True
    finally:
        for generator, state in recorder.generators.values():  # of the user's code, which the run has yet to draw from
            generator.set_state(state)


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Return what ``torch.nn.functional.one_hot`` does, with the same reads and operators for fake and real tensors."""
    number = int(tensor.max()) + 1 if num_classes == -1 else num_classes
    if not isinstance(tensor, dispatcher.FakeTensor):
        return _ONE_HOT(tensor, number)  # type: ignore[no-any-return]
    zeros = torch.zeros(*tensor.shape, number, dtype=torch.int64, device=tensor.device)
    return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)


def _reading(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Let ``torch.tensor([a, b])`` read its tensors as ``.item()`` does: torch reads them where nothing can follow."""

    def make(data: Any, *args: Any, **kwargs: Any) -> Tensor:
        leaves = tree_leaves(data) if isinstance(data, list | tuple) else []
        if any(map(_is_number, leaves)):
            if not args and kwargs.get("dtype") is None:
                kwargs["dtype"] = reduce(torch.promote_types, (torch.result_type(one, one) for one in leaves))
            data = tree_map(lambda one: one.item() if _is_number(one) else one, data)
        return original(data, *args, **kwargs)

    return make


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() == 0


MAKERS = {"tensor": _reading(torch.tensor), "as_tensor": _reading(torch.as_tensor)}


def _is_for_lightning(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether it is Lightning that reads a float, for the progress bar or a logger: nothing depends on that."""
    is_float = func is dispatcher.READ_NUMBER and tensors[0].is_floating_point()
    return is_float and str(_reader().f_globals.get("__name__", "")).startswith("lightning.")


def is_mask(index: Tensor | None) -> bool:
    """Whether an index has a truth value for each element."""
    return index is not None and index.dtype in _MASKS


def _reads_values(func: Any) -> bool:
    if not isinstance(func, dispatcher.OpOverload):
        return False
    is_dynamic = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
    return is_dynamic or func.namespace not in _BUILT_IN


def _describe(one: Any) -> Any:
    if not isinstance(one, Tensor):
        return one
    if not one.is_floating_point() and not one.is_complex() and one.numel() <= _MOST_NUMBERS:
        return one.detach().clone()
    with dispatcher.without_dispatch():  # the trackers count what is real
        return torch.empty(one.shape, dtype=one.dtype, device="meta")


def _place_of(what: Any) -> _Place:
    frame = _reader()
    return what, frame.f_code, frame.f_lineno


def _reader() -> Any:
    """Return the frame of the code that reads: the innermost that is an optimizer's, or neither torch's nor ours."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _BETWEEN or name.startswith("torch.optim."):
            break
        frame = frame.f_back
    return frame


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
    *(_aten.any.default, _aten.all.default, _aten.any.dim, _aten.all.dim, dispatcher.TO_COPY, _aten.clone.default),
    *(_aten.unsqueeze.default, _aten.expand.default, _aten.view.default, _aten.slice.Tensor, _aten.select.int),
    *(_aten.permute.default, _aten.upsample_nearest2d.default, dispatcher.UNSAFE_VIEW),
)
_KEEPS_VALUES = (
    "aten::_amp_foreach_non_finite_check_and_unscale_",  # nothing is infinite
    "c10d::allreduce_",  # all ranks do the same
    "c10d::broadcast_",
)
MOST_INTEGERS = 1 << 20  # that are known of a tensor: positions of a long sequence
_PICKS_ROWS = (_aten.embedding.default, dispatcher.EMBEDDING_BAG, _INDEX)
_PICKS_ALONG_DIM = (_aten.index_select.default, _aten.gather.default)
_UNKNOWN_MAKERS = ("empty", "rand", "bernoulli", "multinomial", "normal", "new_empty")
_UNKNOWN = 1.0
_GUESSES: dict[Any, tuple[Any, str]] = {
    dispatcher.READ_NUMBER: (_UNKNOWN, "The step reads numbers that depend on the data. Each was taken to be 1."),
    _EQUAL: (True, "The step compares tensors by value. They were taken to be equal."),
}


class KnownValues(dispatcher.UnwrappedMode):
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
        if not isinstance(func, dispatcher.OpOverload):
            return func(*args, **kwargs)
        tensors = list(tensors_in((args, kwargs)))
        is_known = all(map(self._knows, tensors)) and not _makes_unknown(func)
        is_of_data = is_known and any(tensor in self._of_data for tensor in tensors)
        recall = partial(self._recall, func, args, kwargs, tensors, is_known=is_known and not is_of_data)
        if func in _GUESSES:
            return recall(dispatcher.DataDependentOutputException(func))
        self._check_rows(func, args)
        try:
            result = call_fake(func, (args[0], self._without_masks(args[1])) if func is _INDEX else args, kwargs)
        except dispatcher.UNKNOWN_VALUES as error:
            return recall(error)
        self._note_truths(func, args, tensors, result)
        results = [one for one in (result if isinstance(result, list | tuple) else [result]) if one is not None]
        if is_known and all(isinstance(one, dispatcher.FakeTensor) and _is_short(one) for one in results):
            self._note(results, func, args, kwargs)
            if is_of_data:
                self._of_data.update((one, True) for one in results)
        elif dispatcher.schema_of(func).is_mutable and dispatcher.schema_of(func).name not in _KEEPS_VALUES:
            self._forget(tensors)
        return result

    def _recall(
        self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor], error: Exception, *, is_known: bool
    ) -> Any:
        """Return what an operator returns that depends on values: as computed, as recorded, or else a guess."""
        device, truth = tensors[0].device, self._truths.get(tensors[0])
        if func is dispatcher.PACK_SEQUENCES and self._knows(args[1]) and args[1] not in self._of_data:
            with dispatcher.without_dispatch():
                zeros = torch.zeros(args[0].shape, dtype=args[0].dtype)
            data, num_sequences = self._on_host(func, (zeros, *args[1:]), kwargs)
            return torch.empty(data.shape, dtype=data.dtype, device=device), num_sequences  # the second C++ reads
        if is_known or not any(isinstance(tensor, dispatcher.FakeTensor) for tensor in tensors):
            return tree_map(partial(self._fake, device), self._on_host(func, args, kwargs))
        if func is dispatcher.READ_NUMBER and truth is not None:
            return bool(truth)
        if _is_for_lightning(func, tensors):
            return _UNKNOWN
        if (read := self._reads.find(func)) is not None:
            return tree_map(partial(self._remake, read, [tuple(one.shape) for one in tensors], device), read.answer)
        if func is _EQUAL or (func is dispatcher.READ_NUMBER and tensors[0].is_floating_point()):
            return self._guess(func)
        raise error

    def _remake(self, read: Read, shapes: list[_Shape], device: torch.device, answer: Any) -> Any:
        if not isinstance(answer, Tensor):
            return answer
        shape = read.scaled(tuple(answer.shape), shapes)
        if answer.is_meta or shape != answer.shape:
            return torch.empty(shape, dtype=answer.dtype, device=device)
        return answer if read.place[0] is dispatcher.PACK_SEQUENCES else self._fake(device, answer)

    def _fake(self, device: torch.device, value: Any) -> Any:
        """Return a fake that has a value, if that is short enough to be kept; what is no tensor as it is."""
        if not isinstance(value, Tensor):
            return value
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
            if (value := self._of_program(index)) is not None:
                with dispatcher.without_dispatch():
                    num_selected = int(value.count_nonzero())
            elif (read := self._reads.find(_INDEX)) is not None:
                (num_selected,) = read.scaled((read.answer,), [tuple(index.shape)])
            else:
                raise dispatcher.DynamicOutputShapeException(_INDEX)
            made += [torch.empty(num_selected, dtype=torch.int64, device=index.device)] * index.dim()
        return made

    def read_all(self, what: str, tensor: Tensor, original: Callable[..., Any]) -> Any:
        """Return all numbers of a tensor, as ``.numpy()`` and ``.tolist()`` do."""
        if not isinstance(tensor, dispatcher.FakeTensor):
            return original(tensor)
        value = self._of_program(tensor)
        if value is None:
            read = self._reads.find(what)
            if read is None and not tensor.is_floating_point():
                raise dispatcher.DataDependentOutputException(dispatcher.READ_NUMBER)
            value = self._guess(dispatcher.READ_NUMBER) if read is None else read.answer
        with dispatcher.without_dispatch():
            numbers = torch.as_tensor(value, dtype=tensor.dtype).flatten()
            if not numbers.numel():
                numbers = numbers.new_zeros(1)
            return original(numbers[torch.arange(tensor.numel()) % numbers.numel()].view(tensor.shape))

    def _note_truths(self, func: Any, args: tuple[Any, ...], tensors: list[Tensor], result: Any) -> None:
        if self._truths and dispatcher.schema_of(func).is_mutable:
            written = {storage_identity(tensor) for tensor in tensors if isinstance(tensor, dispatcher.FakeTensor)}
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
        for tensor, value in list(self._values.items()) if written else ():
            if storage_identity(value) in written:
                self._values.pop(tensor, None)

    def _guess(self, what: Any) -> Any:
        frame = _reader()
        self._reads.wanted = self._reads.wanted or f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        answer, note = _GUESSES[what]
        self.guesses[note] = None
        return answer

    def _check_rows(self, func: Any, args: tuple[Any, ...]) -> None:
        """Refuse indices out of range as the real operator does: fake ones do not look at them."""
        if func not in (*_PICKS_ROWS, *_PICKS_ALONG_DIM):
            return
        first_dim, found = (0, args[1]) if func in _PICKS_ROWS else args[1:3]
        for dim, index in enumerate(found if isinstance(found, list | tuple) else [found], first_dim):
            value = self._values.get(index) if isinstance(index, dispatcher.FakeTensor) else None
            if value is None or not value.numel() or value.dtype is torch.bool:
                continue
            with dispatcher.without_dispatch():
                least, most = map(int, value.aminmax())
            num_rows = args[0].shape[dim]
            if not -num_rows <= least <= most < num_rows:
                wrong = most if most >= num_rows else least
                raise IndexError(f"index {wrong} is out of bounds for dimension {dim} with size {num_rows}")

    def know(self, tensor: Tensor, value: Tensor) -> None:
        """Let a fake of data have a value, so that bad indices are noticed, and for all reads if some were recorded."""
        if _is_short(value):
            self._values[tensor] = value
            self._of_data.update([] if self._reads.is_recorded else [(tensor, True)])

    def is_unknown(self, tensor: Any) -> bool:
        """Whether ``tensor`` is a fake whose values cannot be read."""
        if not isinstance(tensor, dispatcher.FakeTensor):
            return False
        return self._of_program(tensor) is None and tensor not in self._truths

    def fresh_like(self, mode: dispatcher.FakeTensorMode, template: Tensor) -> Tensor:
        """Return a new tensor of the shape and the value of another, made under ``mode`` by an operator."""
        with mode:
            fresh = torch.empty_strided(template.shape, template.stride(), dtype=template.dtype, device=template.device)
        self.carry_over(template, fresh)
        return fresh

    def carry_over(self, source: Tensor, target: Tensor) -> None:
        """Let ``target`` have the value of ``source``, if that is known."""
        value = self._values.get(source)
        if value is not None:
            with dispatcher.without_dispatch():
                self._values[target] = value.clone()
            if source in self._of_data:
                self._of_data[target] = True

    def _of_program(self, tensor: Tensor) -> Tensor | None:
        """Return a value that follows from the program, or from a record."""
        return None if tensor in self._of_data else self._values.get(tensor)

    def _knows(self, tensor: Tensor) -> bool:
        return (
            tensor in self._values if isinstance(tensor, dispatcher.FakeTensor) else _is_short(tensor) and tensor.is_cpu
        )

    def _note(
        self, results: Sequence[dispatcher.FakeTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        values = self._on_host(func, args, kwargs)  # which writes to values where the operator writes
        values = [values] if isinstance(values, Tensor) else values or []
        for result, value in zip(results, values, strict=False):
            if isinstance(value, Tensor) and value.shape == result.shape:
                self._values[result] = value

    def _on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with dispatcher.without_dispatch(), torch.no_grad():  # past the fake mode as well
            args, kwargs = tree_map(self._real, (args, kwargs))
            return func(*args, **kwargs)

    def _real(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device("cpu")
        if isinstance(leaf, dispatcher.FakeTensor):
            return self._values[leaf]
        return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _is_short(tensor: Tensor) -> bool:
    has_fractions = tensor.is_floating_point() or tensor.is_complex()
    return tensor.numel() <= (_MOST_NUMBERS if has_fractions else MOST_INTEGERS)


@cache
def _makes_unknown(func: dispatcher.OpOverload) -> bool:
    return bool(dispatcher.schema_of(func).name.partition("::")[2].startswith(_UNKNOWN_MAKERS))
