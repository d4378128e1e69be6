"""All of in-place fusion on one module.

Recomputation works from the first training step on. Folding, inverting and writing in place need proof of which module
alone reads which output: the first step that records a gradient is observed, and they apply from the next on, because
its backward must find the modules as its forward did.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from lightning_vram.core.patching import Swaps
from lightning_vram.memory.units import format_bytes
from lightning_vram.private_names.dispatcher import is_compiled
from lightning_vram.techniques.in_place_fusion.norm_pairs import (
    BATCH_NORMS,
    CONVOLUTIONS,
    Pairs,
    apply_inplace_abn,
    can_fold,
    can_invert,
    fold_frozen_batch_norm,
)
from lightning_vram.techniques.in_place_fusion.observed_links import StepObserver
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation, apply_compiled_recomputation

_INVERTIBLE = (nn.LeakyReLU, nn.ELU)


@dataclass(frozen=True)
class FusionPolicy:
    """What to do; see :class:`~lightning_vram.callbacks.in_place_fusion.callback.InPlaceFusion` for the words."""

    mode: Literal["auto", "general"] = "auto"
    inplace: bool = False
    abn: Literal["invert"] | None = None
    fold_frozen_bn: bool = False
    min_bytes: int = 1024
    dropout: Literal["mask", "replay"] = "mask"


class FusionError(ValueError):
    """What the policy asks for is impossible on this module."""


class Fusion:
    """Fusion at work on one module, until :meth:`remove`. ``log`` takes each sentence about what was done."""

    def __init__(self, module: nn.Module, policy: FusionPolicy, log: Callable[[str], None]) -> None:
        self._module = module
        self._policy = policy
        self._needs_links = policy.abn is not None or policy.fold_frozen_bn
        self._log = log
        self.is_observing = True
        self._observer: StepObserver | None = None  # until what it proved is applied
        self._pairs: list[Pairs] = []
        self._overwriting: list[nn.Module] = []
        self._compiled: list[Swaps] = []
        self._recomputation = Recomputation(module, min_bytes=policy.min_bytes, dropout=policy.dropout)
        self.is_useful = True  # False once a step has shown that there is nothing to save
        if policy.mode != "general" and is_compiled(module):
            self._compiled.append(apply_compiled_recomputation(module))
            log(f"lets the compiler recompute {len(self._compiled[0].modules)} norms and activations.")

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one training step inside.

        Raises ``FusionError`` at the start of the second step if the policy is impossible on this module, at the end of
        any step if the model took another path than when it was observed.
        """
        if not self.is_observing and self._observer is not None:
            self._change(self._observer)
            self._observer = None
        with ExitStack() as stack:
            stack.enter_context(self._recomputation)
            if self.is_observing and (self._needs_links or self._policy.inplace):
                self._observer = self._observe(stack)
            stack.enter_context(_switched(self._overwriting, is_inplace=True))
            with _unchanged_path(self._pairs):
                yield
        if self.is_observing:
            self._summarise()

    def _observe(self, stack: ExitStack) -> StepObserver:
        if self._policy.abn is not None:
            # An in-place activation returns the memory it was given: others that read it would not be noticed.
            activations = (member for member in self._module.modules() if isinstance(member, _INVERTIBLE))
            stack.enter_context(_switched(activations, is_inplace=False))
        kinds = ((*CONVOLUTIONS, *BATCH_NORMS), (*BATCH_NORMS, *_INVERTIBLE)) if self._needs_links else ()
        return stack.enter_context(StepObserver(self._module, *kinds, overwriting=self._policy.inplace))

    def remove(self) -> None:
        """Make the module what it was. Calling it again does nothing."""
        for swaps in (*self._pairs, *self._compiled):
            swaps.remove()

    def _change(self, observer: StepObserver) -> None:
        try:
            if self._policy.fold_frozen_bn:
                self._fold(observer)
            if self._policy.abn is not None:
                self._invert(observer)
        except ValueError as error:
            self.remove()
            raise FusionError(str(error)) from None
        self._overwriting = observer.overwriting
        if self._overwriting:
            self._log(f"runs {len(self._overwriting)} activations in place.")

    def _fold(self, observer: StepObserver) -> None:
        links = [link for link in observer.links if can_fold(link)]
        frozen = [link for link in links if not link.consumer.training]
        if not frozen:
            raise ValueError(
                f"fold_frozen_bn=True, but none of {len(links)} batch norms behind a convolution is in evaluation "
                "mode. Call .eval() on them before the fit or in on_train_epoch_start, or leave out fold_frozen_bn."
            )
        self._pairs.append(fold_frozen_batch_norm(frozen))
        self._log(f"folds {len(frozen)} frozen batch norms into their convolutions.")

    def _invert(self, observer: StepObserver) -> None:
        chosen = [link for link in observer.links if can_invert(link) and link.producer.training]
        if not chosen:
            raise ValueError(
                "abn='invert' found no batch norm in training mode (SyncBatchNorm does not count) whose only reader is "
                "a LeakyReLU or ELU that reads nothing else. ReLU cannot be inverted: it drops negative values. Leave "
                "out abn: recomputation saves the same and needs no inverse."
            )
        self._pairs.append(apply_inplace_abn(chosen))
        self._log(f"inverts {len(chosen)} activations behind batch norms.")

    def _summarise(self) -> None:
        report = self._recomputation.report
        if not report.num_saved:
            return  # no gradient was recorded: a step that was skipped, weights that are still frozen
        self.is_observing = False
        self.is_useful = bool(report.num_dropped or any(swaps.modules for swaps in self._compiled) or self._observer)
        if not report.num_dropped:
            return
        whole = format_bytes(report.dropped_bytes + report.kept_bytes)
        self._log(
            f"saves {format_bytes(report.kept_bytes)} instead of {whole} for backward: {report.num_dropped} tensors "
            "are recomputed."
        )
        for operator, count in report.differing.items():
            self._log(f"saves {count} results of {operator}: their recomputation is not exact.")


