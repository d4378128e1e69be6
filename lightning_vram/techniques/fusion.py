"""All of in-place fusion on one module: what works in every step, and what one observed step has to prove first.

Recomputation works from the first training step on. Folding frozen batch norms, inverting activations, fusing pairs
of modules and writing in place need to know which module feeds which and who else looks; that is observed in the first
step of the real model, and they apply from the second on.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from lightning_vram.memory.compiled import is_compiled
from lightning_vram.memory.units import format_bytes
from lightning_vram.techniques.compiled_regions import apply_compiled_recomputation
from lightning_vram.techniques.frozen_batch_norm import (
    BATCH_NORMS,
    CONVOLUTIONS,
    fold_frozen_batch_norm,
    why_not_folded,
)
from lightning_vram.techniques.fused_modules import FUSED_ACTIVATIONS, FUSED_NORMS, fuse_norm_activations
from lightning_vram.techniques.hidden_tensors import count_hidden_bytes
from lightning_vram.techniques.inplace_activations import InplaceObserver, observe_inplace, set_inplace
from lightning_vram.techniques.invertible_norms import apply_inplace_abn
from lightning_vram.techniques.module_links import Link, LinkObserver, observe_links
from lightning_vram.techniques.recompute import Recomputation, RecomputationReport

_INVERTIBLE = (nn.LeakyReLU, nn.ELU, nn.Identity)
_ACTIVATIONS = (*FUSED_ACTIVATIONS, nn.ReLU, nn.Identity)


@dataclass(frozen=True)
class FusionPolicy:
    """What to do; see :class:`~lightning_vram.callbacks.in_place_fusion.InPlaceFusion` for the words."""

    mode: Literal["auto", "general", "modules"] = "auto"
    inplace: bool = False
    abn: Literal["invert"] | None = None
    fold_frozen_bn: bool = False
    min_bytes: int = 1024
    dropout: Literal["mask", "replay"] = "mask"


class FusionError(ValueError):
    """What the policy asks for is impossible on this module."""


class _Undo(Protocol):
    def remove(self) -> None: ...


class Fusion:
    """Fusion at work on one module, until :meth:`remove`.

    Args:
        module: What is trained.
        policy: What to do.
        tell: Takes each sentence about what was done.

    Raises:
        FusionError: From the end of the first step, if what the policy asks for is impossible on this module.
    """

    def __init__(self, module: nn.Module, policy: FusionPolicy, tell: Callable[[str], None]) -> None:
        self._module = module
        self._policy = policy
        self._tell = tell
        self._undos: list[_Undo] = []
        self._has_observed = False
        self._num_changed = 0
        self._recomputation: Recomputation | None = None
        self.is_useful = True
        """False once the first step has shown that there is nothing to save."""
        if policy.mode != "modules":
            self._recomputation = Recomputation(module, min_bytes=policy.min_bytes, dropout=policy.dropout)
        if policy.mode != "general" and is_compiled(module):
            compiled = apply_compiled_recomputation(module)
            self._undos.append(compiled)
            self._num_changed += compiled.num_modules
            tell(f"lets the compiler recompute {compiled.num_modules} norms and activations.")

    @property
    def report(self) -> RecomputationReport | None:
        """What recomputation did in the last step; ``None`` if it is not in use."""
        return self._recomputation.report if self._recomputation is not None else None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one training step inside."""
        if self._has_observed:
            with ExitStack() as stack:
                if self._recomputation is not None:
                    stack.enter_context(self._recomputation)
                yield
            return
        with ExitStack() as stack:
            if self._recomputation is not None:
                stack.enter_context(self._recomputation)
            links = stack.enter_context(self._observe_links()) if self._needs_links else None
            places = stack.enter_context(observe_inplace(self._module)) if self._policy.inplace else None
            yield
        self._has_observed = True
        try:
            self._change(links, places)
        except ValueError as error:
            self.remove()
            raise FusionError(str(error)) from None
        self._summarise()

    def look(self, outputs: Any) -> None:
        """Tell, in the first step, what cannot be reached: ``outputs`` is what the step returned."""
        if not self._has_observed:
            num_functions, hidden_bytes = count_hidden_bytes(outputs)
            if hidden_bytes:
                self._tell(
                    f"leaves {format_bytes(hidden_bytes)} alone that {num_functions} custom autograd functions hold in "
                    "attributes of ctx instead of ctx.save_for_backward()."
                )

    def remove(self) -> None:
        """Make the module what it was. Calling it again does nothing."""
        while self._undos:
            self._undos.pop().remove()

    @property
    def _needs_links(self) -> bool:
        return self._policy.mode == "modules" or self._policy.abn is not None or self._policy.fold_frozen_bn

    def _observe_links(self) -> LinkObserver:
        return observe_links(self._module, (*CONVOLUTIONS, *FUSED_NORMS), (*BATCH_NORMS, *_ACTIVATIONS))

    def _change(self, observed: LinkObserver | None, places: InplaceObserver | None) -> None:
        links = observed.links() if observed is not None else []
        folded: list[nn.Module] = []
        if self._policy.fold_frozen_bn:
            folded = self._fold([link for link in links if isinstance(link.consumer, BATCH_NORMS)])
        shared = observed.links(allow_shared=True) if observed is not None else []
        pairs = [link for link in shared if isinstance(link.consumer, _ACTIVATIONS) and link.producer not in folded]
        if self._policy.abn is not None:
            inverted = [link for link in pairs if isinstance(link.producer, BATCH_NORMS)]
            self._invert(inverted)
            pairs = [link for link in pairs if link not in inverted]
        if self._policy.mode == "modules":
            self._fuse([link for link in pairs if isinstance(link.consumer, FUSED_ACTIVATIONS)])
        if places is not None:
            self._undos.append(set_inplace(self._module, places.safe))
            self._num_changed += len(places.safe)
            saved = format_bytes(sum(places.saved_bytes.values()))
            self._tell(
                f"runs {len(places.safe)} activations in place ({saved} less to allocate on the way); "
                f"{len(places.refused)} are not safe or save nothing."
            )

    def _fold(self, links: list[Link]) -> list[nn.Module]:
        possible = [link for link in links if why_not_folded(link) is None]
        frozen = [link for link in possible if not link.consumer.training]
        if possible and not frozen:
            raise ValueError(
                "fold_frozen_bn=True, but all batch norms behind convolutions are in training mode, the first is "
                f"{self._name(possible[0].consumer)!r}. Call .eval() on them in LightningModule.train() or "
                "on_train_epoch_start, or leave fold_frozen_bn out."
            )
        self._undos.append(fold_frozen_batch_norm(frozen))
        self._num_changed += len(frozen)
        self._tell(f"folds {len(frozen)} frozen batch norms into their convolutions.")
        return [link.consumer for link in frozen]

    def _invert(self, links: list[Link]) -> None:
        chosen = [link for link in links if isinstance(link.consumer, _INVERTIBLE)]
        if not chosen:
            others = sorted({type(link.consumer).__name__ for link in links}) or [
                "no activation that is its only reader"
            ]
            raise ValueError(
                f"abn='invert' needs batch norms followed by LeakyReLU, ELU or Identity, found {', '.join(others)}. "
                "Others cannot be inverted: ReLU drops what is below zero. Leave abn out: recomputation saves the "
                "same and needs no inverse."
            )
        handle = apply_inplace_abn(chosen)
        self._undos.append(handle)
        self._num_changed += handle.num_links
        self._tell(f"inverts {handle.num_links} activations behind batch norms.")

    def _fuse(self, links: list[Link]) -> None:
        handle = fuse_norm_activations(links)
        self._undos.append(handle)
        self._num_changed += handle.num_fused
        self._tell(f"fuses {handle.num_fused} norms with the activation behind them.")

    def _summarise(self) -> None:
        report = self.report
        self.is_useful = self._num_changed > 0 or (report is not None and report.num_dropped > 0)
        if report is None:
            return
        if report.num_dropped:
            whole = format_bytes(report.dropped_bytes + report.kept_bytes)
            self._tell(
                f"keeps {format_bytes(report.kept_bytes)} of {whole} for the backward: {report.num_dropped} tensors "
                "are made again."
            )
        for operator, count in report.differing.items():
            self._tell(f"keeps {count} results of {operator}: a second run gave other bits.")

    def _name(self, module: nn.Module) -> str:
        names: dict[nn.Module, str] = {member: name for name, member in self._module.named_modules()}
        return names[module]


class FrozenNormFolding:
    """Folds batch norms into convolutions where a module is only evaluated, from the second batch on.

    Args:
        module: What is evaluated.
        tell: Takes a sentence about what was done.
    """

    def __init__(self, module: nn.Module, tell: Callable[[str], None]) -> None:
        self._module = module
        self._tell = tell
        self._undo: _Undo | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one evaluation step inside."""
        if self._undo is not None:
            yield
            return
        observer = observe_links(self._module, CONVOLUTIONS, BATCH_NORMS)
        # Operators are seen one by one only outside of inference mode.
        with torch.inference_mode(mode=False), torch.no_grad(), observer:
            yield
        links = [link for link in observer.links() if why_not_folded(link) is None and not link.consumer.training]
        self._undo = fold_frozen_batch_norm(links)
        self._tell(f"folds {len(links)} frozen batch norms into their convolutions.")

    def remove(self) -> None:
        """Make the module what it was. Calling it again does nothing."""
        if self._undo is not None:
            self._undo.remove()
        self._undo = None
