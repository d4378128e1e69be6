"""See :class:`SlurmRequeue`."""

from lightning_vram.callbacks.slurm_requeue.callback import SlurmRequeue as SlurmRequeue
