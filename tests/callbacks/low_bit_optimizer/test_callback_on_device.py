"""Moments in low bits on a device: they stay there, and come to the host in checkpoints and after the fit."""

from functools import partial
from typing import Any

import pytest
import torch
from support.devices import ACCELERATOR
from support.helpers import assert_equal_weights
from support.host_layers import Layers

from lightning_vram import LowBitOptimizer
from lightning_vram.core.tensors.codecs import LowBitTensor

pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::UserWarning")]


class Looking(Layers):
    def on_train_batch_end(self, *unused: Any) -> None:
        values = [value for state in self.trainer.optimizers[0].state.values() for value in state.values()]
        self.places = {one.records.device.type for one in values if isinstance(one, LowBitTensor)}
        self.others = {one.device.type for one in values if one.dim()}


def test_states_stay_on_the_device_and_a_resumed_run_has_the_same_bits(fit: Any, tmp_path: Any):
    options = {"accelerator": ACCELERATOR, "devices": 1}
    train = partial(fit, partial(Looking, num_batches=6), LowBitOptimizer(4), **options)
    path, model = tmp_path / "last.ckpt", train()
    trainer = model.trainer
    trainer.save_checkpoint(path)
    assert model.places == {torch.accelerator.current_accelerator().type} == model.others
    after = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
    assert {getattr(value, "records", value).device.type for value in after} == {"cpu"}
    saved = torch.load(path, weights_only=True)["optimizer_states"][0]["state"].values()
    assert {(type(state["exp_avg"]), state["exp_avg"].device.type) for state in saved} == {(torch.Tensor, "cpu")}
    assert_equal_weights(train(ckpt_path=path, max_epochs=2), train(max_epochs=2))
