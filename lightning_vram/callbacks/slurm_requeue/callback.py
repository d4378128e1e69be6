"""Save, requeue and leave when SLURM is about to end the job, all ranks together and never within a signal handler.

Lightning saves in the handler of SIGUSR1, on each rank wherever it is: one of them within a collective, and the job
hangs until its time is over (Lightning #21406). Here the handler only records the signal. Between two batches the ranks
vote, which costs no time because the vote runs during the next batch; then they save one checkpoint together, the first
requeues the job, and all exit.
"""

import atexit
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_vram.argument_checks import check_bool, check_kind
from lightning_vram.callbacks.hook_points import check_trainer, rank_timeout, refuse_several
from lightning_vram.callbacks.slurm_requeue.exact_resume import ExactResume
from lightning_vram.callbacks.slurm_requeue.job import (
    RequeueFolder,
    SlurmJob,
    check_job,
    check_tasks,
    open_folder,
    resume_fit,
    save_together,
)
from lightning_vram.core.patching import MethodPatch, replace_by
from lightning_vram.core.processes import StopSignals, StopVote, leave_group_at_exit, note_signal, shielded_daemons
from lightning_vram.core.ranks import RankAgreement, naming_lost_peers
from lightning_vram.private_names import lightning as private_lightning
from lightning_vram.startup import let_through

_folders: list[RequeueFolder] = []  # that of the fit of this program, once it has begun


class JobStopped(SystemExit):
    """Ends the program on all ranks after the checkpoint has been saved. Its code is 0 if the job is requeued."""


