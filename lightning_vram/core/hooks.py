"""Saved-tensor hooks and dispatch modes: one pipeline for saved tensors, and how to step aside where hooks may not act.

Autograd gives a saved tensor to the innermost hooks only, so techniques with hooks of their own would hide each other.
A :class:`SavedTensorStage` passes what it saves to the next one outside of it: recompute, then compress, then offload.
``torch.func`` transforms refuse to run under saved-tensor hooks, and in a backward some formulas (``prod``) round
differently under any dispatch mode: :class:`stepping_aside` takes them off. May import: core.tensors, memory.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import graph
from torch.autograd.graph import increment_version, saved_tensors_hooks

from lightning_vram.core.operators import iterate_written
from lightning_vram.core.patching import HeldSetting
from lightning_vram.core.tensors import properties
from lightning_vram.memory.storages import storage_address, version_of
from lightning_vram.memory.tracking.operator_listener import OperatorSubscriber, current_subscribers
from lightning_vram.private_names import torch as private
from lightning_vram.private_names.dispatcher import current_dispatch_modes, hide_from_dynamo, is_foreach


def count_foreach_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
    """Count the writes of an operator on lists: under a dispatch mode autograd does not count them on the host."""
    if is_foreach(func):
        increment_version([target for target in iterate_written(func, args, kwargs) if not target.is_inference()])


class SelectiveCheckpointMode(OperatorSubscriber):
    """Base of those that save results for the recomputation, or return them in it."""


def is_in_backward() -> bool:
    """Whether autograd runs a backward."""
    return private.current_graph_task_id() != -1


def is_transformed() -> bool:
    """Whether ``torch.func`` or a tracer runs: neither knows the saved-tensor hooks that checkpoints consist of."""
    return private.is_in_transform() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def is_in_selective_checkpoint() -> bool:
    """Whether results of operators are saved for, or read in, a recomputation, which must repeat the forward."""
    if any(isinstance(subscriber, SelectiveCheckpointMode) for subscriber in current_subscribers()):
        return True
    kinds = (kind for mode in current_dispatch_modes() for kind in type(mode).__mro__)
    return any(kind.__module__ == torch.utils.checkpoint.__name__ for kind in kinds)


class OwnHooks(ABC):
    """Saved-tensor hooks that are their own context, without a wrapper between them and autograd."""

    @abstractmethod
    def pack_hook(self, tensor: Tensor) -> Any:
        """Get a tensor that autograd saves; return what it keeps."""

    @abstractmethod
    def unpack_hook(self, packed: Any) -> Tensor:
        """Return the tensor."""

    def __enter__(self) -> None:
        private.push_hooks((self.pack_hook, self.unpack_hook))

    def __exit__(self, *args: object) -> None:
        private.pop_hooks()


Hooks = graph.saved_tensors_hooks | OwnHooks


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.entered: list[tuple[Hooks, OperatorSubscriber | None]] = []  # innermost last
        self.stages: list[SavedTensorStage] = []  # innermost last
        self.exactness = 0
        self.saving: Tensor | None = None  # what autograd saves at this moment, if it may be unfinished


_here = _OfThread()
# Bound permanently: code that imports one of ours by name inside a step holds on to it.
_disable: Callable[[str], AbstractContextManager[None]] = graph.disable_saved_tensors_hooks


class stepping_aside:  # noqa: N801 - a context, quicker than one made by a generator
    """Take ``hooks`` off for each ``torch.func`` transform inside, ``subscriber`` for each backward. Enter it after."""

    def __init__(self, hooks: Hooks, subscriber: OperatorSubscriber | None = None) -> None:
        self._entry = (hooks, subscriber)

    def __enter__(self) -> None:
        _here.entered.append(self._entry)
        _functions.acquire()

    def __exit__(self, *args: object) -> None:
        _functions.release()
        _here.entered.pop()


@contextmanager
def _disable_without_ours(message: str) -> Iterator[None]:
    # Hooks of the user's own on top of ours stay: the transform refuses them, as it would without us.
    with ExitStack() as stack:
        for hooks, _ in reversed(_here.entered):
            innermost = private.innermost_hooks()
            if innermost is None or innermost[0] != hooks.pack_hook:
                break
            hooks.__exit__(None, None, None)
            stack.callback(hooks.__enter__)
        with _disable(message):
            yield


def _run_backward(*args: Any, **kwargs: Any) -> Any:
    with ExitStack() as stack:
        for subscriber in [one for _, one in reversed(_here.entered) if one is not None]:
            if not subscriber.is_innermost:
                break
            subscriber.__exit__()
            stack.callback(subscriber.__enter__)
        return private.run_backward(*args, **kwargs)


def _replace_functions(functions: tuple[Any, Any]) -> None:
    graph.disable_saved_tensors_hooks, run = functions
    private.replace_run_backward(run)


_ours: tuple[Any, Any] = (_disable_without_ours, _run_backward)
_functions = HeldSetting(lambda: (_disable, private.run_backward), _replace_functions, _ours)


@contextmanager
def saving(tensor: Tensor) -> Iterator[None]:
    """Let stages know inside the block that autograd is saving ``tensor``: see :func:`is_unfinished`."""
    _here.saving = tensor if may_be_unfinished(tensor) else None
    try:
        yield
    finally:
        _here.saving = None


def is_unfinished(tensor: Tensor) -> bool:
    """Whether autograd is saving ``tensor`` at this moment, for an operator that may not have written it yet."""
    return _here.saving is tensor


def may_be_unfinished(tensor: Tensor) -> bool:
    """Whether an operator that saves ``tensor`` may write it only afterwards, as ``rrelu`` does with its noise.

    Not if it needs a gradient or is a view. The operator has finished when the next one saves something.
    """
    return not tensor.requires_grad and type(tensor) not in properties.PARAMETER_CLASSES and not private.is_view(tensor)


class StoredTensor(ABC):
    """A tensor that a stage took over: a snapshot, which later writes to the tensor do not reach."""

    __slots__ = ("__weakref__",)

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes it keeps on the device of the tensor."""

    @property
    def is_snapshot(self) -> bool:
        """Whether it is complete yet: a tensor may be copied a moment later, when its operator has written it."""
        return True

    @property
    def is_exact(self) -> bool:
        """Whether it returns the tensor bit-exactly."""
        return True

    def before_write(self) -> None:
        """Called before the tensor is written to, on the current stream, by a stage that goes on reading this."""
        return

    @abstractmethod
    def give(self) -> Tensor:
        """Return the tensor with its shape, strides, dtype and device, as often as it is called. Without gradients."""


