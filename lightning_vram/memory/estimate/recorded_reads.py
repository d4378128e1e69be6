"""What a program reads of its tensors: recorded in a real run, and answered from the record where tensors are fake.

A read is ``.item()`` (``if loss > 3``, ``.tolist()``), ``.numpy()``, or an operator whose result's size depends on
values (``nonzero``, ``x[mask]``, ``unique``). Reads are found again by the line that reads and by their order. The
position is a context variable, which recomputation restores. Results for parts of the recorded batch are scaled.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from lightning_vram.private_names.dispatcher import READ_NUMBER, FakeTensor, OpOverload, UnwrappedMode, without_dispatch
from lightning_vram.private_names.torch import tensors_in, tree_leaves, tree_map

EQUAL, INDEX = torch.ops.aten.equal.default, torch.ops.aten.index.Tensor
ARRAY, LIST = "numpy", "tolist"
_ONE_HOT: Any = functional.one_hot
_MASKS = (torch.bool, torch.uint8)
_BETWEEN = ("torch", "lightning_vram", "lightning_utilities", "contextlib")
_BUILT_IN = ("aten", "prims", "c10d", "_c10d_functional", "profiler")
MOST_NUMBERS = 4096  # of results whose values are saved
_Shape = tuple[int, ...]
_Place = tuple[Any, Any, int]
_START = ("start", 0)
_POSITION: ContextVar[tuple[tuple[str, int], int]] = ContextVar("position", default=(_START, 0))


@dataclass(frozen=True)
class Read:
    """One read."""

    place: _Place  # what was asked for, by which code, at which of its lines
    shapes: tuple[_Shape, ...]  # of the tensors that were read
    answer: Any  # a number, a tensor, or a Result for each tensor that the operator returned

    def scaled(self, shape: _Shape, shapes: Sequence[_Shape]) -> _Shape:
        """Return the shape of a result for tensors of other shapes than those that were read."""
        if tuple(shapes) == self.shapes or not shape:
            return shape
        old, new = (prod(next(iter(some), ())) for some in (self.shapes, shapes))
        first = next((other[0] for one, other in self._pairs(shapes) if one[:1] == shape[:1]), None)
        if first is None:
            first = round(shape[0] * new / max(1, old))
        changed = {
            a: b for one, other in self._pairs(shapes) for a, b in zip(one[1:], other[1:], strict=True) if a != b
        }
        return first, *(changed.get(size, size) for size in shape[1:])

    def _pairs(self, shapes: Sequence[_Shape]) -> list[tuple[_Shape, _Shape]]:
        return [(one, other) for one, other in zip(self.shapes, shapes, strict=False) if len(one) == len(other)]


@dataclass(frozen=True)
class Result:
    """A tensor that an operator returned."""

    shape: _Shape
    dtype: torch.dtype
    value: Tensor | None = None  # of few integers


@dataclass
class RecordedReads:
    """The reads of a run, by its stages."""

    runs: set[str | None] = field(default_factory=set)  # what was recorded: evaluations by name, ``None`` for a fit
    note: str = ""  # what a reader of the numbers should know
    wanted: str = ""  # the first line whose read was guessed, as "train.py:31"
    _segments: dict[tuple[str, int], list[Read]] = field(default_factory=dict)
    _counts: dict[str, int] = field(default_factory=dict)

    def restart(self) -> None:
        """A run begins."""
        self._counts = {}
        _POSITION.set((_START, 0))

    def begin(self, stage: str) -> None:
        """A batch of a stage begins."""
        number = self._counts[stage] = self._counts.get(stage, -1) + 1
        _POSITION.set(((stage, number), 0))

    def record_read(self, what: Any, tensors: Sequence[Tensor], answer: Any) -> None:
        """Note a read of a real run. What recomputation reads was noted in its forward."""
        key, index = _POSITION.get()
        reads = self._segments.setdefault(key, [])
        if index == len(reads):
            shapes = tuple(tuple(one.shape) for one in tensors)
            reads.append(Read(_place_of(what), shapes, answer))
        _POSITION.set((key, index + 1))

    def find(self, what: Any) -> Read | None:
        """Return the next read of this kind at the place that asks; ``None`` if none was recorded there."""
        place, (key, index) = _place_of(what), _POSITION.get()
        stage, number = key
        last = max((one for name, one in self._segments if name == stage and one <= number), default=0)
        reads = self._segments.get((stage, last), [])
        for at in chain(range(index, len(reads)), range(min(index, len(reads)))):
            if reads[at].place == place:
                _POSITION.set((key, at + 1))
                return reads[at]
        others = (read for some in self._segments.values() for read in some if read.place == place)
        return next(others, None)

    def want(self) -> None:
        """Note that a number was guessed for want of a record."""
        frame = _reader()
        self.wanted = self.wanted or f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"

    def take(self, other: "RecordedReads") -> None:
        """Take over the reads of another run."""
        self._segments.update(other._segments)
        self.runs |= other.runs


class ReadRecorder(UnwrappedMode):
    """Records what is read while it is entered."""

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
        results = list(tensors_in([result]))
        if func is INDEX:
            for mask in filter(is_mask, args[1]):
                self._reads.record_read(func, [mask], (Result((int(mask.count_nonzero()),), torch.int64),))
        elif _reads_values(func):
            if is_number_for_lightning(func, tensors):
                return result
            answer = result if not results and result is not None else tuple(map(_describe, results))
            self._reads.record_read(func, tensors, answer)
        return result


@contextmanager
def replaced(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Patch attributes of a module or class inside the block; missing ones are added."""
    with ExitStack() as stack:
        for name, value in values.items():
            before = vars(owner).get(name)
            stack.callback(delattr, owner, name) if before is None else stack.callback(setattr, owner, name, before)
            setattr(owner, name, value)
        yield