class SlurmRequeue(Callback):
    """Resume after SLURM preemption or a time limit, with the weights of an uninterrupted run (bitwise identical).

    On ``requeue_signal`` (``#SBATCH --signal=USR1@120``) and on SIGTERM (preemption), all ranks save one checkpoint at
    the end of a batch, the job is requeued, and all processes exit. The next start of the job finds the checkpoint,
    whatever ``ckpt_path`` the fit is given, and continues with the next sample and the same random numbers. A cancelled
    job saves and is not requeued. Lightning's own requeueing is disabled. Outside of SLURM only the position in the
    data is stored, in every checkpoint.

    The checkpoint is saved between two optimizer steps, at the latest the second after the signal, or within
    validation, which then runs again; ``validate``, ``test`` and ``predict`` start again. A finished fit is not
    repeated: it saves a last checkpoint at its end. After a restart the trainer does not have its metrics.

    Between runs and after the last one, ``requeue_signal`` does not end the program; the next run handles it, so all
    trainers of a program need this callback. After an error SIGTERM does not end the process either, because
    ``srun -K1`` sends it to all other tasks before they have logged their errors.

    Random augmentation in dataloader workers and metrics accumulated over the epoch restart. Batches of an
    ``IterableDataset`` are repeated, with a warning. Loaders with a ``state_dict`` are left to Lightning. Samplers that
    draw from a generator of their own which is not a ``torch.Generator`` are refused.

    Args:
        dirpath: Folder for ``slurm_requeue/<job>/``, on a file system that all nodes share. ``None``: the trainer's
            ``default_root_dir``. Removed when the program has ended without an error.
        requeue_signal: Name of the signal that announces the end.
        weights_only: Whether only tensors and basic types are read from the job's checkpoint. ``None``: only if other
            users may have written it, which is impossible in the folder that this callback creates. ``False`` reads any
            class.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``requeue_signal`` is not a signal that a process can handle; before training, if a sampler has a
            generator that is not a ``torch.Generator``.
        MisconfigurationException: Under SLURM, if tasks were not started by ``srun`` or the job's name keeps them from
            connecting; before training, if ``dirpath`` is not one folder for all nodes, the program has had a
            fit already, or there is a ``LearningRateFinder`` or ``BatchSizeFinder``.
        JobStopped: In training, a ``SystemExit``: after the checkpoint was saved.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import SlurmRequeue
        >>> trainer = pl.Trainer(callbacks=[SlurmRequeue()], logger=False)
    """

    takes_no_memory = True  # an estimate leaves it out

    def __init__(
        self,
        dirpath: str | Path | None = None,
        requeue_signal: str = "SIGUSR1",
        weights_only: bool | None = None,  # noqa: FBT001 - as Trainer.fit has it
    ) -> None:
        check_kind("SlurmRequeue(dirpath)", dirpath, str | Path | None, "a path or None")
        if weights_only is not None:
            check_bool("SlurmRequeue(weights_only)", weights_only)
        self.dirpath = dirpath
        self.weights_only = weights_only
        self.requeue_signal = requeue_signal
        check_kind("SlurmRequeue(requeue_signal)", requeue_signal, str, "the name of a signal")
        full = requeue_signal if requeue_signal.startswith("SIG") else f"SIG{requeue_signal}"
        if full not in signal.Signals.__members__ or full in ("SIGKILL", "SIGSTOP", "SIGTERM"):
            raise ValueError(f"SlurmRequeue(requeue_signal) must be a signal like 'SIGUSR1', got {requeue_signal!r}.")
        self._signals = StopSignals((signal.SIGTERM, signal.Signals[full]))
        check_job(SlurmJob.from_environment())
        self._undo = ExitStack()
        self._resume: ExactResume | None = None  # of a fit, as the folder
        self._folder: RequeueFolder | None = None
        self._job: SlurmJob | None = None
        self._vote: StopVote | None = None
        self._peers: AbstractContextManager[None] = nullcontext()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_trainer("SlurmRequeue", trainer)
        refuse_several(trainer, SlurmRequeue, "SlurmRequeue can be used once, got several. Remove all but one.")
        check_tasks(private_lightning.cluster_environment(trainer), trainer.num_devices, trainer.num_nodes)
        self._release()
        agreement = RankAgreement(rank_timeout(trainer))
        self._undo.callback(agreement.close)
        if stage == "fit":
            self._resume = ExactResume(trainer, agreement)
            self._undo.callback(self._resume.remove)
        self._job = SlurmJob.from_environment()
        if self._job is None or bool(getattr(trainer, "fast_dev_run", False)):
            self._signals.unblock()
            let_through()
            return
        self._peers = naming_lost_peers(
            trainer.global_rank, trainer.world_size, lambda: f"step {trainer.global_step}, after a batch"
        )
        self._replace_handlers(trainer)
        self._vote = StopVote(agreement, self._signals)
        leave_group_at_exit()
        if self._resume is not None:
            self._set_up_fit(trainer, agreement, self._job, self._resume)

    def _replace_handlers(self, trainer: pl.Trainer) -> None:
        """Replace the signal handlers of Lightning, which wait for other ranks."""
        environment = private_lightning.cluster_environment(trainer)
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            environment.auto_requeue = False
            self._undo.callback(vars(environment).update, auto_requeue=True)
        self._patch(
            private_lightning.signal_connector(trainer), private_lightning.SIGTERM_HANDLER, replace_by(note_signal)
        )
        self._undo.enter_context(shielded_daemons(self._signals.signals))
        if not self._signals.install():
            rank_zero_warn("SlurmRequeue has no effect outside of the main thread: only that thread receives signals.")
        let_through()
        if shutil.which("scontrol") is None:
            rank_zero_warn(
                "SlurmRequeue cannot find scontrol, which requeues the job. Bind it and SLURM's configuration "
                "into the container."
            )

    def _set_up_fit(self, trainer: pl.Trainer, agreement: RankAgreement, job: SlurmJob, resume: ExactResume) -> None:
        if _folders:
            raise MisconfigurationException(
                "SlurmRequeue resumes one fit per program, and this is the second: a restarted job would not know "
                "which one it was in. Start each fit with an srun of its own, or use SlurmRequeue in one of them only."
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, BatchSizeFinder | LearningRateFinder):
                raise MisconfigurationException(
                    f"SlurmRequeue does not work with {type(callback).__name__}: a restarted job would search again. "
                    "Search in a program of its own, and give its result to this one."
                )
        self._folder = folder = open_folder(trainer, agreement, self.dirpath, job)
        _folders.append(folder)
        start = partial(partial, self._start, trainer, folder, resume)
        self._patch(private_lightning.checkpoint_connector(trainer), "resume_start", start)
        self._patch(trainer.fit_loop, "run", partial(partial, self._run, trainer, folder, resume))
        self._patch(trainer.fit_loop.epoch_loop, "advance", partial(partial, self._advance, trainer))

    def _patch(self, owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._undo.callback(MethodPatch(owner, name, make).remove)

    def _start(
        self, trainer: pl.Trainer, folder: RequeueFolder, resume: ExactResume, /, *args: Any, **kwargs: Any
    ) -> None:
        resume.is_restart = resume_fit(trainer, folder, *args, tensors_only=self.weights_only, **kwargs)

    def _run(self, trainer: pl.Trainer, folder: RequeueFolder, resume: ExactResume, run: Callable[[], None]) -> None:
        """Save a fit that has ended, for a restart of a program that has more to do."""
        run()
        if resume.skip_ended_fit():
            rank_zero_info("SlurmRequeue: this fit had ended before the restart.")
        elif not trainer.fit_loop.is_resuming:  # else it was given an end, and there was nothing to do
            resume.fit_has_ended = True
            save_together(trainer, folder, resume)

    def _advance(self, trainer: pl.Trainer, advance: Callable[[Any], None], fetcher: Any) -> None:
        """Run the next batch of a fit, or stop before it."""
        assert self._vote is not None
        with self._peers:
            is_stopping = self._vote.exchange()
        loop = trainer.fit_loop.epoch_loop
        # A checkpoint made now has to be one that can be resumed. Lightning's counters do not say what follows a batch.
        if is_stopping and not loop.restarting and not private_lightning.is_accumulating(loop):
            by_clock = private_lightning.validates_by_clock(trainer)  # ranks' clocks differ
            if by_clock or not private_lightning.validation_follows(loop, fetcher):
                self._stop(trainer)
        advance(fetcher)

    def _stop(self, trainer: pl.Trainer) -> None:
        assert self._job is not None
        assert self._vote is not None
        done = "nothing to save"
        if self._folder is not None and self._resume is not None:
            start = time.perf_counter()
            save_together(trainer, self._folder, self._resume)
            if trainer.is_global_zero:  # there are callbacks that save after an exception
                atexit.register(self._folder.touch)
            done = f"saved {self._folder.checkpoint} in {time.perf_counter() - start:.1f} s"
        code, outcome = trainer.strategy.broadcast(self._job.requeue() if trainer.is_global_zero else (0, ""))
        rank_zero_info(f"SlurmRequeue: {self._vote.name} at step {trainer.global_step}: {done}; {outcome}.")
        raise JobStopped(code)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._resume is not None:
            self._resume.on_train_start()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._resume is not None:
            self._resume.on_train_epoch_end()

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Agree on the number of votes in the validation, test or prediction that begins."""
        if self._vote is not None and not trainer.sanity_checking:
            stage = "test" if trainer.testing else "predict" if trainer.predicting else "val"
            num_batches = getattr(trainer, f"num_{stage}_batches")  # of each loader
            with self._peers:
                self._vote.limit(
                    sum(num_batches) if private_lightning.is_sequential(trainer) else min(num_batches, default=0)
                )

    on_test_start = on_validation_start
    on_predict_start = on_validation_start

    @override
    def on_validation_batch_end(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if self._vote is None or trainer.sanity_checking:
            return
        with self._peers:
            is_stopping = self._vote.exchange_limited()
        loop = trainer.fit_loop.epoch_loop
        if is_stopping and (trainer.state.fn != "fit" or not private_lightning.is_accumulating(loop)):
            self._stop(trainer)

    on_test_batch_end = on_validation_batch_end
    on_predict_batch_end = on_validation_batch_end

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._resume is None:
            return {}
        with self._peers:
            return self._resume.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._resume is not None:
            self._resume.load_state_dict(state_dict)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        atexit.unregister(_end_program)  # the job may be started again
        if not isinstance(exception, JobStopped):  # its process is about to end, and the handlers with it
            # Else it would put our handlers back, which it found there.
            private_lightning.signal_connector(trainer).teardown()
            # srun ends the other tasks of a step in which one has failed: SIGTERM would end this one while it clears
            # up, before Python says what the error was.
            self._release(has_failed=True)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if _folders and trainer.is_global_zero:
            atexit.register(_end_program)  # unless the job is stopped
        self._release()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, such as a worker process gets of the trainer, is in no run."""
        return type(self), (self.dirpath, self.requeue_signal, self.weights_only)

    def _release(self, *, has_failed: bool = False) -> None:
        self._undo.close()
        # Nothing is to be saved until the next run.
        self._signals.remove(harmless=self._signals.signals if has_failed else self._signals.signals[1:])
        self._resume, self._folder, self._job, self._vote, self._peers = None, None, None, None, nullcontext()


def _end_program() -> None:
    if getattr(sys, "last_type", None) is None:  # else an error has ended it, and the job may be started again
        for folder in _folders:
            folder.remove()
