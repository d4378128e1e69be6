"""Stop a job that SLURM is about to end, so that it can be resumed: one checkpoint of all ranks, and a requeue."""

import atexit
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_vram.callbacks.slurm_requeue.exact_resume import ExactResume
from lightning_vram.callbacks.slurm_requeue.folder import RequeueFolder
from lightning_vram.callbacks.slurm_requeue.job import Fate, SlurmJob
from lightning_vram.core.processes.stop_vote import StopVote
from lightning_vram.private_names.lightning.connectors import validates_by_clock
from lightning_vram.private_names.lightning.loops import is_accumulating, is_sequential, validation_follows


class JobStopped(SystemExit):
    """Ends the program on all ranks after the checkpoint has been saved. Its code is 0 if the job is requeued."""


@dataclass
class StopPoints:
    """Where a run may stop: it then saves, is requeued and ends, on all ranks."""

    _trainer: pl.Trainer
    _job: SlurmJob
    _vote: StopVote
    _peers: AbstractContextManager[None]  # entered around a vote
    _resume: ExactResume | None  # of the fit, if it is one
    _is_trial: Callable[[], bool]  # whether a tuner tries something
    folder: RequeueFolder | None = None  # where a fit saves

    def advance(self, advance: Callable[[Any], None], fetcher: Any) -> None:
        """Replaces ``advance``, which runs the next batch of a fit."""
        with self._peers:
            is_stopping = self._vote.exchange() and not self._is_trial()
        loop = self._trainer.fit_loop.epoch_loop
        if is_stopping and not loop.restarting and self._is_between_steps(fetcher):
            self._stop()
        advance(fetcher)

    def begin_evaluation(self) -> None:
        """Agree on the votes of the validation, test or prediction that begins."""
        trainer = self._trainer
        if not trainer.sanity_checking:
            stage = "test" if trainer.testing else "predict" if trainer.predicting else "val"
            num_batches = getattr(trainer, f"num_{stage}_batches")  # of each loader
            known = sum(num_batches) if is_sequential(trainer) else min(num_batches, default=0)
            with self._peers:
                self._vote.limit(known)

    def evaluate(self) -> None:
        """Vote after a batch of an evaluation."""
        trainer = self._trainer
        if trainer.sanity_checking:
            return
        with self._peers:
            is_stopping = self._vote.exchange_limited()
        if is_stopping and (trainer.state.fn != "fit" or not is_accumulating(trainer.fit_loop.epoch_loop)):
            self._stop()

    def _is_between_steps(self, fetcher: Any) -> bool:
        """Whether a checkpoint made now can be resumed here. Lightning's counters do not say what follows a batch."""
        loop = self._trainer.fit_loop.epoch_loop
        by_clock = validates_by_clock(self._trainer)  # ranks' clocks differ
        return not is_accumulating(loop) and (by_clock or not validation_follows(loop, fetcher))

    def _stop(self) -> None:
        trainer, done = self._trainer, "nothing to save"
        if self.folder is not None and self._resume is not None:
            start = time.perf_counter()
            save_together(trainer, self.folder, self._resume)
            if trainer.is_global_zero:  # there are callbacks that save after an exception
                atexit.register(self.folder.touch)
            done = f"saved {self.folder.checkpoint} in {time.perf_counter() - start:.1f} s"
        asked = requeue(self._job) if trainer.is_global_zero else (0, "")
        code, outcome = trainer.strategy.broadcast(asked)
        rank_zero_info(f"SlurmRequeue: {self._vote.name} at step {trainer.global_step}: {done}; {outcome}.")
        raise JobStopped(code)


def save_together(trainer: pl.Trainer, folder: RequeueFolder, resume: ExactResume) -> None:
    """Save between two batches, within a validation, or at the end; a collective. Waits for asynchronous saves."""
    val_progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    saved = val_progress.state_dict()
    resume.repeats_validation = trainer.validating
    if trainer.validating:  # so that Lightning runs it again, from its first batch
        val_progress.reset()
        val_progress.total.ready = val_progress.total.started = 1  # type: ignore[attr-defined]
    try:
        trainer.save_checkpoint(folder.part, weights_only=False)
    finally:
        resume.repeats_validation = False
        val_progress.load_state_dict(saved)
    finish = getattr(trainer.strategy, "wait_for_checkpoints", None)
    trainer.strategy.checkpoint_io.teardown() if finish is None else finish()
    trainer.strategy.barrier("SlurmRequeue.save")
    if trainer.is_global_zero and resume.fit_has_ended:
        folder.publish_end()
    elif trainer.is_global_zero:
        folder.publish()


def requeue(job: SlurmJob) -> tuple[int, str]:
    """Requeue the job, unless it was cancelled. For one rank. Returns an exit code and a message."""
    fate = job.fate()
    if fate is Fate.CANCELLED:
        return 1, f"job {job.job_id} was cancelled and is not requeued"
    if fate is Fate.REQUEUED:
        return 0, f"job {job.job_id} has been requeued"
    why = job.requeue()
    if why:
        return 1, f"job {job.job_id} could not be requeued ({why}): submit it again"
    return 0, f"job {job.job_id} is requeued"
