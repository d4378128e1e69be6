"""What a module keeps for nothing by its own code: told once per run, with the bytes and the way out."""

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
    """Of one run."""

    def __init__(self) -> None:
        self.looks_at_gradients = True
        self._told: set[str] = set()
        self._stepped: list[Optimizer] = []  # since the last batch of manual optimization

    def look_at_outputs(self, hook: str, outputs: Any, module: pl.LightningModule) -> None:
        """Find a graph behind what an evaluation step has returned."""
        graph = find_held_graph(outputs, module) if hook not in self._told else None
        if graph is None:
            return
        self._tell(
            hook,
            f"{type(module).__name__}.{hook} returns a tensor with its autograd graph, which holds "
            f"{_size_of(graph, module)}. Return tensor.detach(), or remove torch.enable_grad().",
        )

    def look_at_attributes(self, module: pl.LightningModule) -> None:
        """Find graphs behind what the module and its parts keep when an evaluation, or an epoch, is over."""
        for path, value in _attributes(module):
            graph = None
            with suppress(RecursionError):  # a list that contains itself
                graph = find_held_graph(value, module) if path not in self._told else None
            if graph is None:
                continue
            self._tell(
                path,
                f"`{path}` stores an autograd graph that no backward has used, which holds "
                f"{_size_of(graph, module)}. Store tensor.detach(), or compute it under torch.no_grad(); "
                "module.eval() does not disable gradients.",
            )

    def look_at_unstepped(self, trainer: pl.Trainer) -> None:
        """Find gradients that no optimizer steps with, at the first step of the run."""
        if not self._is_first("step"):
            return
        unstepped = unstepped_gradients(trainer.lightning_module, trainer.optimizers)
        if unstepped:
            layer = next(iter(unstepped)).rpartition(".")[0]
            self._tell(
                "unstepped",
                f"{format_bytes(gradient_bytes(unstepped.values()))} of gradients are never freed: no optimizer "
                f"has their parameters, from {_quoted(layer, trainer.lightning_module)} on. Call "
                "requires_grad_(False) on frozen parameters, or run them under torch.no_grad(), which also "
                "avoids storing their graph.",
            )

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer steps."""
        self._stepped.append(optimizer)

    def look_at_manual_zeroing(self) -> None:
        """Find gradients of a step of manual optimization that are alive when the next ``training_step`` begins."""
        stepped, self._stepped = self._stepped, []
        if not self.looks_at_gradients or "manual" in self._told:
            return
        groups = (group for optimizer in stepped for group in optimizer.param_groups)
        num_bytes = gradient_bytes(parameter for group in groups for parameter in group["params"])
        if num_bytes:
            self._tell(
                "manual",
                f"{format_bytes(num_bytes)} of gradients are still in memory when training_step begins, although "
                "the optimizer has already stepped. In manual optimization, call optimizer.zero_grad() right "
                "after optimizer.step().",
            )

    def _is_first(self, moment: str) -> bool:
        is_first = self.looks_at_gradients and moment not in self._told
        self._told.add(moment)
        return is_first

    def _tell(self, finding: str, sentence: str) -> None:
        self._told.add(finding)
        rank_zero_warn(f"EarlyRelease: {sentence}")


def _attributes(module: pl.LightningModule) -> Iterator[tuple[str, Any]]:
    for name, part in module.named_modules():
        yield from iterate_attributes(f"self.{name}" if name else "self", part)


def _size_of(graph: HeldGraph, module: pl.LightningModule) -> str:
    """Say how much a graph holds, and from which layer on."""
    where = "" if graph.first_layer is None else f", from {_quoted(graph.first_layer, module)} on"
    return f"{format_bytes(graph.num_bytes)}{where}"


def _quoted(layer: str, module: pl.LightningModule) -> str:
    return repr(layer) if layer else type(module).__name__
