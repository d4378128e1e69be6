"""Will it fit: the peak of a training step, activations included, for any LightningModule, without a GPU."""

from lightning_vram.estimation.estimate import estimate_memory as estimate_memory