class FrozenNormFolding:
    """Folds batch norms into convolutions where a module is only evaluated, from the second batch on."""

    def __init__(self, module: nn.Module, log: Callable[[str], None]) -> None:
        self._module = module
        self._log = log
        self._pairs: list[Pairs] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one evaluation step inside."""
        if self._pairs:
            with _unchanged_path(self._pairs):
                yield
            return
        observer = StepObserver(self._module, CONVOLUTIONS, BATCH_NORMS)
        # Operators are seen one by one only outside of inference mode.
        with torch.inference_mode(mode=False), torch.no_grad(), observer:
            yield
        links = [link for link in observer.links if can_fold(link) and not link.consumer.training]
        self._pairs.append(fold_frozen_batch_norm(links))
        if links:
            self._log(f"folds {len(links)} frozen batch norms into their convolutions.")

    def remove(self) -> None:
        """Make the module what it was. Calling it again does nothing."""
        while self._pairs:
            self._pairs.pop().remove()


@contextmanager
def _unchanged_path(changed: list[Pairs]) -> Iterator[None]:
    pairs = [pair for swaps in changed for pair in swaps.pairs]
    for pair in pairs:
        pair.end_step()  # what a failed step, or a checkpoint in a backward, left behind
    yield
    if sum(pair.end_step() for pair in pairs):  # all of them are asked
        raise FusionError(
            "the output of a folded or inverted module went elsewhere than in the first step. fold_frozen_bn and abn "
            "need a model that takes the same path in every step."
        )


@contextmanager
def _switched(activations: Iterable[Any], *, is_inplace: bool) -> Iterator[None]:
    """Let activations overwrite their input, or not, inside."""
    changed = [activation for activation in activations if activation.inplace is not is_inplace]
    for activation in changed:
        activation.inplace = is_inplace
    try:
        yield
    finally:
        for activation in changed:
            activation.inplace = not is_inplace
