"""Detect, at any moment and in any thread, whether one of the chosen layers is running its forward."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn


class _Stack(threading.local):
    def __init__(self) -> None:
        self.running: list[nn.Module] = []


class RunningLayers:
    """Detects, in any thread, whether one of ``layers`` runs, by hooks that exist during :meth:`watching`."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = list(dict.fromkeys(layers))
        self._stack = _Stack()

    @property
    def is_inside(self) -> bool:
        """Whether one of the layers is running in this thread."""
        return bool(self._stack.running)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside the block."""
        self._stack = _Stack()
        with ExitStack() as stack:
            for layer in self._layers:
                stack.callback(layer.register_forward_pre_hook(self._enter, prepend=True).remove)
                stack.callback(layer.register_forward_hook(self._leave, always_call=True).remove)
            yield

    def _enter(self, layer: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            self._stack.running.append(layer)

    def _leave(self, layer: nn.Module, args: Any, result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        running = self._stack.running
        while layer in running:  # what is above it was left by an error that is no Exception
            if running.pop() is layer:
                break
