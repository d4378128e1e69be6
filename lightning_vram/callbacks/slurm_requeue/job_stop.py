"""End a job that SLURM is about to end, so that it can go on: one checkpoint of all ranks, and a request."""

import lightning.pytorch as pl

from lightning_vram.callbacks.slurm_requeue.exact_resume import ExactResume
from lightning_vram.callbacks.slurm_requeue.folder import RequeueFolder
from lightning_vram.callbacks.slurm_requeue.job import Fate, SlurmJob


class JobStopped(SystemExit):
    """Ends the program, all ranks together, after the checkpoint has been saved. Its code is 0 if the job goes on."""


def save_together(trainer: pl.Trainer, folder: RequeueFolder, resume: ExactResume) -> None:
    """Save between two batches, within a validation, which will then be run again, or at the end; a collective.

    Args:
        trainer: That fits.
        folder: Whose checkpoint is there, and complete, when this returns; with asynchronous saves too.
        resume: Of the fit.
    """
    val_progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    kept = val_progress.state_dict()
    resume.repeats_validation = trainer.validating
    if trainer.validating:  # so that Lightning runs it again, from its first batch
        val_progress.reset()
        val_progress.total.ready = val_progress.total.started = 1  # type: ignore[attr-defined]
    try:
        trainer.save_checkpoint(folder.part, weights_only=False)
    finally:
        resume.repeats_validation = False
        val_progress.load_state_dict(kept)
    finish = getattr(trainer.strategy, "wait_for_checkpoints", None)
    trainer.strategy.checkpoint_io.teardown() if finish is None else finish()
    trainer.strategy.barrier("SlurmRequeue.save")
    if trainer.is_global_zero and resume.fit_has_ended:
        folder.publish_end()
    elif trainer.is_global_zero:
        folder.publish()


def requeue(job: SlurmJob) -> tuple[int, str]:
    """Ask SLURM to start the job again, unless it was cancelled. For one rank.

    Args:
        job: That was told to end.

    Returns:
        The exit code of the program, and what to say.
    """
    fate = job.fate()
    if fate is Fate.CANCELLED:
        return 1, f"job {job.job_id} was cancelled and is not requeued"
    if fate is Fate.REQUEUED:
        return 0, f"job {job.job_id} has been requeued"
    why = job.requeue()
    if why:
        return 1, f"job {job.job_id} could not be requeued ({why}): submit it again"
    return 0, f"job {job.job_id} is requeued"
