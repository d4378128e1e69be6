"""``host_state`` and ``master`` with an accelerator: the same bits, and what they take of the host."""

from functools import partial
from typing import Any

import pytest
import torch
from support.devices import ACCELERATOR
from support.helpers import assert_equal_weights
from support.host_layers import Layers, exceptions, host_bytes
from torch import Tensor, nn

from lightning_vram.private_names.fsdp2 import local_shard

pytestmark = [pytest.mark.device, pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
FORMS = ("bf16", "8bit")


@pytest.fixture
def train(fit_layers: Any) -> Any:
    return partial(fit_layers, accelerator=ACCELERATOR, devices=1)


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.01}, {"accumulate_grad_batches": 2}])
@pytest.mark.parametrize("form", FORMS)
def test_how_weights_and_states_are_kept_changes_no_bit(form, options, train, tmp_path):
    make = partial(Layers, num_batches=8)
    expected = train(make, {"host_state": form}, **options)
    for more in ({"master": "split"}, {"offload": "optimizer"}, {"master": "split", "nvme_path": tmp_path}):
        assert_equal_weights(train(make, {"host_state": form, **more}, **options), expected)


class Counted(Layers):
    """Counts the bytes of the host, and looks where moments are."""

    def __init__(self) -> None:
        super().__init__(num_batches=6)
        self.base = nn.Linear(16, 16, bias=False).requires_grad_(requires_grad=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.base(batch), batch_idx)

    def on_train_batch_end(self, *unused: Any) -> None:
        self.host_bytes.append(host_bytes(self) - exceptions(self))
        states = self.trainer.optimizers[0].state.values()
        moments = [local_shard(state[key]) for state in states for key in ("exp_avg", "exp_avg_sq")]
        self.kinds = {(value.dtype, value.device.type) for value in moments}


@pytest.mark.parametrize(
    ("form", "master", "most"),
    [
        ("fp32", "fp32", 18),
        ("fp32", "split", 14),
        ("bf16", "fp32", 14),
        ("bf16", "split", 10),
        ("8bit", "split", 8.3),
        ("4bit", "split", 7.3),
    ],
)
def test_a_weight_takes_as_many_bytes_of_the_host_and_four_if_it_is_frozen(form, master, most, train):
    model = train(Counted, {"host_state": form, "master": master})
    num_bytes = model.host_bytes[-1] - 4 * model.base.weight.numel()
    num_weights = sum(p.numel() for p in model.net.parameters())
    assert num_bytes <= most * num_weights
    assert "bit" in form or num_bytes == most * num_weights
    assert model.kinds == {(torch.bfloat16 if form == "bf16" else torch.float32, "cpu")}
