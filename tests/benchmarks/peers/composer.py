"""Composer's automatic micro-batching: ``Trainer(device_train_microbatch_size="auto")``.

It is a part of Composer's own Trainer, and cannot be installed beside this package: 0.32.1 needs
``torchmetrics<1.7.5``. Without a version named pip takes 0.3.1, which does not import. It is not measured; the row says
so.
"""

import torch

from tests.benchmarks.peers.installed import needs
from tests.benchmarks.ways import Way

PIP = "'mosaicml>=0.32'"


def _why_not(device: torch.device) -> str | None:
    why = needs("composer", PIP)(device)
    if why is not None and why.startswith("not installed"):
        return "not installed: mosaicml 0.32 needs torchmetrics<1.7.5, this package 1.9 or later"
    return why or "has a Trainer of its own, which is not measured here"


BATCHES = (Way('device_train_microbatch_size="auto"', "Composer", why_not=_why_not, pip=PIP),)
