"""Composer's automatic micro-batching: ``Trainer(device_train_microbatch_size="auto")``.

It is a part of Composer's own Trainer, and Composer refuses the versions of PyTorch that this package runs on (0.32.1
is the last one; pip then takes 0.3.1 of 2021). It cannot be measured in the same run; the row says so.
"""

import torch

from tests.benchmarks.peers.installed import needs
from tests.benchmarks.ways import Way

PIP = "'mosaicml>=0.32'"


def _why_not(device: torch.device) -> str | None:
    why = needs("composer", PIP)(device)
    if why is not None and why.startswith("not installed"):
        return f"not installed: {PIP[1:-1]} refuses torchmetrics 1.9 and later, pip finds no set that solves"
    return why or "has a Trainer of its own, which is not measured here"


BATCHES = (Way('device_train_microbatch_size="auto"', "Composer", why_not=_why_not, pip=PIP),)
