"""See where the bytes of a training step go, without a GPU or a Trainer. Run: python examples/track_memory.py."""

import torch
from torch import nn

from lightning_vram import track_memory
from lightning_vram.memory.units import format_bytes

model = nn.TransformerEncoderLayer(d_model=128, nhead=4, batch_first=True)
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.randn(8, 64, 128)

for _ in range(2):  # the second step holds the optimizer's state from the beginning
    with track_memory(model, optimizers=[optimizer], inputs=batch) as tracker:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

timeline = tracker.timeline
print(f"peak {format_bytes(timeline.peak_bytes)}, made by {timeline.peak_op}")
print(f"saved for backward {format_bytes(timeline.saved_for_backward_bytes)}")
for category, num_bytes in timeline.peak_by_category.items():
    print(f"{category:>16} {format_bytes(num_bytes)}")
