"""Compute losses on logits chunk by chunk, so that the logits of a language model are never whole."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from typing_extensions import override

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.callbacks import hook_points
from lightning_vram.core.layers import check_layers
from lightning_vram.techniques.chunked_loss import ChunkedLossHandle, apply_chunked_loss, settle

_STEPS = ("training_step", "validation_step")


class ChunkedLoss(hook_points.FitTechnique):
    """Compute a language-model loss in chunks of tokens, without materializing the logits.

    Also known as fused linear cross entropy. ``cross_entropy``, ``nll_loss``, ``kl_div``, and losses written with
    ``log_softmax``, ``softmax``, ``logsumexp``, ``gather``, sums and ``max`` over classes (DPO, entropy, distillation)
    run in chunks, forward and backward. Temperatures, soft caps, shifts and masks may precede them. Any other
    operation receives whole logits; the first one is logged. Lossless: sums are accumulated in another order.

    Args:
        heads: ``nn.Linear`` layers that compute logits: ``"auto"``, or class names, module names, globs or classes; one
            or a list. ``"auto"`` finds the output embeddings of Hugging Face models, else linear layers whose
            ``out_features`` equals the number of entries of the largest embedding.
        chunk: Number of tokens per chunk. ``"auto"``: as many as make a chunk of logits as large as the hidden states,
            at least 256 (128 on a CPU).

    Raises:
        TypeError: If an argument has the wrong type.
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
        self._contexts: list[hook_points.AroundStep] = []
        self._has_logged = False

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        hook_points.refuse_moved_parameters("ChunkedLoss", trainer, "logits are computed with")
        hook_points.refuse_several(trainer, ChunkedLoss, "Two ChunkedLoss in one Trainer: pass all heads to one.")

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        try:
            handle = apply_chunked_loss(trainer.lightning_module, self.heads, self.chunk, tell=self._log_whole_logits)
        except ValueError as error:
            raise MisconfigurationException(f"ChunkedLoss: {error}") from None
        self._handle = handle
        for step in _STEPS:
            look = partial(settle, why=f"the result of {step}")
            around = hook_points.AroundStep(
                trainer.strategy, step, hook_points.Depth.OBSERVATION, lambda *_, **__: handle.active(), look
            )
            self._contexts.append(around)

    def _log_whole_logits(self, head: str, function: str) -> None:
        if not self._has_logged:
            self._has_logged = True
            rank_zero_info(
                f"ChunkedLoss: {function} needs the whole logits of {head}, which are computed for it. These "
                "run in chunks: cross_entropy, nll_loss, kl_div, log_softmax with gather, logsumexp and sums over "
                "classes."
            )

    @override
    def _undo(self) -> None:
        while self._contexts:
            self._contexts.pop().remove()
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
        self._has_logged = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_handle": None, "_contexts": [], "_has_logged": False}  # a copy is not part of any run
