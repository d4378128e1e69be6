"""What a module keeps for nothing by its own code: told once per run, with the bytes and the way out."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_vram.memory.units import format_bytes
from lightning_vram.techniques.early_release import find_held_graph, gradient_bytes, unstepped_gradients

_OF_MODULES = ("_modules", "_parameters")  # tables of nn.Module, which are looked at by themselves


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
        where = "" if graph.first_layer is None else f", from {_quoted(graph.first_layer, module)} on"
        self._tell(
            hook,
            f"{type(module).__name__}.{hook} returns a tensor with its graph, which holds "
            f"{format_bytes(graph.num_bytes)}{where}. Return tensor.detach(), or take torch.enable_grad() out of it.",
        )

    def look_at_attributes(self, module: pl.LightningModule) -> None:
        """Find graphs behind what the module and its parts keep when an evaluation, or an epoch, is over."""
        for path, value in _attributes(module):
            graph = None
            with suppress(RecursionError):  # a list that contains itself
                graph = find_held_graph(value, module) if path not in self._told else None
            if graph is None:
                continue
            where = "" if graph.first_layer is None else f", from {_quoted(graph.first_layer, module)} on"
            self._tell(
                path,
                f"`{path}` keeps a graph that no backward has used, which holds {format_bytes(graph.num_bytes)}{where}."
                " Keep tensor.detach(), or run what made it under torch.no_grad(): module.eval() does not.",
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
                f"{format_bytes(gradient_bytes(unstepped.values()))} of gradients stay for the whole run: no optimizer "
                f"has their parameters, from {_quoted(layer, trainer.lightning_module)} on. Call requires_grad_(False) "
                "on what is not trained, or run it under torch.no_grad(): its graph is not kept then, either.",
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
                f"{format_bytes(num_bytes)} of gradients are alive when training_step begins, though a step was made "
                "with them. In manual optimization they are yours to free: call optimizer.zero_grad() right after "
                "optimizer.step(), too.",
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
        for attribute, value in vars(part).items():
            if attribute not in _OF_MODULES:
                yield ".".join(filter(None, ("self", name, attribute))), value


def _quoted(layer: str, module: pl.LightningModule) -> str:
    return repr(layer) if layer else type(module).__name__
