"""Let the first module of a proven link do the work of both: the second passes on what it is given.

The classes of both are swapped. Names, ``state_dict``, copies and pickles stay those of the original modules, hooks see
the result of both, and in compiled code the pair breaks the graph.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.hooks import is_in_backward
from lightning_vram.core.patching import Run, Swaps
from lightning_vram.memory.storages import version_of
from lightning_vram.techniques.in_place_fusion.observed_links import Link


class Pair:
    """What both modules carry in their ``__dict__``."""

    def __init__(self, link: Link) -> None:
        self.producer: Any = link.producer
        self.consumer: Any = link.consumer
        self.num_forwards = 0  # that did the work of both, without those in a backward
        self.is_off = False  # for good
        self._is_active = False  # the last forward of the producer did the work of both
        self._output: tuple[weakref.ref[torch.UntypedStorage], int] | None = None  # on its way, and its version
        self._is_lost = False

    def give(self, output: Tensor | None) -> None:
        """Note what the producer made for both; ``None`` if it did its own work only."""
        self._is_active = output is not None
        if output is not None:
            self._is_lost |= self._output is not None
            self._output = weakref.ref(output.untyped_storage()), version_of(output)  # FSDP2 passes on an alias
            self.num_forwards += not is_in_backward()

    def take(self, input: Tensor) -> bool:
        """Whether nothing is left to do with ``input``, the consumer's."""
        if self._output is None:
            return self._is_active and is_in_backward()  # a checkpoint runs the consumer alone, on what it saved
        (storage, version), self._output = self._output, None
        if storage() is not input.untyped_storage() or version != version_of(input):
            raise RuntimeError(
                f"{self.consumer} got another tensor than the output of {self.producer}, which has done its work. "
                "fold_frozen_bn and abn need a model that takes the same path in every step: leave them out."
            )
        return True

    def end_step(self) -> bool:
        """Forget what is on its way. Returns whether, since the last call, an output did not go to the consumer."""
        was_lost = self._is_lost or self._output is not None
        self._output, self._is_lost = None, False
        return was_lost


class Pairs(Swaps):
    """Swaps links under ``key``, and undoes that. Raises ``ValueError`` if one cannot be; then no module is changed."""

    def __init__(self, key: str, links: Iterable[Link], run_producer: Run) -> None:
        super().__init__(key)
        self.pairs = [Pair(link) for link in links]
        with self.all_or_none():
            for pair in self.pairs:
                self.add(pair.producer, pair, run_producer)
                self.add(pair.consumer, pair, _run_consumer)


def _uncompiled(run: Run) -> Run:
    """Break the graph, also of parts: a module outside of it may have done the work of one inside."""
    outside: Run = torch.compiler.disable(run)  # type: ignore[no-untyped-call]

    def choose(*args: Any, **kwargs: Any) -> Any:
        chosen = outside if torch.compiler.is_compiling() else run
        return chosen(*args, **kwargs)

    return choose


def producing(run_both: Callable[[Pair, Tensor], Tensor | None]) -> Run:
    """Return what a producer runs: ``run_both``, or its own forward where that gives ``None``."""

    @_uncompiled
    def run(module: Any, pair: Pair, original: Callable[[Tensor], Tensor], /, input: Tensor) -> Tensor:
        if module is not pair.producer:  # DataParallel's copy, with weights of its own
            return original(input)
        output = run_both(pair, input)
        pair.give(output)
        return output if output is not None else original(input)

    return run


@_uncompiled
def _run_consumer(_: Any, pair: Pair, original: Callable[[Tensor], Tensor], /, input: Tensor) -> Tensor:
    return input if pair.take(input) else original(input)
