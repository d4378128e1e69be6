"""Meet a budget for activations by offload, and in compiled layers."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_vram.argument_checks import check_kind
from lightning_vram.callbacks.hook_points import AroundStep, Depth, refuse_moved_parameters
from lightning_vram.core.host.memory import OffloadError, hidden_from_modes
from lightning_vram.core.layers import Layer
from lightning_vram.core.operators import BALANCE
from lightning_vram.memory.estimate.workspaces import measure_bus
from lightning_vram.memory.units import format_bytes, parse_bytes
from lightning_vram.private_names.dispatcher import FakeTensor, modules_in_compiled
from lightning_vram.techniques.activation_checkpointing import (
    BudgetedCheckpointing,
    CheckpointPlan,
    CompiledBudget,
    CompiledBudgetError,
)
from lightning_vram.techniques.activation_offload import ActivationOffloading

MIN_OFFLOAD_BYTES = 1 << 20
_REMEDIES = (("recompute",), ("recompute", "offload"))
_USUAL_BUS, _USUAL_BANDWIDTH = 25e9, 1e12  # bytes per second
_FORWARD_SHARE = 0.25  # of a step that ends with its backward, every layer of it recomputed


def check_remedies(remedies: Sequence[str], offload_bytes: object, budget: object) -> int | Literal["auto"] | None:
    """Return the most bytes to offload; ``None`` if offload is off."""
    name = "ActivationCheckpointing(remedies)"
    check_kind(name, remedies, list | tuple, "a list or tuple of names")
    if tuple(remedies) not in _REMEDIES:
        raise ValueError(f"{name} must be ('recompute',) or ('recompute', 'offload'), got {remedies!r}.")
    num_bytes: int | Literal["auto"] = "auto"
    if offload_bytes != "auto":
        num_bytes = parse_bytes(offload_bytes, "ActivationCheckpointing(offload_bytes)")  # type: ignore[arg-type]
    if "offload" in remedies:
        if budget is None:
            raise ValueError(f"{name} needs a budget to meet, got {remedies!r} without one. Set budget='6GiB'.")
        return num_bytes
    if num_bytes != "auto":
        raise ValueError(
            f"ActivationCheckpointing(offload_bytes={offload_bytes!r}) limits offload, which is off. "
            "Set remedies=('recompute', 'offload')."
        )
    return None


class BudgetOffload:
    """Offloads in each training step what a plan says, as much as PCIe transfers in time; nothing before the plan."""

    def __init__(self, trainer: pl.Trainer, offload_bytes: int | Literal["auto"]) -> None:
        self._trainer = trainer
        self._offload_bytes = offload_bytes
        self._forward_seconds = 0.0
        module = trainer.lightning_module
        self._offloading = ActivationOffloading(module, min_offload_bytes=MIN_OFFLOAD_BYTES, most_bytes=0)
        self._context = AroundStep(trainer.strategy, "training_step", Depth.OFFLOAD, lambda *_, **__: self._step())

    @staticmethod
    def check(trainer: pl.Trainer, offload_bytes: int | Literal["auto"]) -> None:
        """Refuse runs that cannot offload."""
        refuse_moved_parameters("ActivationCheckpointing(remedies)", trainer, "saved tensors are views of")
        if any(type(other).__name__ == "ActivationOffload" for other in trainer.callbacks):  # type: ignore[attr-defined]
            raise MisconfigurationException(
                "ActivationCheckpointing(remedies=('recompute', 'offload')) does not work with ActivationOffload. "
                "Remove one of them."
            )
        if offload_bytes == "auto" and trainer.strategy.root_device.type == "cpu":
            raise MisconfigurationException(
                "ActivationCheckpointing(remedies=('recompute', 'offload')) offloads to host memory, but the model "
                "is on the CPU: nothing is saved. Leave out 'offload', or set offload_bytes."
            )

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the forward inside."""
        device = self._trainer.strategy.root_device
        if self._offload_bytes != "auto" or self._is_fake():
            yield
            return
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        yield
        torch.accelerator.synchronize(device)
        has_backward = not self._trainer.lightning_module.automatic_optimization
        self._forward_seconds = (time.perf_counter() - start) * (_FORWARD_SHARE if has_backward else 1)

    def bus_bytes(self, budgeted: BudgetedCheckpointing) -> int:
        """Return the bytes that PCIe transfers during a forward; what it takes is a guess if its tensors are fake."""
        if self._offload_bytes != "auto":
            return self._offload_bytes
        if self._is_fake():
            cost = max((profile.cost for profile in budgeted.profiles), default=0.0)
            return round(cost * _USUAL_BUS / (BALANCE * _USUAL_BANDWIDTH))
        with hidden_from_modes(next(self._trainer.lightning_module.parameters())):
            return round(self._forward_seconds * measure_bus(self._trainer.strategy.root_device))

    def apply(self, plan: CheckpointPlan) -> None:
        """Apply a plan from the next step on. Tensors are not cut: the last may exceed the planned bytes."""
        self._offloading.most_bytes = plan.offloaded_bytes + plan.largest_bytes if plan.offloaded_bytes else 0

    def keep_in_place(self, batch: object) -> None:
        """Leave the batch on the device: it is alive anyway."""
        self._offloading.keep_in_place(batch)

    def remove(self) -> None:
        """Put everything back."""
        self._context.remove()
        self._offloading.close()

    @contextmanager
    def _step(self) -> Iterator[None]:
        try:
            with self._offloading:
                yield
        except OffloadError as error:
            raise MisconfigurationException(f"ActivationCheckpointing(remedies): {error}") from None

    def _is_fake(self) -> bool:
        return any(type(parameter.data) is FakeTensor for parameter in self._trainer.lightning_module.parameters())


