"""Weights that a module computes from its parameters, under lean parameters."""

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader

from lightning_vram import LeanMixedPrecision

OLD = pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
COMPUTED = {
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="matrix_exp"),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
    "old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(8, 8)),
    "old weight_norm": lambda: nn.utils.weight_norm(nn.Linear(8, 8)),
    "one of the weights of an LSTM": lambda: parametrizations.weight_norm(nn.LSTM(8, 8), "weight_hh_l0"),
}


class Around(pl.LightningModule):
    """Steps on the same samples again and again."""

    def __init__(self, layer):
        super().__init__()
        self.first, self.layer = nn.Linear(8, 8), layer

    def training_step(self, batch, batch_idx):
        self.dtypes = {name: parameter.dtype for name, parameter in self.named_parameters()}
        output = self.layer(self.first(batch))
        return (output[0] if isinstance(output, tuple) else output).float().square().mean()

    def train_dataloader(self):
        return DataLoader(torch.linspace(-1, 1, 96).view(12, 8).to(self.first.weight.dtype), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


@OLD
@pytest.mark.parametrize("make_layer", COMPUTED.values(), ids=COMPUTED)
def test_they_are_computed_in_fp32_and_trained_as_with_fp32_parameters(make_layer, same_as_baseline):
    plugins = [LeanMixedPrecision("bf16", parameters=parameters) for parameters in ("bf16+split", "fp32")]
    # Rounding is another where a gradient is summed in bf16 for a lean parameter.
    options = {"plugins": plugins[:1], "baseline": {"plugins": plugins[1:]}, "tolerance": 0.005}
    lean, _ = same_as_baseline(lambda: Around(make_layer()), max_epochs=2, **options)
    assert {dtype for name, dtype in lean.dtypes.items() if name.startswith("layer.")} == {torch.float32}
    assert {dtype for name, dtype in lean.dtypes.items() if name.startswith("first.")} == {torch.bfloat16}


class Halves(Around):
    """bf16 already, its norm included."""

    def __init__(self):
        super().__init__(nn.LayerNorm(8))
        self.bfloat16()

    def configure_optimizers(self):
        return torch.optim.SGD(self.layer.parameters(), lr=2.0**-9)  # moves the gains by less than half a unit

    def on_train_end(self):
        self.gains = self.trainer.strategy.lightning_module_state_dict()["layer.weight"]


def test_a_norm_that_is_bf16_already_loses_no_updates(fit):
    model = fit(Halves, plugins=[LeanMixedPrecision("bf16", parameters="bf16+split")])
    assert (model.dtypes["layer.weight"], model.gains.dtype) == (torch.bfloat16, torch.float32)
    assert (model.gains != 1).all()
