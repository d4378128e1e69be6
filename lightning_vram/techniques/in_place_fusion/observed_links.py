"""Observe, in one real training step, which module feeds which, and prove that nothing else uses the tensor between.

Folding a norm into its convolution, or overwriting an activation's input, is right only then. A dispatch mode sees
every operator that reads or writes the memory; a weak reference shows whether anybody still holds it. The proof holds
for the control flow of that step. Code that reads memory past the operators of torch (numpy, DLPack, kernels launched
by address) must hold the tensor to be noticed; compiled code is not looked into.
"""

import gc
import sys
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import override

from lightning_vram.core.hooks import is_in_backward, is_transformed
from lightning_vram.core.operators import iterate_written
from lightning_vram.core.tensors.properties import ByStorage, storage_address
from lightning_vram.memory.tracking.operator_listener import OperatorSubscriber
from lightning_vram.private_names.dispatcher import FakeTensor
from lightning_vram.private_names.torch import (
    SEE_INPUT,
    SEE_OUTPUT,
    has_gradient_hooks,
    has_hooks,
    have_all_modules_hooks,
    tree_leaves,
)
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation


class Memory:
    """What was seen of one storage: by whom it was made, read, written, and whether anybody could read it later."""

    def __init__(self, number: int) -> None:
        self.number = number  # in the order of making
        self.num_reads = self.num_writes = self._num_before = 0
        self.is_given = self.is_seen_by_hook = self.is_read_by_others_backward = False
        self.is_open = False  # a module was given it and runs: it may do what it likes
        self._tensor: weakref.ref[Tensor] | None = None

    def expect(self, tensor: Tensor) -> None:
        """Forget how it was made; count from here."""
        self._tensor = weakref.ref(tensor)
        self.num_reads = self.num_writes = 0

    def is_expected(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the very one of :meth:`expect`."""
        return self._tensor is not None and self._tensor() is tensor

    def give(self, tensor: Tensor) -> None:
        """Note that ``tensor`` is given to the one module that may have it."""
        self._tensor = weakref.ref(tensor)
        self._num_before = self.num_reads + self.num_writes
        self.is_given = self.is_open = True

    def is_held(self) -> bool:
        """Whether the tensor that was given to the module still lives: another than the module holds it."""
        return self._tensor is not None and self._tensor() is not None

    def is_touched_again(self) -> bool:
        """Whether it was read or written after the module had it."""
        return self.is_open or self.is_read_by_others_backward or self.num_reads + self.num_writes != self._num_before

    def is_given_up(self) -> bool:
        """Whether nobody but the module it was given to has seen it, or ever can."""
        return self.is_given and not (self.is_touched_again() or self.is_seen_by_hook or self.is_held())


class StorageWatch(OperatorSubscriber):
    """Keeps a :class:`Memory` of every storage that an operator makes while it is entered."""

    def __init__(self) -> None:
        self._memories: ByStorage[Memory] = ByStorage()
        self._has_collected = False
        self.num_made = 0

    def find(self, tensor: Tensor) -> Memory | None:
        """Return what was seen of the memory of ``tensor``; ``None`` if it was not made while this was entered."""
        return self._memories.find(tensor)

    def hand_over(self, tensor: Tensor, memory: Memory) -> Tensor:
        """Return an alias of ``tensor`` for the one module that may have it.

        Autograd keeps what a module saves alive, Python object included: ``tensor`` lives on only if others have it.
        """
        memory.give(tensor)
        with self.paused():
            alias: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
        return alias

    @override
    def on_operator(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        if self._is_paused:
            return self.run(func, types, args, kwargs)
        written = {storage_address(tensor) for tensor in iterate_written(func, args, kwargs)}
        read = {storage_address(tensor): tensor for tensor in tensors_in((args, kwargs))}
        known = {address: memory for address, tensor in read.items() if (memory := self.find(tensor)) is not None}
        if known and not _is_recomputing():
            self._touch(known, written)
        result = self.run(func, types, args, kwargs)
        for tensor in tensors_in(result):
            if storage_address(tensor) not in read:
                self.num_made += 1
                self._memories.note(tensor, Memory(self.num_made))
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
            collect_cycles(self._memories.values())
        for memory in memories.values():  # the module's own backward reads an alias; others saved the tensor itself
            memory.is_read_by_others_backward |= memory.is_given and memory.is_held()


class _Alias(torch.autograd.Function):
    """The same numbers in the same memory, as another tensor."""

    @staticmethod
    def forward(_: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Tensor:
        return grad

    @staticmethod
    def jvp(_: Any, tangent: Tensor) -> Tensor:
        return tangent


def collect_cycles(memories: Iterable[Memory]) -> None:
    """Let tensors die that nothing but a reference cycle holds."""
    if any(memory.is_given and memory.is_held() for memory in memories):
        gc.collect()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Find the tensors in a tree of arguments or results."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _is_recomputing() -> bool:
    """Whether our own recomputation runs an operator again: the first run of it was seen."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == Recomputation.__module__:
            return True
        frame = frame.f_back
    return False


_PLAIN_TYPES = frozenset({Tensor, FakeTensor})


@dataclass(frozen=True)
class Link:
    """One module whose output goes to one other module and nowhere else."""

    producer: nn.Module
    consumer: nn.Module


class LinkObserver:
    """Observes, while it is entered, once, which modules feed which; :meth:`links` has the result.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        >>> with LinkObserver(net, (nn.Conv2d,), (nn.BatchNorm2d,)) as observer:
        ...     loss = net(torch.randn(2, 3, 8, 8)).sum()
        >>> [(link.producer is net[0], link.consumer is net[1]) for link in observer.links()]
        [(True, True)]
    """

    def __init__(
        self, module: nn.Module, producers: tuple[type[nn.Module], ...], consumers: tuple[type[nn.Module], ...]
    ) -> None:
        self._module = module
        self._producers = [member for member in module.modules() if isinstance(member, producers)]
        self._consumers = [member for member in module.modules() if isinstance(member, consumers)]
        self._watch = StorageWatch()
        self._exit = ExitStack()
        self._starts: dict[nn.Module, list[int]] = defaultdict(list)
        self._outputs: dict[nn.Module, list[Memory]] = defaultdict(list)
        self._taken: dict[Memory, nn.Module] = {}  # by which consumer
        self._num_calls: dict[nn.Module, int] = defaultdict(int)  # of consumers
        self._open: dict[nn.Module, list[Memory | None]] = defaultdict(list)
        self._refused: set[nn.Module] = set()
        self._graph: list[Any] = []  # nodes: as long as they live, what they saved is not freed
        self._links: list[Link] = []
        self._shared: list[Link] = []

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            watch_hooks(self._module, self._watch, stack)  # first: ours are not the user's
            for producer in self._producers:
                stack.callback(producer.register_forward_pre_hook(self._before_producer).remove)
                stack.callback(producer.register_forward_hook(self._after_producer).remove)
            for consumer in self._consumers:
                stack.callback(consumer.register_forward_pre_hook(self._before_consumer, with_kwargs=True).remove)
                stack.callback(consumer.register_forward_hook(self._after_consumer).remove)
            stack.enter_context(self._watch)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._exit.close()
        if kind is None and not have_all_modules_hooks(SEE_INPUT):
            collect_cycles(self._taken)
            proven = list(self._prove())
            self._links = [link for link, is_exclusive in proven if is_exclusive]
            self._shared = [link for link, _ in proven]
        for records in (self._outputs, self._taken, self._graph, self._open, self._starts):
            records.clear()

    def links(self, *, allow_shared: bool = False) -> list[Link]:
        """Return the proven links, in the order of the producers; none if the block raised.

        ``allow_shared``: also those whose consumer took other tensors too: an activation that is used several times.
        """
        return list(self._shared if allow_shared else self._links)

    def _prove(self) -> Iterator[tuple[Link, bool]]:
        for producer, memories in self._outputs.items():
            takers = {self._taken.get(memory) for memory in memories}
            consumer = takers.pop()
            if (
                consumer is not None
                and not takers
                and self._refused.isdisjoint((producer, consumer))
                and not any(is_parametrized(member) for member in (producer, consumer))
                and all(memory.is_given_up() for memory in memories)
            ):
                yield Link(producer, consumer), self._num_calls[consumer] == len(memories)

    def _before_producer(self, module: nn.Module, _: Any) -> None:
        if not torch.compiler.is_compiling():
            self._starts[module].append(self._watch.num_made)

    def _after_producer(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._starts[module]:
            return
        start = self._starts[module].pop()
        memory = self._watch.find(output) if is_plain(output) else None
        if memory is None or memory.number <= start:  # not its own: what it was given, or a parameter
            self._refused.add(module)
            return
        memory.expect(output)
        self._outputs[module].append(memory)

    def _before_consumer(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.compiler.is_compiling():
            return None
        self._num_calls[module] += 1
        memory = self._find_output(args, kwargs)
        self._open[module].append(memory)
        if memory is None:
            return None  # a call that counts, of an input that is nobody's or that others have seen
        self._taken[memory] = module
        return (self._watch.hand_over(args[0], memory), *args[1:]), kwargs

    def _after_consumer(self, module: nn.Module, _: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or not self._open[module]:
            return
        if (memory := self._open[module].pop()) is not None:
            memory.is_open = False
        self._graph += [tensor.grad_fn for tensor in tensors_in(output)]

    def _find_output(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Memory | None:
        """Return the memory of the first argument, if it is the untouched output of a producer."""
        if not args or not is_plain(args[0]) or any(leaf is args[0] for leaf in tree_leaves((args[1:], kwargs))):
            return None
        memory = self._watch.find(args[0])
        is_untouched = memory is not None and memory.is_expected(args[0]) and not memory.num_reads + memory.num_writes
        return memory if is_untouched and not has_tensor_hooks(args[0]) and memory not in self._taken else None


def watch_hooks(module: nn.Module, watch: StorageWatch, stack: ExitStack) -> None:
    """Note, for every user's hook in ``module``, which memory it is shown. ``stack`` undoes it."""

    def see(value: Any) -> None:
        if not torch.compiler.is_compiling():
            for tensor in tensors_in(value):
                if (memory := watch.find(tensor)) is not None:
                    memory.is_seen_by_hook = True

    for member in module.modules():
        sees_output = has_hooks(member, SEE_OUTPUT)  # before ours is there
        if has_hooks(member, SEE_INPUT):
            before = member.register_forward_pre_hook(lambda _, args, kwargs: see((args, kwargs)), with_kwargs=True)
            stack.callback(before.remove)
        if sees_output:
            stack.callback(member.register_forward_hook(lambda _module, _args, output: see(output)).remove)


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether somebody asked for the gradient of ``tensor``."""
    return has_gradient_hooks(tensor) or tensor.retains_grad


def is_plain(value: Any) -> bool:
    """Whether ``value`` is an ordinary tensor of an ordinary forward: no transform, tracer, recomputation."""
    return (
        type(value) in _PLAIN_TYPES
        and value.layout is torch.strided
        and not value.is_inference()
        and not is_in_backward()
        and not (value.requires_grad and not torch.is_grad_enabled())  # what a reentrant checkpoint was given
        and not is_transformed()
    )
