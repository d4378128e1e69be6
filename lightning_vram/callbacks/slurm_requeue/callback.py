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
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_vram.argument_checks import check_bool
from lightning_vram.callbacks.hook_points import check_trainer, rank_timeout, refuse_several
from lightning_vram.callbacks.slurm_requeue.exact_resume import ExactResume
from lightning_vram.callbacks.slurm_requeue.job import (
    JobStopped,
    RequeueFolder,
    SlurmJob,
    StopPoints,
    check_job,
    check_tasks,
    open_folder,
    resume_fit,
    save_together,
)
from lightning_vram.core.patching import MethodPatch, replace_by
from lightning_vram.core.processes import DaemonShield, StopSignals, StopVote, leave_group_at_exit
from lightning_vram.core.ranks import RankAgreement, naming_lost_peers
from lightning_vram.private_names.lightning import (
    SIGTERM_HANDLER,
    checkpoint_connector,
    cluster_environment,
    signal_connector,
)
from lightning_vram.startup import let_through

_fits = count(1)  # of this program: the same on all ranks
_folders: list[RequeueFolder] = []  # of those, on rank 0


class SlurmRequeue(Callback):
    """Resume after SLURM preemption or a time limit, with the weights of an uninterrupted run (bitwise identical).

    On ``requeue_signal`` (``#SBATCH --signal=USR1@120``) and on SIGTERM (preemption), all ranks save one checkpoint at
    the end of a batch, the job is requeued, and all processes exit. The next start of the job finds the checkpoint,
    whatever ``ckpt_path`` the fit is given, and continues with the next sample and the same random numbers. A cancelled
    job saves and is not requeued. Lightning's own requeueing is disabled. Outside of SLURM only the position in the
    data is stored, in every checkpoint.

    The checkpoint is saved between two optimizer steps, at the latest the second after the signal, or within
    validation, which then runs again; ``validate``, ``test`` and ``predict`` start again. Finished fits are not
    repeated: each saves a last checkpoint at its end. Between runs and after the last one, ``requeue_signal`` does not
    end the program; the next run handles it, so all trainers of a program need this callback. After an error SIGTERM
    does not end the process either, because ``srun -K1`` sends it to all other tasks before they have logged their
    errors.

    Random augmentation in dataloader workers and metrics accumulated over the epoch restart. Batches of an
    ``IterableDataset`` are repeated, with a warning. Trials of ``LearningRateFinder`` and ``BatchSizeFinder`` are not
    interrupted, and a resumed fit uses their result.

    Args:
        dirpath: Folder for ``slurm_requeue/<job>/``, on a file system that all nodes share. ``None``: the trainer's
            ``default_root_dir``. Removed when the program has ended without an error.
        requeue_signal: Name of the signal that announces the end.
        weights_only: Whether only tensors and basic types are read from the job's checkpoint. ``None``: only if other
            users may have written it, which is impossible in the folder that this callback creates. ``False`` reads any
            class.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If ``requeue_signal`` is not a signal that a process can handle.
        MisconfigurationException: Under SLURM, if tasks were not started by ``srun`` or the job's name keeps them from
            connecting; before training, if ``dirpath`` is not one folder for all nodes, or the checkpoint there belongs
            to another user.
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
        if dirpath is not None and not isinstance(dirpath, str | Path):
            raise TypeError(f"SlurmRequeue(dirpath) must be a path or None, got {dirpath!r}.")
        if weights_only is not None:
            check_bool("SlurmRequeue(weights_only)", weights_only)
        self.dirpath = dirpath
        self.weights_only = weights_only
        self.requeue_signal = requeue_signal
        self._signals = StopSignals((signal.SIGTERM, _parse_signal(requeue_signal)))
        self._shield = DaemonShield(self._signals.signals)
        check_job(SlurmJob.from_environment())
        self._folder: RequeueFolder | None = None
        self._agreement: RankAgreement | None = None
        self._stops: StopPoints | None = None
        self._resume: ExactResume | None = None
        self._patches: list[MethodPatch] = []
        self._environment: SLURMEnvironment | None = None
        self._peers: AbstractContextManager[None] = nullcontext()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_trainer("SlurmRequeue", trainer)
        refuse_several(trainer, SlurmRequeue, "SlurmRequeue can be used once, got several. Remove all but one.")
        check_tasks(cluster_environment(trainer), trainer.num_devices, trainer.num_nodes)
        self._release()
        timeout = rank_timeout(trainer)
        self._agreement = RankAgreement(timeout)
        job = SlurmJob.from_environment()
        if stage == "fit":
            self._resume = ExactResume(trainer, self._agreement)
        if job is None or bool(getattr(trainer, "fast_dev_run", False)):
            self._signals.unblock()
            let_through()
            return
        self._peers = naming_lost_peers(
            trainer.global_rank, trainer.world_size, lambda: f"step {trainer.global_step}, after a batch"
        )
        self._replace_handlers(trainer)
        vote = StopVote(self._agreement, self._signals)
        self._stops = StopPoints(trainer, job, vote, self._peers, self._resume, partial(self._is_trial, trainer))
        leave_group_at_exit()
        if stage == "fit":
            self._set_up_fit(trainer, job, self._stops)

    def _replace_handlers(self, trainer: pl.Trainer) -> None:
        """Replace the signal handlers of Lightning, which wait for other ranks."""
        environment = cluster_environment(trainer)
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            self._environment, environment.auto_requeue = environment, False
        connector = signal_connector(trainer)
        self._patches.append(MethodPatch(connector, SIGTERM_HANDLER, replace_by(self._signals.note)))
        self._shield.raise_it()
        if not self._signals.install():
            rank_zero_warn("SlurmRequeue has no effect outside of the main thread: only that thread receives signals.")
        let_through()
        if shutil.which("scontrol") is None:
            rank_zero_warn(
                "SlurmRequeue cannot find scontrol, which requeues the job. Bind it and SLURM's configuration "
                "into the container."
            )

    def _set_up_fit(self, trainer: pl.Trainer, job: SlurmJob, stops: StopPoints) -> None:
        assert self._agreement is not None
        stops.folder = self._folder = folder = open_folder(trainer, self._agreement, self.dirpath, job, next(_fits))
        atexit.unregister(_end_program)
        if trainer.is_global_zero:
            _folders.append(folder)
        self._patches += [
            MethodPatch(checkpoint_connector(trainer), "resume_start", partial(partial, self._start, trainer, job)),
            MethodPatch(trainer.fit_loop, "run", partial(partial, self._run, trainer)),
            MethodPatch(trainer.fit_loop.epoch_loop, "advance", partial(partial, stops.advance)),
        ]

    def _start(
        self, trainer: pl.Trainer, job: SlurmJob, start: Callable[..., None], /, *args: Any, **kwargs: Any
    ) -> None:
        if self._folder is None or self._resume is None or self._resume.trials.are_undone:
            start(*args, **kwargs)
            return
        trusts = None if self.weights_only is None else not self.weights_only
        if resume_fit(trainer, job, self._folder, start, *args, trusts=trusts, **kwargs):
            self._resume.fit_has_ended = trainer.should_stop = True  # nothing is left to do

    def _run(self, trainer: pl.Trainer, run: Callable[[], None]) -> None:
        """Save a fit that has ended, for a restart of a program that has more to do."""
        run()
        if self._is_trial(trainer) or self._resume is None or self._folder is None:
            return
        if self._resume.fit_has_ended:
            self._resume.end()
        elif not trainer.fit_loop.is_resuming:  # else it was given an end, and there was nothing to do
            self._resume.fit_has_ended = True
            save_together(trainer, self._folder, self._resume)

    def _is_trial(self, trainer: pl.Trainer) -> bool:
        """Whether a tuner has taken the callbacks away, and tries something."""
        return self not in trainer.callbacks  # type: ignore[attr-defined]

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
        if self._stops is not None:
            self._stops.begin_evaluation()

    on_test_start = on_validation_start
    on_predict_start = on_validation_start

    @override
    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._stops is not None:
            self._stops.evaluate()

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
            signal_connector(trainer).teardown()  # else it would put our handlers back, which it found there
            # srun ends the other tasks of a step in which one has failed: SIGTERM would end this one while it clears
            # up, before Python says what the error was.
            self._release(has_failed=True)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if self._folder is not None and trainer.is_global_zero:
            if self._resume is not None and not self._resume.fit_has_ended:  # it was a tuner's
                self._folder.remove_checkpoint()
            atexit.register(_end_program)  # unless another fit follows, or the job is stopped
        self._release()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, such as a worker process gets of the trainer, is in no run."""
        return type(self), (self.dirpath, self.requeue_signal, self.weights_only)

    def _release(self, *, has_failed: bool = False) -> None:
        for patch in reversed(self._patches):
            patch.remove()
        if self._resume is not None:
            self._resume.remove()
        if self._environment is not None:
            self._environment.auto_requeue = True
        if self._agreement is not None:
            self._agreement.close()
        _sigterm, requeue_signal = self._signals.signals
        # Nothing is to be saved until the next run.
        self._signals.remove(harmless=self._signals.signals if has_failed else (requeue_signal,))
        self._shield.lower()
        self._patches, self._resume, self._environment, self._agreement = [], None, None, None
        self._folder, self._stops, self._peers = None, None, nullcontext()


def _end_program() -> None:
    if getattr(sys, "last_type", None) is None:  # else an error has ended it, and the job may be started again
        _remove_folders()


def _remove_folders() -> None:
    for folder in _folders:
        folder.remove()


def _parse_signal(name: str) -> signal.Signals:
    if not isinstance(name, str):
        raise TypeError(f"SlurmRequeue(requeue_signal) must be the name of a signal, got {name!r}.")
    full = name if name.startswith("SIG") else f"SIG{name}"
    if full not in signal.Signals.__members__ or full in ("SIGKILL", "SIGSTOP", "SIGTERM"):
        raise ValueError(f"SlurmRequeue(requeue_signal) must be a signal like 'SIGUSR1', got {name!r}.")
    return signal.Signals[full]
