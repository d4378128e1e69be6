"""Let a fit that goes on from a checkpoint see the samples and draw the random numbers that it would have seen.

Lightning counts batches on in the middle of an epoch, but its loaders begin with the first sample again, and its
generators with the seed. Here the place in the data and the generators of every rank are in the checkpoint.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from math import isinf
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_vram.core.patching import MethodPatch, replace_by
from lightning_vram.core.random_state import read_random_states, restore_random_states
from lightning_vram.core.ranks import RankAgreement
from lightning_vram.private_names.lightning import (
    LOAD_LOADER_STATES,
    batch_size_argument,
    checkpoint_connector,
    learning_rate_argument,
    set_sampler_epoch,
    sets_learning_rate,
    stop_restarting,
    stop_restarting_all,
    training_data,
    update_metrics,
)
from lightning_vram.techniques.exact_resume import (
    can_be_stateful,
    load_loader_state,
    loader_state,
    make_stateful,
    remove_state,
    share_generators,
)


class TunerTrials:
    """Trials of the tuners in one fit."""

    # A tuner tries batch sizes or learning rates within the fit, without the trainer's callbacks, and returns to a
    # checkpoint of its own. In a resumed fit it does so between the two halves in which Lightning loads a checkpoint:
    # the fit would begin at step 0 again (Lightning 2.6). So it does not search there, and uses what it found before.

    def __init__(self, trainer: pl.Trainer) -> None:
        self.are_undone = False  # whether a tuner is loading the state before its trials
        self._trainer = trainer
        # Only tuners call it.
        self._undo = MethodPatch(checkpoint_connector(trainer), "restore", partial(partial, self._restore))
        self._searches: list[MethodPatch] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the values that were found, by the name of the argument."""
        module = self._trainer.lightning_module
        names = [name for tuner in self._tuners() for name in _argument_names(tuner)]
        return {name: lightning_getattr(module, name) for name in names if lightning_hasattr(module, name)}

    def skip(self, found: dict[str, Any]) -> None:
        """Set what :meth:`state_dict` found, and prevent searches before training starts."""
        module = self._trainer.lightning_module
        for tuner in self._tuners():
            names = [name for name in _argument_names(tuner) if name in found and lightning_hasattr(module, name)]
            for name in names:
                lightning_setattr(module, name, found[name])
            values = ", ".join(f"{name}={found[name]}" for name in names)
            rank_zero_info(f"{type(tuner).__name__}: this fit is resumed, with {values or 'what it was given'}.")
            if not self._trainer.strategy.restore_checkpoint_after_setup:  # else it has searched, which is undone now
                search = "lr_find" if isinstance(tuner, LearningRateFinder) else "scale_batch_size"
                self._searches.append(MethodPatch(tuner, search, replace_by(lambda *_, **__: None)))

    def allow(self) -> None:
        """Let tuners search again: some do so at later epochs."""
        for search in reversed(self._searches):
            search.remove()
        self._searches = []

    def remove(self) -> None:
        """Leave trainer and tuners as they were. Calling it again does nothing."""
        self.allow()
        self._undo.remove()

    def _tuners(self) -> Iterator[Callback]:
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        return (callback for callback in callbacks if isinstance(callback, (BatchSizeFinder, LearningRateFinder)))

    def _restore(self, restore: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        self.are_undone = True
        try:
            restore(*args, **kwargs)
        finally:
            self.are_undone = False


def _argument_names(tuner: Any) -> tuple[str, ...]:
    if isinstance(tuner, BatchSizeFinder):
        return (batch_size_argument(tuner),)
    if not sets_learning_rate(tuner):
        return ()
    name = learning_rate_argument(tuner)
    return (name,) if name else ("lr", "learning_rate")  # Lightning looks in this order


_METRICS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"

_NO_LENGTH = "its position is not in the checkpoint, because another loader has no length"


class ExactResume:
    """Position in the data and random generators of one fit, in its checkpoints."""

    def __init__(self, trainer: pl.Trainer, agreement: RankAgreement) -> None:
        self.repeats_validation = False  # whether what is saved now will begin with the validation that is running
        self.fit_has_ended = False  # whether what is saved now, or was loaded, is the end of the fit
        self.trials = TunerTrials(trainer)
        self._trainer = trainer
        self._agreement = agreement
        self._loaders: list[Any] = []  # None where one cannot go to its place
        self._reasons: list[str] = []
        self._to_load: dict[str, Any] | None = None
        self._after_iterators: dict[str, Any] | None = None
        self._before_validation: dict[str, Any] | None = None
        loop = trainer.fit_loop
        epoch_loop = loop.epoch_loop
        self._patches = [
            MethodPatch(loop, LOAD_LOADER_STATES, partial(partial, self._load_loaders)),
            MethodPatch(loop, "setup_data", partial(partial, self._set_up_data)),
            MethodPatch(epoch_loop, "reset", partial(partial, self._reset)),
            MethodPatch(epoch_loop.val_loop, "run", partial(partial, self._validate)),
        ]

    def state_dict(self) -> dict[str, Any]:
        """Collect the position in the data, and the generators of all ranks; a collective."""
        before = self._before_validation if self.repeats_validation else None
        mine = before or read_random_states(self._trainer.strategy.root_device)
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        epoch_has_ended = progress.is_last_batch  # perhaps before the loaders have
        is_ahead = not epoch_has_ended and isinf(self._trainer.fit_loop.max_batches)  # Lightning fetches one before
        return {
            "num_batches": 0 if epoch_has_ended else progress.current.processed,  # type: ignore[attr-defined]
            "epoch_has_ended": epoch_has_ended,
            "loaders": [
                None if loader is None or is_ahead else loader_state(loader, epoch_has_ended=epoch_has_ended)
                for loader in self._loaders
            ],
            "random": self._agreement.gather(mine),
            "found": self.trials.state_dict(),
            "end": self._agreement.gather(_read_end(self._trainer)) if self.fit_has_ended else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``, unless it is that of a tuner. Before loaders are made."""
        if not self.trials.are_undone:
            self._to_load = state
            self.trials.skip(state.get("found", {}))

    def on_train_start(self) -> None:
        """Restore the generators: everything before this has drawn numbers that an uninterrupted run does not draw."""
        self.trials.allow()
        self.fit_has_ended = False  # there is something left to do
        state, self._to_load = self._to_load, None
        if state is None:
            return
        random = self._random_of(state)
        loop = self._trainer.fit_loop
        is_next_epoch = not loop.restarting or loop.epoch_loop.restarted_on_train_batch_end
        if state["epoch_has_ended"] and is_next_epoch:  # whose iterators are made already
            random = self._after_iterators
        elif state["epoch_has_ended"]:
            # Iterators that are made already have drawn, too, and are not those of the next epoch.
            self._load_all(state)
        if random is not None:
            restore_random_states(random, self._trainer.strategy.root_device)

    def on_train_epoch_end(self) -> None:
        """Let schedulers step that follow a metric, if it is there. After a restart Lightning assumes it is not."""
        configs = self._trainer.lr_scheduler_configs
        monitors = {config.monitor for config in configs if config.reduce_on_plateau}
        if monitors and monitors <= self._trainer.callback_metrics.keys():
            stop_restarting(self._trainer.fit_loop)

    def end(self) -> None:
        """Put a fit that had nothing left to do into the state of one that has just ended."""
        state, self._to_load = self._to_load, None
        assert state is not None
        stop_restarting_all(self._trainer.fit_loop)  # as loops do when they run
        self._trainer.fit_loop.on_iteration_done()
        random = self._random_of(state)
        if random is not None:
            restore_random_states(random, self._trainer.strategy.root_device)
            end = state["end"][self._trainer.global_rank]
            for kind in _METRICS:
                update_metrics(self._trainer, kind, end[kind])
            self._trainer.should_stop = end["should_stop"]

    def remove(self) -> None:
        """Leave loops and loaders as they were. Calling it again does nothing."""
        self.trials.remove()
        for patch in self._patches:
            patch.remove()
        for loader in self._loaders:
            if loader is not None:
                remove_state(loader)
        self._loaders, self._to_load = [], None

    def _reset(self, reset: Callable[[], None]) -> None:
        with warnings.catch_warnings():
            if all(loader is not None for loader in self._loaders):
                warnings.filterwarnings("ignore", _NOT_RESUMABLE)
            reset()

    def _set_up_data(self, set_up: Callable[[], None]) -> None:
        set_up()
        if self._to_load is not None:
            self._after_iterators = read_random_states(self._trainer.strategy.root_device)

    def _load_loaders(self, load: Callable[[], None]) -> None:
        """Right before loaders are iterated over."""
        combined = training_data(self._trainer.fit_loop)
        assert combined is not None
        self._reasons = [can_be_stateful(loader) for loader in combined.flattened]
        self._loaders = [None if why else loader for why, loader in zip(self._reasons, combined.flattened, strict=True)]
        for loader in self._loaders:
            if loader is not None:
                make_stateful(loader)
        load()
        if self._to_load is not None:
            self._go_to(self._to_load, combined.flattened)

    def _go_to(self, state: dict[str, Any], loaders: list[Any]) -> None:
        random = self._random_of(state)
        if random is not None:
            restore_random_states(random, self._trainer.strategy.root_device)
        if state["epoch_has_ended"]:  # with workers the order of the next epoch is drawn now; Lightning sets it later
            for loader in loaders:
                set_sampler_epoch(loader, self._trainer.fit_loop.epoch_progress.current.ready)
        elif share_generators(loader for loader in self._loaders if loader is not None):
            rank_zero_warn(
                "SlurmRequeue cannot restore a generator that several training loaders share: the data order "
                "will differ from an uninterrupted run. Give each loader its own torch.Generator."
            )
        for loader, why in zip(loaders, self._load_all(state), strict=True):
            has_own_state = hasattr(loader, "load_state_dict")  # which Lightning gives it
            if why and state["num_batches"] and not has_own_state:
                rank_zero_warn(
                    f"SlurmRequeue cannot resume at the next sample: {why}. The first {state['num_batches']} "
                    "batches of this epoch are repeated, the last ones are skipped."
                )

    def _load_all(self, state: dict[str, Any]) -> list[str]:
        """Return, for each loader, why its position could not be restored; ``""`` if it was."""
        is_same = len(state["loaders"]) == len(self._loaders) and self._random_of(state) is not None
        places = state["loaders"] if is_same else [None] * len(self._loaders)
        lacking = _NO_LENGTH if is_same else "the loaders or the number of ranks differ from those of the checkpoint"
        reasons = [why or lacking for why in self._reasons]
        return [self._load(*each) for each in zip(self._loaders, reasons, places, strict=True)]

    def _load(self, loader: Any, why: str, place: dict[str, Any] | None) -> str:
        if loader is None or place is None:
            return why
        try:
            load_loader_state(loader, place)
        except ValueError as error:
            return str(error).rstrip(".")
        return ""

    def _random_of(self, state: dict[str, Any]) -> dict[str, Any] | None:
        """Random states of this rank, if there were as many ranks."""
        is_same = len(state["random"]) == self._trainer.world_size
        return state["random"][self._trainer.global_rank] if is_same else None

    def _validate(self, run: Callable[[], Any]) -> Any:
        """An interrupted validation runs again, with the random numbers that it began with."""
        self._before_validation = read_random_states(self._trainer.strategy.root_device)
        try:
            return run()
        finally:
            self._before_validation = None


def _read_end(trainer: pl.Trainer) -> dict[str, Any]:
    """What a trainer has after a fit on this rank, and Lightning's checkpoints do not: metrics, on the host."""
    metrics = {kind: move_data_to_device(dict(getattr(trainer, kind)), "cpu") for kind in _METRICS}
    return metrics | {"should_stop": bool(trainer.should_stop)}
