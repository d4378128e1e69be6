"""Lightning and torchmetrics."""
