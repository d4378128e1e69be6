"""All of in-place fusion on one module.

Recomputation works from the first training step on. Folding, inverting and writing in place need proof of which module
alone reads which output: the first step that records a gradient is observed, and they apply from the next on, because
its backward must find the modules as its forward did.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction

from lightning_vram.memory.units import format_bytes
from lightning_vram.private_names.dispatcher import is_compiled
from lightning_vram.private_names.torch import storage_key
from lightning_vram.techniques.in_place_fusion.folding import (
    BATCH_NORMS,
    CONVOLUTIONS,
    FoldingHandle,
    fold_frozen_batch_norm,
    why_not_folded,
)
from lightning_vram.techniques.in_place_fusion.inplace_abn import InPlaceABNHandle, apply_inplace_abn_where_safe
from lightning_vram.techniques.in_place_fusion.inplace_activations import InplaceObserver, set_inplace
from lightning_vram.techniques.in_place_fusion.observed_links import LinkObserver, tensors_in
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation, apply_compiled_recomputation

_INVERTIBLE = (nn.LeakyReLU, nn.ELU, nn.Identity)
_ACTIVATIONS = (*_INVERTIBLE, nn.ReLU, nn.ReLU6, nn.SiLU, nn.GELU, nn.Hardswish, nn.Mish)


@dataclass(frozen=True)
class FusionPolicy:
    """What to do; see :class:`~lightning_vram.callbacks.in_place_fusion.callback.InPlaceFusion` for the words."""

    mode: Literal["auto", "general"] = "auto"
    inplace: bool = False
    abn: Literal["invert"] | None = None
    fold_frozen_bn: bool = False
    min_bytes: int = 1024
    dropout: Literal["mask", "replay"] = "mask"


class _Stage(Enum):
    OBSERVING = auto()
    OBSERVED = auto()  # and its backward may still have to run
    CHANGED = auto()


class FusionError(ValueError):
    """What the policy asks for is impossible on this module."""


class Fusion:
    """Fusion at work on one module, until :meth:`remove`. ``log`` takes each sentence about what was done."""

    def __init__(self, module: nn.Module, policy: FusionPolicy, log: Callable[[str], None]) -> None:
        self._module = module
        self._policy = policy
        self._needs_links = policy.abn is not None or policy.fold_frozen_bn
        self._log = log
        self._undos: list[Callable[[], None]] = []
        self._checked: list[FoldingHandle | InPlaceABNHandle] = []
        self._safe_names: list[str] = []
        self._links: LinkObserver | None = None
        self._places: InplaceObserver | None = None
        self._stage = _Stage.OBSERVING
        self._num_compiled = 0
        self._recomputation = Recomputation(module, min_bytes=policy.min_bytes, dropout=policy.dropout)
        self.is_useful = True  # False once a step has shown that there is nothing to save
        if policy.mode != "general" and is_compiled(module):
            compiled = apply_compiled_recomputation(module)
            self._undos.append(compiled.remove)
            self._num_compiled = len(compiled.modules)
            log(f"lets the compiler recompute {self._num_compiled} norms and activations.")

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one training step inside.

        Raises ``FusionError`` at the start of the second step if the policy is impossible on this module, at the end of
        any step if the model took another path than when it was observed.
        """
        if self._stage is _Stage.OBSERVED:
            self._change()
        with ExitStack() as stack:
            stack.enter_context(self._recomputation)
            if self._stage is _Stage.OBSERVING:
                self._observe(stack)
            elif self._safe_names:
                stack.callback(set_inplace(self._module, self._safe_names).remove)
            self._end_step()
            yield
        if self._end_step():
            raise FusionError(
                "the output of a folded or inverted module went elsewhere than in the first step. fold_frozen_bn and "
                "abn need a model that takes the same path in every step."
            )
        if self._stage is _Stage.OBSERVING:
            self._summarise()

    def _observe(self, stack: ExitStack) -> None:
        if self._needs_links:
            self._links = stack.enter_context(
                LinkObserver(self._module, (*CONVOLUTIONS, *BATCH_NORMS), (*BATCH_NORMS, *_ACTIVATIONS))
            )
        if self._policy.abn is not None:
            # An in-place activation returns the memory it was given: others that read it would not be noticed.
            activations: list[Any] = [m for m in self._module.modules() if isinstance(m, _INVERTIBLE)]
            for activation in activations:
                if getattr(activation, "inplace", False):
                    activation.inplace = False
                    stack.callback(setattr, activation, "inplace", True)  # noqa: FBT003
        if self._policy.inplace:
            self._places = stack.enter_context(InplaceObserver(self._module))

    def _end_step(self) -> bool:
        return sum(handle.end_step() for handle in self._checked) > 0  # all of them are asked

    def report_hidden(self, outputs: Any) -> None:
        """Log, in the first step, what cannot be reached: ``outputs`` is what the step returned."""
        if self._stage is _Stage.OBSERVING:
            num_functions, hidden_bytes = count_hidden_bytes(outputs)
            if hidden_bytes:
                self._log(
                    f"cannot drop {format_bytes(hidden_bytes)} that {num_functions} custom autograd functions hold in "
                    "attributes of ctx instead of ctx.save_for_backward()."
                )

    def remove(self) -> None:
        """Make the module what it was. Calling it again does nothing."""
        while self._undos:
            self._undos.pop()()

    def _change(self) -> None:
        self._stage = _Stage.CHANGED
        try:
            folded = self._fold() if self._policy.fold_frozen_bn else []
            if self._policy.abn is not None:
                self._invert(folded)
        except ValueError as error:
            self.remove()
            raise FusionError(str(error)) from None
        if self._places is not None:
            self._safe_names = self._places.safe
            if self._safe_names:
                saved = format_bytes(sum(self._places.saved_bytes.values()))
                self._log(f"runs {len(self._safe_names)} activations in place, which allocates {saved} less.")
        self._links = self._places = None

    def _fold(self) -> list[nn.Module]:
        assert self._links is not None
        links = [link for link in self._links.links() if why_not_folded(link) is None]
        frozen = [link for link in links if not link.consumer.training]
        if not frozen:
            first = f", the first is {self._name(links[0].consumer)!r}" if links else ""
            raise ValueError(
                f"fold_frozen_bn=True, but none of {len(links)} batch norms behind a convolution is in evaluation "
                f"mode{first}. Call .eval() on them before the fit or in on_train_epoch_start, or leave out "
                "fold_frozen_bn."
            )
        handle = fold_frozen_batch_norm(frozen)
        self._undos.append(handle.remove)
        self._checked.append(handle)
        self._log(f"folds {len(frozen)} frozen batch norms into their convolutions.")
        return [link.consumer for link in frozen]

    def _invert(self, folded: list[nn.Module]) -> None:
        assert self._links is not None
        found = self._links.links(allow_shared=True)
        links = [link for link in found if isinstance(link.producer, BATCH_NORMS) and link.producer not in folded]
        chosen = [link for link in links if isinstance(link.consumer, _INVERTIBLE)]
        if not chosen:
            others = ", ".join(sorted({type(link.consumer).__name__ for link in links})) or "none"
            raise ValueError(
                "abn='invert' needs batch norms whose only reader is a LeakyReLU, ELU or Identity; activations found "
                f"behind batch norms: {others}. Others cannot be inverted: ReLU drops negative values. Leave out abn: "
                "recomputation saves the same and needs no inverse."
            )
        handle, refused = apply_inplace_abn_where_safe(chosen)
        if not handle.num_links:
            name = self._name(chosen[0].producer)
            raise ValueError(f"abn='invert': {name!r} cannot be inverted: {refused[0]}")
        self._undos.append(handle.remove)
        self._checked.append(handle)
        left = f"; {len(refused)} are skipped, the first because {refused[0]}" if refused else "."
        self._log(f"inverts {handle.num_links} activations behind batch norms{left}")

    def _summarise(self) -> None:
        report = self._recomputation.report
        if not report.num_saved:
            return  # no gradient was recorded: a step that was skipped, weights that are still frozen
        needs_more = self._policy.inplace or self._needs_links
        self._stage = _Stage.OBSERVED if needs_more else _Stage.CHANGED
        self.is_useful = bool(report.num_dropped + self._num_compiled or needs_more)
        if not report.num_dropped:
            return
        whole = format_bytes(report.dropped_bytes + report.kept_bytes)
        self._log(
            f"saves {format_bytes(report.kept_bytes)} instead of {whole} for backward: {report.num_dropped} tensors "
            "are recomputed."
        )
        for operator, count in report.differing.items():
            self._log(f"saves {count} results of {operator}: their recomputation is not exact.")

    def _name(self, module: nn.Module) -> str:
        names: dict[nn.Module, str] = {member: name for name, member in self._module.named_modules()}
        return names[module]


