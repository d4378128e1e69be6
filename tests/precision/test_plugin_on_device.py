"""The plugin on an accelerator: its autocast has other lists than the host's, and fused optimizers other kernels."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from support.devices import ACCELERATOR, DEVICE, allocate_workspaces, device_module, requested_bytes
from support.helpers import LitTiny, TinyCNN, TinyGPT, assert_equal_weights

from lightning_vram import LeanMixedPrecision
from lightning_vram.demos import ByteGPT
from lightning_vram.techniques.mixed_precision.module_precision import keep_norms_low
from lightning_vram.techniques.mixed_precision.weight_casts import WeightCasts

pytestmark = pytest.mark.device


class Fused(LitTiny):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def fit(plugin, make_trainer, net=TinyGPT, module=LitTiny, **options):
    pl.seed_everything(0, verbose=False)
    model = module(net())
    make_trainer(accelerator=ACCELERATOR, devices=1, plugins=[plugin], **options).fit(model)
    return model


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("net", [TinyCNN, TinyGPT])
def test_results_are_those_of_lightning_to_the_bit(precision, net, make_trainer):
    options = {"net": net, "gradient_clip_val": 0.1}
    plain = fit(MixedPrecision(precision, DEVICE), make_trainer, **options)
    for recasts in (False, True):
        plugin = LeanMixedPrecision(precision, recast_in_backward=recasts)
        assert_equal_weights(fit(plugin, make_trainer, **options), plain)


def test_a_fused_optimizer_is_clipped_and_skips_overflows(make_trainer):
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**30)
    plugin = LeanMixedPrecision("fp16", scaler=scaler)
    model = fit(plugin, make_trainer, module=Fused, gradient_clip_val=0.1, max_epochs=8)
    assert 0 < plugin.overflow_steps < 24
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("module", [LitTiny, Fused])
@pytest.mark.parametrize("parameters", ["bf16+master", "bf16+split", "bf16+kahan", "bf16+stochastic"])
def test_lean_parameters_train(parameters, module, make_trainer):
    plugin = LeanMixedPrecision("bf16", parameters=parameters, low_precision_norms=True)
    model = fit(plugin, make_trainer, module=module)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_auto_is_bf16_where_the_hardware_has_it(make_trainer):
    plugin = LeanMixedPrecision("auto")
    fit(plugin, make_trainer)
    assert (plugin.precision == "bf16-mixed") is device_module().is_bf16_supported(including_emulation=False)


def requested_after_forward(change):
    torch.manual_seed(0)
    model = ByteGPT(4, 256, 4, 256, dropout=0.0).to(DEVICE)
    tokens = torch.randint(256, (4, 256), device=DEVICE)
    change(model)
    allocate_workspaces()
    before = requested_bytes()
    with torch.autocast(DEVICE, torch.bfloat16, cache_enabled=False):
        output = model(tokens)
    requested = requested_bytes() - before
    num_weights = sum(layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    assert output.requires_grad
    return requested, num_weights


def test_recasting_keeps_no_copies_of_weights():
    plain, num_weights = requested_after_forward(lambda model: None)
    saving, _ = requested_after_forward(lambda model: WeightCasts(model, DEVICE))
    assert plain - saving == pytest.approx(2 * num_weights, rel=0.02)  # biases are cast as well


def test_low_precision_norms_save_four_bytes_per_block_and_element():
    plain, _ = requested_after_forward(lambda model: None)
    saving, _ = requested_after_forward(lambda model: keep_norms_low(model, DEVICE))
    num_elements = 4 * 256 * 256
    assert plain - saving >= 4 * 4 * num_elements  # four blocks, and the last norm
