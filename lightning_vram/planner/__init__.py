"""Which parts, and will it fit: runs a Trainer's whole step on tensors without memory, on a card that is not there."""
