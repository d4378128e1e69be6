"""Accelerate's FSDP2 with its weights on the host, as ``accelerate launch`` sets it up for one process."""

import importlib
import os
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tests.benchmarks.peers.installed import needs
from tests.benchmarks.peers.layers import layers_of
from tests.benchmarks.ways import Way

PIP = "accelerate"
_ONE_PROCESS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "ACCELERATE_USE_FSDP": "true",
}


def _offload(model: nn.Module) -> None:
    """Shard in place; the optimizer is made of the sharded parameters, as in a loop of one's own."""
    module: Any = importlib.import_module("accelerate")
    plugin = module.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        cpu_offload=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=sorted({type(layer).__name__ for layer in layers_of(model)}),
        activation_checkpointing=True,
    )
    with patch.dict(os.environ, _ONE_PROCESS):
        accelerator = module.Accelerator(fsdp_plugin=plugin)
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


OFFLOAD = (Way("FSDP2, cpu_offload, checkpointed", "Accelerate", _offload, why_not=needs("accelerate", PIP), pip=PIP),)
