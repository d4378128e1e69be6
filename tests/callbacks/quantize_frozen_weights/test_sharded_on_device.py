"""``QuantizeFrozenWeights`` under ``fsdp_offload`` on an accelerator: bytes of weights rest on the host."""

import lightning.pytorch as pl
import pytest
from support.checkpoint_nets import whole
from support.devices import ACCELERATOR
from support.helpers import assert_equal_weights
from support.lora_nets import NUM_QUANTIZED, LitLoRA

from lightning_vram import ActivationCheckpointing, QuantizeFrozenWeights
from lightning_vram.core.processes import leave_group
from lightning_vram.private_names.fsdp2 import shards_integers
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy
from lightning_vram.techniques.quantize_frozen_weights import quantize_frozen_weights

pytestmark = [
    pytest.mark.device,
    pytest.mark.distributed,
    pytest.mark.skipif(not shards_integers, reason="FSDP2 shards integers as of torch 2.13"),
]


class Looking(LitLoRA):
    def on_train_batch_end(self, *_: object) -> None:
        parts = [v.to_local() for v in self.state_dict().values() if v.dtype.itemsize == 1]
        self.seen = {part.device.type for part in parts}, sum(part.untyped_storage().nbytes() for part in parts)

        frozen = [p for p in self.parameters() if not p.requires_grad]
        self.read = [(p.shape, p.data.sum().item(), whole(p).tolist(), p.to_local().device) for p in frozen]


def test_bytes_rest_on_the_host_and_the_run_is_that_of_decoded_weights(make_trainer):
    models = []
    for is_quantized in (True, False):
        pl.seed_everything(0, verbose=False)
        model = Looking()
        if not is_quantized:
            quantize_frozen_weights(model, 4).remove()
        callbacks = [ActivationCheckpointing(["net.up", "net.down"])]
        callbacks += [QuantizeFrozenWeights(4)] if is_quantized else []
        options = {"accelerator": ACCELERATOR, "devices": 1, "strategy": FSDPOffloadStrategy(min_params=100)}
        make_trainer(callbacks=callbacks, max_epochs=1, limit_val_batches=0, **options).fit(model)
        leave_group()
        models.append(model)
    assert_equal_weights(*models)
    assert models[0].read == models[1].read
    assert models[0].seen == ({"cpu"}, 0.5625 * NUM_QUANTIZED)
