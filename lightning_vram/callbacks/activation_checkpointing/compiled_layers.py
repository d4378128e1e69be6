"""``ActivationCheckpointing(budget=)`` where the chosen layers are compiled."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_vram.callbacks.hook_points import AroundStep, Depth
from lightning_vram.core.layers.selection import Layer
from lightning_vram.memory.units import format_bytes
from lightning_vram.private_names.torch.compiled import modules_in_compiled
from lightning_vram.techniques.activation_checkpointing.compiled_budget import CompiledBudget, CompiledBudgetError


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

    def __init__(self, trainer: pl.Trainer, budget: str, budget_bytes: int, *, offloads: bool) -> None:
        if offloads:
            raise MisconfigurationException(
                "ActivationCheckpointing(remedies=('recompute', 'offload')) does not work with compiled layers, where "
                "the compiler chooses what to save. Leave out 'offload' or torch.compile."
            )
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
        above, more = search.next_above, "no larger share was tried."
        if above is not None:
            more = (
                f"a share of {above:.3f} saves {format_bytes(saved[above])}. The compiler saves whole tensors or "
                "groups of them: models with more layers come closer to a budget."
            )
        rank_zero_warn(
            f"{self._title} is missed by more than 3 %: a share of {best:.3f} saves {format_bytes(saved[best])} and is "
            f"used; {more}"
        )

    def remove(self) -> None:
        """Put everything back. Calling it again does nothing."""
        self._context.remove()
        self._technique.remove()
