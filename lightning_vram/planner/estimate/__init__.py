"""Will it fit: the peak of a training step, activations included, for any LightningModule, without a GPU."""
