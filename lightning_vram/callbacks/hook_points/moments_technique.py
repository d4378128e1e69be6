"""The base of callbacks that store optimizer state in low precision during a fit."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_vram.callbacks.hook_points.checks import refuse_moved_parameters
from lightning_vram.callbacks.hook_points.fit_technique import FitTechnique
from lightning_vram.optimizers.narrow import Library, NarrowMoments, why_not_installed
from lightning_vram.optimizers.stepping.state_forms import FORMS, HostState, StateForm, describe_unheld
from lightning_vram.optimizers.stepping.update_check import UpdateCheck

_WORDS: dict[HostState, str] = {"bf16": "bfloat16", "8bit": "8 bit", "4bit": "4 bit"}


class MomentsTechnique(FitTechnique):
    """Stores moments in a form and steps with the kernels of ``library``; under ``fsdp_offload`` the strategy does."""

    def __init__(self, form: HostState, library: Library = "own") -> None:
        self._form_name: HostState = form
        self.library: Library = library
        self._moments: NarrowMoments | None = None
        self._updates: UpdateCheck | None = None  # counts lost updates, if the user asked for it
        self._strategy: Any = None  # set if it stores them itself

    @property
    def _form(self) -> StateForm:
        form = FORMS.get(self._form_name)
        assert form is not None
        return form

    @override
    def _check(self, trainer: pl.Trainer) -> None:
        name = type(self).__name__
        refuse_moved_parameters(name, trainer, "moments belong to")
        first, *others = (
            type(one).__name__
            for one in trainer.callbacks  # type: ignore[attr-defined]
            if isinstance(one, MomentsTechnique)
        )
        if others:
            named = f"Two {name}" if {first, *others} == {name} else f"{first} and {others[0]}"
            raise MisconfigurationException(f"{named} in one Trainer: leave one out.")
        missing = why_not_installed(self.library)
        if missing is not None:
            raise ModuleNotFoundError(missing)
        strategy: Any = trainer.strategy
        if hasattr(strategy, "moments") and self.library not in ("own", "auto"):
            raise MisconfigurationException(
                f"{name}(library={self.library!r}) does not work with {type(strategy).__name__}, which steps on the "
                "host: use library='own'."
            )
        if hasattr(strategy, "moments") and strategy.arguments.host_state not in ("fp32", self._form_name):
            host_state: HostState = strategy.arguments.host_state
            raise MisconfigurationException(
                f"{self._form.part} does not work with FSDPOffloadStrategy(host_state={host_state!r}), which has "
                f"moments in {_WORDS[host_state]}: leave one out."
            )

    @override
    def _apply(self, trainer: pl.Trainer) -> None:
        if hasattr(trainer.strategy, "moments"):
            self._strategy = trainer.strategy
            self._strategy.moments = self._form_name
        else:
            self._moments = NarrowMoments(trainer.lightning_module, self._form, self.library, self._updates)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        form = self._form
        fits = form.fits if self._strategy is None else form.is_for  # which has taken their steps over by now
        if not any(map(fits, trainer.optimizers)):
            found = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "none"
            raise MisconfigurationException(
                f"{form.part} is for the moments of {form.able}, got {found}: use one of these, as torch.optim has it, "
                f"or leave {form.part} out."
            )
        if self._moments is not None:
            self._moments.attach(trainer.optimizers)
            if self._moments.unheld:
                rank_zero_info(describe_unheld(form.part, self._moments.unheld, pl_module))

    @override
    def _undo(self) -> None:
        moments, self._moments = self._moments, None
        strategy, self._strategy = self._strategy, None
        self._updates = None
        if moments is not None:
            moments.let_go()
        if strategy is not None:
            strategy.moments = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_moments": None, "_strategy": None, "_updates": None}  # a copy is not part of any run
