"""Compute losses on logits chunk by chunk, so that the logits of a language model are never whole.

See :mod:`lightning_vram.techniques.chunked_loss.apply` for the mechanism and where it does not help.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.callbacks.hook_points import AroundStep, Depth, FitTechnique, refuse_moved_parameters
from lightning_vram.core.layers.patterns import check_layers
from lightning_vram.techniques.chunked_loss import ChunkedLossHandle, apply_chunked_loss, settle

_STEPS = ("training_step", "validation_step")


class ChunkedLoss(FitTechnique):
    """Let the head of a language model return logits that a loss computes some tokens at a time.

    ``cross_entropy``, ``nll_loss``, ``kl_div``, and what is written with ``log_softmax``, ``softmax``, ``logsumexp``,
    ``gather``, sums and largest ones along the classes (log-probabilities of DPO, entropy, distillation) run in chunks,
    with their gradients; temperatures, soft caps, shifts and masks may come before. What looks at logits otherwise
    gets all of them, is right, and is told of once. Losses are those of the plain run up to rounding: sums have another
    order.

    Args:
        heads: Which ``nn.Linear`` make logits: ``"auto"``, or class names, module names, globs or classes, one or
            several. ``"auto"`` finds what models of transformers declare, else linear layers with as many results as an
            embedding has entries.
        chunk: Tokens whose logits are there at a time. ``"auto"``: as many as make logits of the size of the hidden
            states, at least 256, or 128 on a CPU; fewer where the device has no room for as many, and sums then round
            otherwise.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If ``chunk`` is less than 1.
        MisconfigurationException: Before training, if there is no head.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import ChunkedLoss
        >>> trainer = pl.Trainer(callbacks=[ChunkedLoss()], logger=False)
    """

    def __init__(
        self,
        heads: str | type[nn.Module] | Sequence[str | type[nn.Module]] = "auto",
        chunk: int | Literal["auto"] = "auto",
    ) -> None:
        check_layers("ChunkedLoss(heads)", heads)
        if chunk != "auto":
            check_positive_int("ChunkedLoss(chunk)", chunk)
        self.heads = heads
        self.chunk = chunk
        self._handle: ChunkedLossHandle | None = None
        self._contexts: list[AroundStep] = []
        self._has_told = False

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        refuse_moved_parameters("ChunkedLoss", trainer, "logits are computed with")
        others = [one for one in trainer.callbacks if isinstance(one, ChunkedLoss)]  # type: ignore[attr-defined]
        if len(others) > 1:
            raise MisconfigurationException("Two ChunkedLoss in one Trainer: give one several heads=.")

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        try:
            self._handle = apply_chunked_loss(trainer.lightning_module, self.heads, self.chunk, tell=self._tell)
        except ValueError as error:
            raise MisconfigurationException(f"ChunkedLoss: {error}") from None
        for step in _STEPS:
            look = partial(settle, why=f"what {step} returns")
            around = AroundStep(trainer.strategy, step, Depth.OBSERVATION, lambda *_, **__: self._step(), look)
            self._contexts.append(around)

    @contextmanager
    def _step(self) -> Iterator[None]:
        assert self._handle is not None
        with self._handle.active():
            yield

    def _tell(self, head: str, function: str) -> None:
        if not self._has_told:
            self._has_told = True
            rank_zero_info(
                f"ChunkedLoss: {function} needs all logits of {head} at once, which are made for it. They stay in "
                "chunks for cross_entropy, nll_loss, kl_div, log_softmax with gather, logsumexp and sums along the "
                "classes."
            )

    @override
    def _undo(self) -> None:
        while self._contexts:
            self._contexts.pop().remove()
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
        self._has_told = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_handle": None, "_contexts": [], "_has_told": False}  # a copy is not part of any run
