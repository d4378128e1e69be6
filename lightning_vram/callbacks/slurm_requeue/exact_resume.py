"""Let a fit that goes on from a checkpoint see the samples and draw the random numbers that it would have seen.

Lightning counts batches on in the middle of an epoch, but its loaders begin with the first sample again, and its
generators with the seed. Here the place in the data and the generators of every rank are in the checkpoint.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_vram.core.patching import MethodPatch
from lightning_vram.core.random_state import read_global_states, write_global_states
from lightning_vram.core.ranks import RankAgreement
from lightning_vram.private_names import lightning as private_lightning
from lightning_vram.techniques import exact_resume

_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"
_OTHER_LOADERS = "the loaders or the number of ranks differ from those of the checkpoint"
# Lightning then fetches one batch ahead, and counts on without it.
_NO_LENGTH = "its position is not in the checkpoint, because another loader has no length"


class ExactResume:
    """Position in the data and random generators of one fit, in its checkpoints."""

    def __init__(self, trainer: pl.Trainer, agreement: RankAgreement) -> None:
        self.repeats_validation = False  # whether what is saved now will begin with the validation that is running
        self.fit_has_ended = False  # whether what is saved now is the end of the fit
        self.is_restart = False  # whether what is loaded was saved by an earlier start of this program
        self._trainer = trainer
        self._agreement = agreement
        self._loaders: list[tuple[Any, str]] = []  # with the reason why one cannot go to its place
        self._to_load: dict[str, Any] | None = None
        self._has_begun = False
        self._after_iterators: dict[str, Any] | None = None
        self._before_validation: dict[str, Any] | None = None
        loop = trainer.fit_loop
        self._patches = [
            MethodPatch(loop, private_lightning.LOAD_LOADER_STATES, partial(partial, self._load_loaders)),
            MethodPatch(loop, "setup_data", partial(partial, self._set_up_data)),
            MethodPatch(loop.epoch_loop, "reset", partial(partial, self._reset)),
            MethodPatch(loop.epoch_loop.val_loop, "run", partial(partial, self._validate)),
        ]

    def state_dict(self) -> dict[str, Any]:
        """Collect the position in the data, and the generators of all ranks; a collective."""
        trainer = self._trainer
        before = self._before_validation if self.repeats_validation else None
        progress = trainer.fit_loop.epoch_loop.batch_progress
        has_ended = progress.is_last_batch  # perhaps before the loaders have
        loaders = [
            None if why else exact_resume.loader_state(loader, epoch_has_ended=has_ended)
            for loader, why in self._loaders
        ]
        return {
            "num_batches": 0 if has_ended else progress.current.processed,  # type: ignore[attr-defined]
            "epoch_has_ended": has_ended,
            "loaders": loaders,
            "random": self._agreement.gather(before or read_global_states(trainer.strategy.root_device)),
            "fit_has_ended": self.fit_has_ended,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``, before loaders are made; later it is that of a tuner, which returns to it."""
        if self._has_begun:
            return
        self._to_load = state
        if self.is_restart and state["fit_has_ended"]:
            self._trainer.should_stop = True  # nothing is left to do

    def on_train_start(self) -> None:
        """Restore the generators: everything before this has drawn numbers that an uninterrupted run does not draw."""
        self._has_begun = True
        state, self._to_load = self._to_load, None
        if state is None:
            return
        loop = self._trainer.fit_loop
        is_next_epoch = not loop.restarting or loop.epoch_loop.restarted_on_train_batch_end
        if state["epoch_has_ended"] and not is_next_epoch:
            # Iterators that are made already have drawn, too, and are not those of the next epoch.
            self._load_all(state)
        # Those of the next epoch are: what they have drawn, it would have drawn.
        self._restore_random(self._after_iterators if state["epoch_has_ended"] and is_next_epoch else self._mine(state))

    def on_train_epoch_end(self) -> None:
        """Let schedulers step that follow a metric, if it is there. After a restart Lightning assumes it is not."""
        monitors = {one.monitor for one in self._trainer.lr_scheduler_configs if one.reduce_on_plateau}
        if monitors and monitors <= self._trainer.callback_metrics.keys():
            private_lightning.stop_restarting(self._trainer.fit_loop)

    def skip_ended_fit(self) -> bool:
        """Restore the generators of a fit that had ended, and has nothing left to do; return whether it had."""
        state, self._to_load = self._to_load, None
        if state is None or not state["fit_has_ended"]:
            return False
        self._restore_random(self._mine(state))
        return True

    def remove(self) -> None:
        """Leave loops and loaders as they were. Calling it again does nothing."""
        for patch in self._patches:
            patch.remove()
        for loader, why in self._loaders:
            if not why:
                exact_resume.remove_state(loader)
        self._loaders, self._to_load = [], None

    def _reset(self, reset: Callable[[], None]) -> None:
        with warnings.catch_warnings():
            if not any(why for _, why in self._loaders):
                warnings.filterwarnings("ignore", _NOT_RESUMABLE)
            reset()

    def _set_up_data(self, set_up: Callable[[], None]) -> None:
        set_up()
        if self._to_load is not None:
            self._after_iterators = read_global_states(self._trainer.strategy.root_device)

    def _load_loaders(self, load: Callable[[], None]) -> None:
        """Right before loaders are iterated over."""
        combined = private_lightning.training_data(self._trainer.fit_loop)
        assert combined is not None
        other = "" if all(map(exact_resume.has_length, combined.flattened)) else _NO_LENGTH
        self._loaders = [(loader, exact_resume.can_be_stateful(loader) or other) for loader in combined.flattened]
        for loader, why in self._loaders:
            if not why:
                exact_resume.make_stateful(loader)
        load()
        if self._to_load is not None:
            self._go_to(self._to_load)

    def _go_to(self, state: dict[str, Any]) -> None:
        self._restore_random(self._mine(state))
        if state["epoch_has_ended"]:  # with workers the order of the next epoch is drawn now; Lightning sets it later
            for loader, _ in self._loaders:
                private_lightning.set_sampler_epoch(loader, self._trainer.fit_loop.epoch_progress.current.ready)
        elif exact_resume.share_generators(loader for loader, why in self._loaders if not why):
            rank_zero_warn(
                "SlurmRequeue cannot restore a generator that several training loaders share: the data order "
                "will differ from an uninterrupted run. Give each loader its own torch.Generator."
            )
        self._load_all(state)

    def _load_all(self, state: dict[str, Any]) -> None:
        """Restore the positions of the loaders; warn of those in the middle of which that is not possible."""
        is_same = len(state["loaders"]) == len(self._loaders) and self._mine(state) is not None
        for number, (loader, why) in enumerate(self._loaders):
            place: Any = state["loaders"][number] if is_same else None
            why = why or ("" if place else _OTHER_LOADERS)
            try:
                if not why:
                    exact_resume.load_loader_state(loader, place)
            except ValueError as error:
                why = str(error).rstrip(".")
            if why and state["num_batches"] and not hasattr(loader, "load_state_dict"):  # which Lightning gives it
                rank_zero_warn(
                    f"SlurmRequeue cannot resume at the next sample: {why}. The first {state['num_batches']} "
                    "batches of this epoch are repeated, the last ones are skipped."
                )

    def _mine(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Random states of this rank, if there were as many ranks."""
        is_same = len(state["random"]) == self._trainer.world_size
        return state["random"][self._trainer.global_rank] if is_same else None

    def _restore_random(self, states: dict[str, Any] | None) -> None:
        if states is not None:
            write_global_states(states, self._trainer.strategy.root_device)

    def _validate(self, run: Callable[[], Any]) -> Any:
        """An interrupted validation runs again, with the random numbers that it began with."""
        self._before_validation = read_global_states(self._trainer.strategy.root_device)
        try:
            return run()
        finally:
            self._before_validation = None
