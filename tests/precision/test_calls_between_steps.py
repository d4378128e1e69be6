"""Calls of a module in hooks, while its weights are in 16 bit."""

import lightning.pytorch as pl
import pytest
import torch
from support.helpers import LitTiny, TinyCNN, TinyGPT, describe_module
from torch import nn

from lightning_vram import LeanMixedPrecision
from lightning_vram.precision.run import PrecisionRun, Settings


class Sampling(LitTiny):
    """Runs itself and its net where no step is."""

    def forward(self, inputs):
        return self.net(inputs) * 2

    def sample(self):
        self.eval()
        with torch.no_grad():
            self.samples = [self(self.inputs), self.net(self.inputs)]
        self.train()

    def on_train_epoch_end(self):
        self.sample()

    def on_train_batch_start(self, *unused):
        self.sample()


@pytest.mark.parametrize("make", [TinyCNN, TinyGPT])
def test_a_hook_may_call_the_module(make, make_trainer):
    pl.seed_everything(0, verbose=False)
    model = Sampling(make())
    model.inputs = next(iter(model.train_dataloader()))[0]
    before = describe_module(model)
    make_trainer(plugins=[LeanMixedPrecision("bf16", parameters="bf16+split")], max_epochs=1).fit(model)
    assert describe_module(model) == before
    assert [sample.dtype for sample in model.samples] == [torch.float32] * 2
    during = model.samples
    model.sample()
    torch.testing.assert_close(during, model.samples, rtol=0.02, atol=0.05)


def test_outside_of_a_step_autocast_of_the_user_counts(make_trainer):
    net = nn.Sequential(nn.Linear(2, 2))
    trainer = make_trainer(accelerator="cpu")
    run = PrecisionRun(net, trainer, Settings(parameters="bf16+split"), is_training=True)
    with torch.autocast("cpu", torch.float16):
        assert net(torch.ones(1, 2)).dtype is torch.float16
    with run.in_step():
        assert net(torch.ones(1, 2, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert net(torch.ones(1, 2)).dtype is torch.float32  # computed in bfloat16
    run.remove()
    assert type(net) is nn.Sequential
