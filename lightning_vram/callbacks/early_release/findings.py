"""Memory that a module's own code wastes."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_vram.memory.leaks.attributes import iterate_attributes
from lightning_vram.memory.units import format_bytes
from lightning_vram.techniques.early_release import HeldGraph, find_held_graph, gradient_bytes, unstepped_gradients


class Findings:
    """Warns of each mistake once per run, with the bytes and the way out."""

    def __init__(self) -> None:
        self.looks_at_gradients = True
        self._reported: set[str] = set()
        self._stepped: list[Optimizer] = []  # since the last batch of manual optimization

    def look_at_outputs(self, hook: str, outputs: Any, module: pl.LightningModule) -> None:
        """Find an autograd graph behind the outputs of an evaluation step."""
        graph = find_held_graph(outputs, module) if hook not in self._reported else None
        if graph is not None:
            self._warn(
                hook,
                f"{type(module).__name__}.{hook} returns a tensor with its autograd graph, which holds "
                f"{_size_of(graph, module)}. Return tensor.detach(), or remove torch.enable_grad().",
            )

    def look_at_attributes(self, module: pl.LightningModule) -> None:
        """Find autograd graphs behind attributes of the module when an evaluation or epoch is over."""
        for path, value in _attributes(module):
            graph = None
            with suppress(RecursionError):  # a list that contains itself
                graph = find_held_graph(value, module) if path not in self._reported else None
            if graph is not None:
                self._warn(
                    path,
                    f"`{path}` stores an autograd graph that no backward has used, which holds "
                    f"{_size_of(graph, module)}. Store tensor.detach(), or compute it under torch.no_grad(); "
                    "module.eval() does not disable gradients.",
                )

    def note_step(self, trainer: pl.Trainer, optimizer: Optimizer) -> None:
        """Find gradients that no optimizer steps with, at the first step of the run."""
        self._stepped.append(optimizer)
        if not self.looks_at_gradients or "step" in self._reported:
            return
        self._reported.add("step")
        unstepped = unstepped_gradients(trainer.lightning_module, trainer.optimizers)
        if unstepped:
            layer = next(iter(unstepped)).rpartition(".")[0]
            self._warn(
                "unstepped",
                f"{format_bytes(gradient_bytes(unstepped.values()))} of gradients are never freed: no optimizer "
                f"has their parameters, from {_quoted(layer, trainer.lightning_module)} on. Call "
                "requires_grad_(False) on frozen parameters, or run them under torch.no_grad(), which also "
                "avoids storing their graph.",
            )

    def look_at_manual_zeroing(self) -> None:
        """Find gradients of a step of manual optimization that are alive when the next ``training_step`` begins."""
        stepped, self._stepped = self._stepped, []
        if not self.looks_at_gradients or "manual" in self._reported:
            return
        groups = (group for optimizer in stepped for group in optimizer.param_groups)
        num_bytes = gradient_bytes(parameter for group in groups for parameter in group["params"])
        if num_bytes:
            self._warn(
                "manual",
                f"{format_bytes(num_bytes)} of gradients are still in memory when training_step begins, although "
                "the optimizer has already stepped. In manual optimization, call optimizer.zero_grad() right "
                "after optimizer.step().",
            )

    def _warn(self, finding: str, sentence: str) -> None:
        self._reported.add(finding)
        rank_zero_warn(f"EarlyRelease: {sentence}")


def _attributes(module: pl.LightningModule) -> Iterator[tuple[str, Any]]:
    for name, part in module.named_modules():
        yield from iterate_attributes(f"self.{name}" if name else "self", part)


def _size_of(graph: HeldGraph, module: pl.LightningModule) -> str:
    """Name the bytes that a graph holds, and its first layer."""
    where = "" if graph.first_layer is None else f", from {_quoted(graph.first_layer, module)} on"
    return f"{format_bytes(graph.num_bytes)}{where}"


def _quoted(layer: str, module: pl.LightningModule) -> str:
    return repr(layer) if layer else type(module).__name__