class FrozenNormFolding:
    """Folds batch norms into convolutions where a module is only evaluated, from the second batch on."""

    def __init__(self, module: nn.Module, log: Callable[[str], None]) -> None:
        self._module = module
        self._log = log
        self._undo: FoldingHandle | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one evaluation step inside."""
        if self._undo is not None:
            self._undo.end_step()
            yield
            if self._undo.end_step():
                message = "the output of a folded convolution did not go to its batch norm. Leave fold_frozen_bn out."
                raise FusionError(message)
            return
        observer = LinkObserver(self._module, CONVOLUTIONS, BATCH_NORMS)
        # Operators are seen one by one only outside of inference mode.
        with torch.inference_mode(mode=False), torch.no_grad(), observer:
            yield
        links = [link for link in observer.links() if why_not_folded(link) is None and not link.consumer.training]
        self._undo = fold_frozen_batch_norm(links)
        if links:
            self._log(f"folds {len(links)} frozen batch norms into their convolutions.")

    def remove(self) -> None:
        """Make the module what it was. Calling it again does nothing."""
        if self._undo is not None:
            self._undo.remove()
        self._undo = None


def count_hidden_bytes(outputs: Any) -> tuple[int, int]:
    """Count custom autograd functions in the graph of ``outputs`` that hold tensors in attributes, and those bytes.

    Saved-tensor hooks do not see them. Each memory counts once.
    """
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors_in(outputs) if tensor.grad_fn is not None]
    seen: set[Any] = set(waiting)
    functions: set[str] = set()
    storages: dict[int, int] = {}
    while waiting:
        node = waiting.pop()
        if isinstance(node, BackwardCFunction):
            tensors = list(tensors_in(list(vars(node).values())))
            functions |= {type(node).__name__} if tensors else set()
            storages |= {storage_key(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in tensors}
        following = {function for function, _ in node.next_functions if function is not None} - seen
        seen |= following
        waiting += following
    return len(functions), sum(storages.values())
