"""How much more than it has in tensors the allocator takes, where each batch has another length.

``python -m tests.benchmarks.gpu_day.fragmentation cuda`` prints a row as JSON. Segments that expand are a setting of
the process: ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``.
"""

import json
import sys

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_vram.demos import ByteGPT
from lightning_vram.memory.device.accelerators import has_expandable_segments
from tests.benchmarks.gpu_day.items import open_device
from tests.benchmarks.measure import Row, read_peaks
from tests.benchmarks.whole_runs import trainer_options

_SHORTEST = 64


class _Lengths(Dataset[Tensor]):
    """Batches of random lengths, the same in each run."""

    def __init__(self, num_batches: int, batch_size: int, longest: int) -> None:
        self._shape = num_batches, batch_size, longest

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, index: int) -> Tensor:
        _, batch_size, longest = self._shape
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(min(_SHORTEST, longest), longest + 1, (), generator=generator))
        return torch.randint(256, (batch_size, length + 1), generator=generator)


class _LitGPT(ByteGPT):
    validation_step = pl.LightningModule.validation_step


def measure(device: torch.device, *, is_tiny: bool) -> Row:
    """Train, and return peaks.

    Args:
        device: Of the model.
        is_tiny: A toy that walks the same way.
    """
    num_batches, batch_size, longest = (20, 4, 64) if is_tiny else (500, 16, 1024)
    model = _LitGPT(2, 32, 4, longest) if is_tiny else _LitGPT(12, 768, 12, longest)
    options = trainer_options(device) | {"max_epochs": 1, "precision": "32-true" if is_tiny else "bf16-mixed"}
    pl.Trainer(**options).fit(model, DataLoader(_Lengths(num_batches, batch_size, longest), batch_size=None))
    row = read_peaks(device)
    allocated, reserved = (row.get(f"max_memory_{kind}_bytes", 0) for kind in ("allocated", "reserved"))
    return {
        **row,
        "reserved_of_allocated": reserved / allocated if allocated else None,
        "expands": has_expandable_segments(),
    }


if __name__ == "__main__":
    print(json.dumps(measure(open_device(sys.argv[1]), is_tiny="tiny" in sys.argv[2:])))
