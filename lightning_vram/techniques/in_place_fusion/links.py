"""Observe, in one real training step, which module feeds which, and prove that nobody else looks at what passes.

Folding a norm into its convolution, or an activation that overwrites its input, is right only if the tensor between
two modules is theirs alone. No name or order of modules tells that; a step that is watched does. A dispatch mode sees
every operator that reads or writes the memory in question; a weak reference tells whether anybody still holds it.

What it costs: Python for every operator of that one step, no memory. What it proves, it proves for the control flow
of that step. Code that reads memory past the operators of torch (numpy, DLPack, kernels launched by address) must
hold the tensor to be noticed. Compiled code is not looked into.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_vram.core.hooks.moment import is_in_backward, is_transformed
from lightning_vram.private_names.torch.dispatch import FakeTensor
from lightning_vram.private_names.torch.modules import SEE_INPUT, SEE_OUTPUT, has_hooks, have_all_modules_hooks
from lightning_vram.private_names.torch.tensors import has_gradient_hooks
from lightning_vram.private_names.torch.trees import tree_leaves
from lightning_vram.techniques.in_place_fusion.storage_watch import (
    Memory,
    StorageWatch,
    collect_cycles,
    tensors_in,
)

_PLAIN_TYPES = frozenset({Tensor, FakeTensor})


@dataclass(frozen=True)
class Link:
    """One module whose output goes to one other module and nowhere else."""

    producer: nn.Module
    consumer: nn.Module


class LinkObserver:
    """Observes which modules inside a module feed which, while it is entered, once; ask for :meth:`links` afterwards.

    Args:
        module: Any module. It is left as it was.
        producers: Classes of the modules whose outputs are followed.
        consumers: Classes of the modules that may take them.

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exit.close()
        if error is None and not has_global_hooks():
            collect_cycles(self._taken)
            proven = list(self._prove())
            self._links = [link for link, is_exclusive in proven if is_exclusive]
            self._shared = [link for link, _ in proven]
        for records in (self._outputs, self._taken, self._graph, self._open, self._starts):
            records.clear()

    def links(self, *, allow_shared: bool = False) -> list[Link]:
        """Return the proven links, in the order of the producers. There are none if the block raised.

        Args:
            allow_shared: Also those whose consumer took other tensors as well, of other producers or of none: an
                activation that a block uses several times.
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
        memory = self._open[module].pop()
        if memory is not None:
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
                memory = watch.find(tensor)
                if memory is not None:
                    memory.is_seen_by_hook = True

    for member in module.modules():
        sees_output = has_hooks(member, SEE_OUTPUT)
        if has_hooks(member, SEE_INPUT):
            before = member.register_forward_pre_hook(lambda _, args, kwargs: see((args, kwargs)), with_kwargs=True)
            stack.callback(before.remove)
        if sees_output:
            stack.callback(member.register_forward_hook(lambda _module, _args, output: see(output)).remove)


def has_global_hooks() -> bool:
    """Whether hooks are set on all modules there are: they see everything."""
    return have_all_modules_hooks(SEE_INPUT)


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