@contextmanager
def recorded(reads: RecordedReads) -> Iterator[None]:
    """Record what is read of real tensors inside the block."""
    originals: dict[str, Any] = {ARRAY: Tensor.numpy, LIST: Tensor.tolist}

    def recording(what: str) -> Any:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            found = originals[what](tensor, *args, **kwargs)
            with without_dispatch():
                reads.record_read(what, [tensor], tensor.detach().clone())
            return found

        return read

    methods = {what: recording(what) for what in originals}
    recorder = ReadRecorder(reads)
    try:
        with replaced(functional, {"one_hot": one_hot}), replaced(torch, MAKERS), replaced(Tensor, methods), recorder:
            yield
    finally:
        for generator, state in recorder.generators.values():  # of the user's code, which the run has yet to draw from
            generator.set_state(state)


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Return what ``torch.nn.functional.one_hot`` does, with the same reads and operators for fake and real tensors."""
    number = int(tensor.max()) + 1 if num_classes == -1 else num_classes
    if not isinstance(tensor, FakeTensor):
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


def is_number_for_lightning(func: Any, tensors: Sequence[Tensor]) -> bool:
    """Whether it is Lightning that reads a float, for the progress bar or a logger: nothing depends on that."""
    if func is not READ_NUMBER or not tensors[0].is_floating_point():
        return False
    return str(_reader().f_globals.get("__name__", "")).startswith("lightning.")


def is_mask(index: Tensor | None) -> bool:
    """Whether an index has a truth value for each element."""
    return index is not None and index.dtype in _MASKS


def _reads_values(func: Any) -> bool:
    if not isinstance(func, OpOverload):
        return False
    tags = func.tags
    is_dynamic = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    return is_dynamic or func.namespace not in _BUILT_IN


def _describe(tensor: Tensor) -> Result:
    is_small = not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() <= MOST_NUMBERS
    return Result(tuple(tensor.shape), tensor.dtype, value=tensor.detach().clone() if is_small else None)


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