def are_compiled(model: pl.LightningModule, layers: Sequence[Layer]) -> bool:
    """Whether ``layers`` run in compiled code. Refuses a mixture."""
    compiled = modules_in_compiled(model)
    eager = [layer.name for layer in layers if layer.module not in compiled]
    if eager and len(eager) < len(layers):
        raise MisconfigurationException(
            "ActivationCheckpointing(budget) cannot mix compiled and uncompiled layers: "
            f"{', '.join(eager)} {'is' if len(eager) == 1 else 'are'} not compiled. Compile all, or name only one kind "
            "in layers."
        )
    return not eager


class CompiledLayersBudget:
    """Meets a budget in the first steps of a fit, until :meth:`remove`."""

    def __init__(self, trainer: pl.Trainer, budget: str, budget_bytes: int) -> None:
        self._title = f"ActivationCheckpointing(budget={budget})"
        self._budget_bytes = budget_bytes
        self._technique = CompiledBudget(trainer.lightning_module, budget_bytes)
        self._context = AroundStep(
            trainer.strategy, "training_step", Depth.OBSERVATION, lambda batch, *_, **__: self._step(batch)
        )

    @contextmanager
    def _step(self, batch: object) -> Iterator[None]:
        was_done = self._technique.is_done
        try:
            with self._technique.step(batch):
                yield
        except CompiledBudgetError as error:
            raise MisconfigurationException(f"ActivationCheckpointing: {error}") from None
        if self._technique.is_done and not was_done:
            self._report()

    def _report(self) -> None:
        search = self._technique.search
        saved, best = search.kept_bytes, search.best
        points = ", ".join(f"{share:.3f}: {format_bytes(saved[share])}" for share in sorted(saved))
        rank_zero_info(
            f"{self._title} sets the compiler's activation memory budget to {best:.3f}: "
            f"{format_bytes(saved[best])} saved for backward, {saved[best] / self._budget_bytes:.0%} of the budget. "
            f"Tried: {points}."
        )
        if search.is_close:
            return
        above = search.next_above or 1.0  # the search ends above a share only if the next one does not fit
        rank_zero_warn(
            f"{self._title} is missed by more than 3 %: a share of {best:.3f} saves {format_bytes(saved[best])} and is "
            f"used; a share of {above:.3f} saves {format_bytes(saved[above])}. The compiler saves whole tensors or "
            "groups of them: models with more layers come closer to a budget."
        )

    def remove(self) -> None:
        """Put everything back. Calling it again does nothing."""
        self._context.remove()
        self._technique.remove()
