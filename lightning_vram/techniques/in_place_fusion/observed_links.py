"""Observe, in one real training step, which module feeds which, and prove that nothing else uses the tensor between.

Folding or inverting a norm, or overwriting an activation's input, is right only then. A dispatch mode sees every
operator that reads or writes the memory; a weak reference shows whether anybody still holds it. The proof holds for the
control flow of that step. Code that reads memory past the operators of torch (numpy, DLPack, kernels launched by
address) must hold the tensor to be noticed; compiled code is not looked into.
"""

import gc
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import override

from lightning_vram.core.hooks import is_in_backward, is_transformed
from lightning_vram.core.operators import iterate_written
from lightning_vram.memory.storages import ByStorage, storage_address
from lightning_vram.memory.tracking.operator_listener import OperatorSubscriber
from lightning_vram.private_names import torch as private
from lightning_vram.private_names.dispatcher import FakeTensor
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation


class Memory:
    """What was seen of one storage: by whom it was made, read, written, and whether anybody could read it later."""

    def __init__(self) -> None:
        self.num_reads = self.num_writes = self._num_before = 0
        self.is_given = self.is_seen = False  # by a user's hook, or by the backward of another
        self.is_open = False  # a module was given it and runs: it may do what it likes
        self.hooks = _current_hooks()
        self.expected: weakref.ref[Tensor] | None = None  # what a module returned, or was given

    def expect(self, tensor: Tensor) -> None:
        """Note that a module returned ``tensor``."""
        self.expected = weakref.ref(tensor)
        self._num_before = self.num_reads + self.num_writes

    def is_untouched(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the very one of :meth:`expect`, not read or written since."""
        is_it = self.expected is not None and self.expected() is tensor
        return is_it and self.num_reads + self.num_writes == self._num_before

    def is_held(self) -> bool:
        """Whether the tensor that was given to the module still lives: another than the module holds it."""
        return self.expected is not None and self.expected() is not None

    def is_given_up(self) -> bool:
        """Whether nobody but the module it was given to has seen it, or ever can."""
        is_touched = self.is_open or self.is_seen or self.num_reads + self.num_writes != self._num_before
        return self.is_given and not (is_touched or self.is_held())


class StorageWatch(OperatorSubscriber):
    """Keeps a :class:`Memory` of every storage that an operator makes while it is entered."""

    def __init__(self) -> None:
        self._memories: ByStorage[Memory] = ByStorage()
        self.find = self._memories.find  # what was seen of a tensor's memory; None if that was not made meanwhile
        self._has_collected = False

    def collect_cycles(self) -> None:
        """Let tensors die that nothing but a reference cycle holds."""
        if any(memory.is_given and memory.is_held() for memory in self._memories.values()):
            gc.collect()

    @override
    def on_operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if self._is_paused:
            return self.run(func, types, args, kwargs)
        written = {storage_address(tensor) for tensor in iterate_written(func, args, kwargs)}
        read = {storage_address(tensor): tensor for tensor in private.tensors_in((args, kwargs))}
        known = {address: memory for address, tensor in read.items() if (memory := self.find(tensor)) is not None}
        if known and not _is_recomputing():
            self._touch(known, written)
        result = self.run(func, types, args, kwargs)
        for tensor in private.tensors_in(result):
            if storage_address(tensor) not in read:
                self._memories.note(tensor, Memory())
        return result

    def _touch(self, memories: dict[int, Memory], written: set[int]) -> None:
        if not is_in_backward():
            for address, memory in memories.items():
                if not memory.is_open:
                    memory.num_writes += address in written
                    memory.num_reads += address not in written
            return
        if not self._has_collected:  # the forward is over: what is held now is held on purpose, or by a cycle
            self._has_collected = True
            self.collect_cycles()
        for memory in memories.values():  # the module's own backward reads an alias; others saved the tensor itself
            memory.is_seen |= memory.is_given and memory.is_held()


class _Alias(torch.autograd.Function):
    """The same numbers in the same memory, as another tensor."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad


def _current_hooks() -> int:
    """Identify the saved-tensor hooks: a checkpoint has its own, and saves what it is given."""
    hooks = private.innermost_hooks()
    return id(hooks[0]) if hooks is not None else 0


def _is_recomputing() -> bool:
    """Whether our own recomputation runs an operator again: the first run of it was seen."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == Recomputation.__module__:
            return True
        frame = frame.f_back
    return False


_PLAIN_TYPES = frozenset({Tensor, FakeTensor})
# Autograd nodes that do not save the first result of their operator. Any other may.
_DO_NOT_KEEP_OUTPUT = {
    f"{operator}Backward0"
    for operator in (
        *("Add", "Addmm", "Baddbmm", "Bmm", "Cat", "Clone", "Convolution", "Div", "Mm", "Mul", "Sub", "ToCopy"),
        *("CudnnBatchNorm", "MiopenBatchNorm", "NativeBatchNorm"),
        *("FusedRmsNorm", "NativeGroupNorm", "NativeLayerNorm"),
        *("AvgPool2D", "MaxPool2DWithIndices", "UpsampleBilinear2D", "UpsampleNearest2D"),
    )
}


class Link(NamedTuple):
    """One module whose output goes to one other module and nowhere else; that gets nothing else."""

    producer: nn.Module
    consumer: nn.Module


@dataclass
class _Call:
    """One call of a consumer."""

    memory: Memory | None  # of its input, which it was given; None: others may use that
    is_linked: bool = False  # the input is the untouched output of a producer
    may_overwrite: bool = False
    result: Memory | None = None


_Kinds = tuple[type[nn.Module], ...]


class StepObserver:
    """Observes, while it is entered, once, which modules feed which, and which activations may overwrite their input.

    ``links`` and ``overwriting`` are the proven ones afterwards; both are empty if the block raised.
    """

    def __init__(
        self, module: nn.Module, producers: _Kinds = (), consumers: _Kinds = (), *, overwriting: bool = False
    ) -> None:
        self.links: list[Link] = []
        self.overwriting: list[nn.Module] = []
        self._module = module
        self._producers = [member for member in module.modules() if isinstance(member, producers)]
        self._candidates = [member for member in module.modules() if overwriting and _is_exact_in_place(member)]
        self._consumers = {member for member in module.modules() if isinstance(member, consumers)}
        self._watch = StorageWatch()
        self._exit = ExitStack()
        self._outputs: dict[nn.Module, list[Memory | None]] = defaultdict(list)  # of producers
        self._calls: dict[nn.Module, list[_Call]] = defaultdict(list)  # of consumers
        self._graph: list[Any] = []  # nodes: as long as they live, what they saved is not freed

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            _watch_hooks(self._module, self._watch, stack)  # first: ours are not the user's
            for producer in self._producers:
                stack.callback(producer.register_forward_hook(self._after_producer).remove)
            for consumer in self._consumers.union(self._candidates):
                stack.callback(consumer.register_forward_pre_hook(self._before_consumer, with_kwargs=True).remove)
                stack.callback(consumer.register_forward_hook(self._after_consumer).remove)
            stack.enter_context(self._watch)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._exit.close()
        if kind is None and not private.have_all_modules_hooks(private.SEE_INPUT):
            self._watch.collect_cycles()
            self.links = list(self._prove_links())
            self.overwriting = [member for member in self._candidates if self._may_overwrite(member)]
        for records in (self._outputs, self._calls, self._graph):
            records.clear()

    def _prove_links(self) -> Iterator[Link]:
        readers = {call.memory: member for member, calls in self._calls.items() for call in calls if call.is_linked}
        for producer, memories in self._outputs.items():
            consumers = {readers.get(memory) for memory in memories}
            consumer = consumers.pop()
            if (
                consumer is not None
                and not consumers
                and not any(is_parametrized(member) for member in (producer, consumer))
                and len(self._calls[consumer]) == len(memories)
                and all(memory is not None and memory.is_given_up() for memory in memories)
            ):
                yield Link(producer, consumer)

    def _may_overwrite(self, member: nn.Module) -> bool:
        calls = self._calls[member]
        is_overwritten = any(call.result and call.result.num_writes for call in calls)  # in place, that is saved
        are_given_up = all(call.may_overwrite and call.memory and call.memory.is_given_up() for call in calls)
        return bool(calls) and are_given_up and not is_overwritten

    def _after_producer(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        memory = self._watch.find(output) if is_plain(output) else None
        is_own = memory is not None and memory.expected is None  # else another module's, which this one passed on
        if memory is not None and is_own:
            memory.expect(output)
        self._outputs[module].append(memory if is_own else None)

    def _before_consumer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return None
        call = self._judge(module, args, kwargs)
        self._calls[module].append(call)
        if call.memory is None:
            return None
        call.memory.expect(args[0])
        call.memory.is_given = call.memory.is_open = True
        with self._watch.paused():
            # Autograd keeps what a module saves alive, Python object included: the tensor lives on only if others
            # have it.
            return (_Alias.apply(args[0]), *args[1:]), kwargs  # type: ignore[no-untyped-call]

    def _judge(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        if (
            not args
            or not is_plain(args[0])
            or any(leaf is args[0] for leaf in private.tree_leaves((args[1:], kwargs)))
        ):
            return _Call(None)
        tensor, memory = args[0], self._watch.find(args[0])
        if memory is None or memory.is_given or private.gradient_hooks(tensor) or tensor.retains_grad:
            return _Call(None)
        is_linked = memory.is_untouched(tensor)
        is_own = not private.is_view(tensor) and not (tensor.is_leaf and tensor.requires_grad)
        is_unsaved = memory.num_reads == 0 and memory.hooks == _current_hooks() and not _is_saved(tensor)
        may_overwrite = module in self._candidates and is_own and is_unsaved
        return _Call(memory, is_linked, may_overwrite) if is_linked or may_overwrite else _Call(None)

    def _after_consumer(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._calls[module]:
            return
        call = self._calls[module][-1]
        if call.memory is not None:
            call.memory.is_open = False
        for tensor in private.tensors_in(output):
            self._graph.append(tensor.grad_fn)
            call.result = self._watch.find(tensor)


def _watch_hooks(module: nn.Module, watch: StorageWatch, stack: ExitStack) -> None:
    """Note, for every user's hook in ``module``, which memory it is shown. ``stack`` undoes it."""

    def see(value: Any) -> None:
        if not torch.compiler.is_compiling():
            for tensor in private.tensors_in(value):
                if (memory := watch.find(tensor)) is not None:
                    memory.is_seen = True

    for member in module.modules():
        sees_output = private.has_hooks(member, private.SEE_OUTPUT)  # before ours is there
        if private.has_hooks(member, private.SEE_INPUT):
            before = member.register_forward_pre_hook(lambda _, args, kwargs: see((args, kwargs)), with_kwargs=True)
            stack.callback(before.remove)
        if sees_output:
            stack.callback(member.register_forward_hook(lambda _module, _args, output: see(output)).remove)


def _is_exact_in_place(member: nn.Module) -> bool:
    """Whether it is an activation that is not in place, and could be bit-exactly and without a copy of its input."""
    forward = getattr(type(member), "forward", None)  # scripted modules have none
    is_stock = forward in (nn.ReLU.forward, nn.LeakyReLU.forward) and "forward" not in vars(member)
    # The backward does not work in place with a negative slope.
    return is_stock and not getattr(member, "inplace", True) and getattr(member, "negative_slope", 0.0) >= 0


def _is_saved(tensor: Tensor) -> bool:
    """Whether what made ``tensor`` may need it in its backward."""
    if tensor.grad_fn is None:
        return torch.is_grad_enabled()  # what made it is frozen as yet, and may not stay so
    return tensor.grad_fn.name() not in _DO_NOT_KEEP_OUTPUT


def is_plain(value: Any) -> bool:
    """Whether ``value`` is an ordinary tensor of an ordinary forward: no transform, tracer, recomputation."""
    return (
        type(value) in _PLAIN_TYPES
        and value.layout is torch.strided
        and not value.is_inference()
        and not is_in_backward()
        and not (value.requires_grad and not torch.is_grad_enabled())  # what a reentrant checkpoint was given
        and not is_transformed()
        and not private.is_in_forward_ad()
    )
