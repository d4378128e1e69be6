"""Estimate whether a run fits a GPU you do not have. Run: python examples/estimate_memory.py."""

import torch

from lightning_vram import ActivationCheckpointing, estimate_memory
from lightning_vram.demos import ByteGPT

with torch.device("meta"):  # shapes are enough: no weights are allocated
    model = ByteGPT(num_layers=4, width=512, num_heads=8, sequence_length=512)
tokens = torch.zeros(128, 513, dtype=torch.int64)  # a batch of the data loader

configurations = {
    "baseline": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-mixed, checkpointing": {"precision": "bf16-mixed", "callbacks": [ActivationCheckpointing()]},
    "bf16-mixed, fsdp_offload": {
        "precision": "bf16-mixed",
        "callbacks": [ActivationCheckpointing()],
        "strategy": "fsdp_offload",
    },
}
for name, trainer in configurations.items():
    estimate = estimate_memory(model, tokens, device="rtx4060", trainer=trainer, find_limits=False)
    print(f"{name:>28}: {'fits' if estimate.fits else 'does not fit'}, {estimate.needed_bytes / 2**30:5.2f} GiB")
print(estimate)
estimate.plot("step.html")
print("Picture of the step: step.html")
