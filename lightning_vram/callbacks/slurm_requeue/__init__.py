"""See :class:`SlurmRequeue`."""

from lightning_vram.callbacks.slurm_requeue.callback import SlurmRequeue
from lightning_vram.callbacks.slurm_requeue.job import SlurmJob, check_job, check_tasks

__all__ = ["SlurmJob", "SlurmRequeue", "check_job", "check_tasks"]