def innermost_stage() -> "SavedTensorStage | None":
    """Return the stage that autograd calls; a stage that is entered now would pass tensors to it."""
    return _here.stages[-1] if _here.stages else None


class _ExactOnly:
    def __enter__(self) -> None:
        _here.exactness += 1

    def __exit__(self, *args: object) -> None:
        _here.exactness -= 1


exact_only = _ExactOnly()
"""Let no stage take anything with a loss inside the block: a layer is going to be run again on it."""


def is_exact_only() -> bool:
    """Whether tensors that are saved now must come back bit-exactly."""
    return _here.exactness > 0


class SavedTensorStage(ABC):
    """Takes over what autograd saves, and what stages inside of it keep, while it is entered.

    Leave it before the backward, or not. It can be entered again, once at a time. Never offered to :meth:`take`:
    parameters, buffers of ``module``, views of either, sparse, nested and wrapped tensors.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = module
        self._buffers: set[int] = set()  # addresses of their storages
        self._exit: ExitStack | None = None
        self._next: SavedTensorStage | None = None

    @abstractmethod
    def take(self, tensor: Tensor) -> StoredTensor | None:
        """Take a tensor over, or pass on what it makes of it with :meth:`hand_on`; ``None`` leaves it in place."""

    def hand_on(self, tensor: Tensor) -> StoredTensor | None:
        """Offer ``tensor`` to the next stage outside of this one; ``None`` if none takes it."""
        return self._next.take(tensor) if self._next is not None else None

    def begin(self, stack: ExitStack) -> OperatorSubscriber | None:
        """Enter, on ``stack``, what else is needed; return what observes operators, if any: it is off in backwards."""
        return None

    def __enter__(self) -> Self:
        if self._exit is not None:
            raise RuntimeError(f"this {type(self).__name__} is already active and cannot be nested.")
        if self._module is not None:
            self._buffers = {storage_address(buffer) for buffer in self._module.buffers()} - {0}
        self._next = innermost_stage()
        private.hide_warning_of_hooks()
        with ExitStack() as stack:
            hooks = saved_tensors_hooks(self._pack, self._unpack)
            stack.enter_context(hooks)
            _here.stages.append(self)
            stack.callback(_here.stages.remove, self)
            stack.enter_context(stepping_aside(hooks, self.begin(stack)))
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *args: object) -> None:
        stack, self._exit = self._exit, None
        if stack is not None:
            stack.close()

    @hide_from_dynamo
    def _pack(self, tensor: Tensor) -> Any:
        if type(tensor) in properties.PLAIN_TYPES and properties.is_strided(tensor) and not self._is_lasting(tensor):
            with torch.no_grad(), private.without_autocast(), saving(tensor):
                taken = self.take(tensor)
            if taken is not None:
                return properties.version_counter(tensor), private.num_writes(tensor), taken, tensor.shape
        return pack_in_place(tensor)

    @hide_from_dynamo
    def _unpack(self, packed: Any) -> Tensor:
        return unpack(packed)

    def _is_lasting(self, tensor: Tensor) -> bool:
        """Whether its memory is that of a parameter or buffer, and stays whether it is saved or not."""
        base = private.base_of(tensor) if private.is_view(tensor) else tensor
        return type(base) in properties.PARAMETER_CLASSES or storage_address(tensor) in self._buffers


def pack_in_place(tensor: Tensor) -> Any:
    """Save a tensor as autograd would; see :func:`unpack`."""
    kind = type(tensor)
    if kind in properties.PARAMETER_CLASSES:
        return tensor, private.num_writes(tensor)  # itself: FSDP refills the memory of parameters
    if kind not in properties.PLAIN_TYPES or not properties.is_strided(tensor):
        return tensor.detach() if tensor.grad_fn is not None else tensor
    return tensor if tensor.is_leaf else properties.alias(tensor), private.num_writes(tensor)


def unpack(packed: Any) -> Tensor:
    """Return a saved tensor. Raises ``RuntimeError`` as autograd does if it was overwritten since."""
    if isinstance(packed, Tensor):
        return packed
    counter, version, *_ = packed
    if private.num_writes(counter) != version:
        properties.check_version(counter, version, packed[3] if len(packed) > 2 else counter.shape)
    if len(packed) == 2:
        return counter  # type: ignore[no-any-return]
    taken: StoredTensor = packed[2]
    with torch.no_grad(), private.without_autocast():
        return taken.give()


def watch_saves(on_save: Callable[[Tensor], None]) -> saved_tensors_hooks:
    """Return hooks that call ``on_save`` with each saved tensor, not to be kept, and pass it on to those outside."""
    private.hide_warning_of_hooks()
    pack_outside, unpack_outside = private.innermost_hooks() or (pack_in_place, unpack)

    @hide_from_dynamo
    def pack(tensor: Tensor) -> Any:
        on_save(tensor)
        return pack_outside(tensor)

    return saved_tensors_hooks(pack, unpack_outside)


def unseen_saves() -> AbstractContextManager[Any]:
    """Return a context in which no hooks see what is saved, for a graph that ends in the call that begins it."""
    if private.innermost_hooks() is None:
        return nullcontext()
    private.hide_warning_of_hooks()
    return saved_tensors_hooks(pack_in_place, unpack)


Make = Callable[[], Tensor]


class _RecomputableView(NamedTuple):
    """How to compute a saved tensor, and where in it the saved view is."""

    make: Make
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int | torch.SymInt


class RecomputableTensors:
    """The tensors of one call that the backward computes again from others that stay alive. Innermost hooks."""

    def __init__(self) -> None:
        self._makes: dict[int, Make] = {}  # by address of the storage
        self._pack_outside, self._unpack_outside = private.innermost_hooks() or (pack_in_place, unpack)

    def add(self, tensor: Tensor, make: Make) -> Tensor:
        """Return ``tensor``, which ``make`` computes again. It must live to the end of the call."""
        self._makes[storage_address(tensor)] = make
        return tensor

    def hooks(self) -> saved_tensors_hooks:
        """Return the context for the call."""
        return saved_tensors_hooks(self._pack, self._unpack)

    @hide_from_dynamo
    def _pack(self, tensor: Tensor) -> Any:
        make = self._makes.get(storage_address(tensor))
        if make is None:
            return self._pack_outside(tensor)
        return _RecomputableView(make, tensor.shape, tensor.stride(), tensor.storage_offset())

    @hide_from_dynamo
    def _unpack(self, packed: Any) -> Tensor:
        if type(packed) is not _RecomputableView:
            return self._unpack_outside(packed)
        with torch.no_grad():
            return packed.make().as_strided(packed.shape, packed.strides, packed.offset)


def save(tensor: Tensor) -> Callable[[], Tensor]:
    """Save ``tensor`` as a graph node does, under the hooks that are set now; return what gives it back, or raises."""
    if private.make_saved_tensor is not None:
        is_output = False
        return private.make_saved_tensor(tensor, is_output).unpack  # type: ignore[no-any-return]
    # The output, not its node: a node that no tensor holds gives up what it saved.
    return partial(_read, _Save.apply(torch.empty(0, requires_grad=True), (tensor,)))  # type: ignore[no-untyped-call]


class SavedOutput:
    """A tensor without gradient that some backward will ask for; ``others`` are on its memory with own versions."""

    def __init__(self, tensor: Tensor, others: Sequence[Tensor] = ()) -> None:
        self._counters: list[tuple[Any, int]] = []
        for one in (tensor, *others):
            is_plain = type(one) in properties.PLAIN_TYPES and properties.is_strided(one)
            self._counters.append((properties.version_counter(one) if is_plain else one, version_of(one)))
        self._read = save(tensor)

    def give(self) -> Tensor | None:
        """Return the tensor, as often as it is called; ``None`` if it was overwritten since."""
        if any(version_of(counter) != version for counter, version in self._counters):
            return None
        return self._read()


def _read(output: Tensor) -> Tensor:
    node: Any = output.grad_fn
    (tensor,) = node.saved_tensors
    return tensor  # type: ignore[no-any-return]


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dummy: Tensor, tensors: tuple[Tensor]) -> Tensor:
        ctx.save_for_backward(*tensors)  # inside of a tuple they are no inputs of the node, and keep their own past
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing depends on it")
