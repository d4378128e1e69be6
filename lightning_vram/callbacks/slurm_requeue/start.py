"""Resume the fit of a job that SLURM has started again."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_vram.callbacks.slurm_requeue.folder import RequeueFolder
from lightning_vram.callbacks.slurm_requeue.job import SlurmJob
from lightning_vram.core.processes.agreement import RankAgreement
from lightning_vram.private_names.lightning.callbacks import last_checkpoints

_WAY_OUT = "Give a folder that all nodes share: SlurmRequeue(dirpath=...), or the trainer's default_root_dir."


def open_folder(
    trainer: pl.Trainer, agreement: RankAgreement, dirpath: str | Path | None, job: SlurmJob, fit: int
) -> RequeueFolder:
    """Make the folder of the job, and check that every rank sees it. A collective: all ranks raise, or none."""
    root = str(trainer.default_root_dir if dirpath is None else dirpath)
    if "://" in root:
        raise MisconfigurationException(
            f"SlurmRequeue needs a folder that all nodes share, got default_root_dir={root!r}. "
            "Give it one: SlurmRequeue(dirpath=...)."
        )
    folder = RequeueFolder(Path(root).absolute(), job.job_id, job.step_id, fit)
    error = trainer.strategy.broadcast(folder.try_open(job.restart_count) if trainer.is_global_zero else "")
    if error:
        raise MisconfigurationException(f"SlurmRequeue cannot write to {str(folder.path)!r}: {error}. {_WAY_OUT}")
    (blind,) = agreement.largest(-1 if folder.is_open else trainer.global_rank)
    if blind >= 0:
        raise MisconfigurationException(
            f"SlurmRequeue cannot use {str(folder.path)!r}: rank {blind} does not see what rank 0 has made there. "
            + _WAY_OUT
        )
    return folder


def resume_fit(
    trainer: pl.Trainer,
    job: SlurmJob,
    folder: RequeueFolder,
    start: Callable[..., None],
    checkpoint_path: Any = None,
    *,
    trusts: bool | None,  # whether to unpickle any class; None: if no other user can have written the file
    **options: Any,
) -> bool:
    """Resume from the job's newest checkpoint, if any; returns whether the fit had ended. All ranks raise, or none."""
    found: tuple[Path | None, int | None, bool | None] = None, None, trusts
    if trainer.is_global_zero and job.restart_count > 0:
        found = _find(trainer, folder, checkpoint_path, trusts=trusts)
    newest, foreign_owner, trusts = trainer.strategy.broadcast(found)
    if newest is None:
        start(checkpoint_path, **options)
        return False
    if foreign_owner is not None:
        raise MisconfigurationException(
            f"SlurmRequeue does not load {str(newest)!r}: it belongs to user {foreign_owner}, not to you. Remove it to "
            "start anew, or use your own folder: SlurmRequeue(dirpath=...)."
        )
    has_ended = newest == folder.ended
    outcome = ": this fit has ended" if has_ended else ""
    rank_zero_info(f"SlurmRequeue: restart {job.restart_count} of job {job.job_id}{outcome}.")
    if has_ended or newest == folder.checkpoint:
        options["weights_only"] = not trusts
    elif trusts:
        options["weights_only"] = False
    try:
        start(str(newest), **options)
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(
            f"SlurmRequeue does not load {str(newest)!r}: it contains more than tensors and basic types, and "
            "other users may have written it. If you trust it: SlurmRequeue(weights_only=False), or allow its "
            "classes with torch.serialization.add_safe_globals."
        ) from error
    return has_ended


def _find(
    trainer: pl.Trainer, folder: RequeueFolder, checkpoint_path: Any, *, trusts: bool | None
) -> tuple[Path | None, int | None, bool | None]:
    """The newest checkpoint, if there is one; whose it is, if not this user's; and whether to trust it."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    savers = [one for one in callbacks if isinstance(one, ModelCheckpoint)]
    paths = [path for saver in savers for path in last_checkpoints(saver, trainer)]  # of save_last=True
    newest = folder.newest(map(Path, paths if checkpoint_path is None else [*paths, checkpoint_path]))
    if newest is None or newest not in (folder.checkpoint, folder.ended):
        return newest, None, trusts
    return newest, folder.foreign_owner(newest), folder.is_private() if trusts is None else trusts
