"""Language models, and ways to train them, for losses in chunks and tokens in tiles."""

from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from support.helpers import Forking, ForkingOffload, LitManual, LitTiny
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_vram import ActivationCheckpointing, ActivationOffload, LeanMixedPrecision, MicroBatching


class Lit(LitTiny):
    """Steps by SGD: Adam makes much of gradients that are zero but for rounding."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(LitManual):
    """The same, in manual optimization."""

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        halves = list(self.net.parameters())
        return [torch.optim.SGD(half, lr=0.1) for half in (halves[::2], halves[1::2])]


class Sharded(Lit):
    """A network that is sharded in layers."""

    def layers(self) -> list[nn.Module]:
        return [*self.net.blocks, self.net.head]

    def configure_model(self) -> None:
        if not hasattr(self, "is_sharded"):
            self.is_sharded = True
            for layer in (*self.layers(), self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def state_dict(self, **options: Any) -> Any:
        return {
            name: getattr(value, "full_tensor", lambda value=value: value)()
            for name, value in super().state_dict(**options).items()
        }


MODES = {
    "accumulation and clipping": lambda: {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "bf16": lambda: {"precision": "bf16-mixed"},
    "fp16 with a scaler": lambda: {"plugins": [MixedPrecision("16-mixed", "cpu")]},
    "lean": lambda: {"plugins": [LeanMixedPrecision("bf16", recast_in_backward=True)]},
    "micro-batches": lambda: {"callbacks": [MicroBatching(2)]},
    "checkpointing and offload": lambda: {"callbacks": [ActivationCheckpointing(), ActivationOffload("64B")]},
}


IN_16_BITS = {"bf16", "fp16 with a scaler", "lean"}


STRATEGIES = {"ddp": (Lit, lambda: "ddp_fork"), "fsdp2": (Sharded, Forking), "fsdp_offload": (Lit, ForkingOffload)}
