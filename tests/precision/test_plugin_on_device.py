"""The plugin on an accelerator: its autocast has other lists than the host's, and fused optimizers other kernels."""

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from support.devices import ACCELERATOR, DEVICE, allocate_workspaces, device_module, requested_bytes
from support.helpers import LitLinear, LitTiny, TinyCNN, TinyGPT

from lightning_vram import LeanMixedPrecision
from lightning_vram.demos import ByteGPT
from lightning_vram.techniques.mixed_precision.weight_casts import WeightCasts

pytestmark = pytest.mark.device


class Fused(LitTiny):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


ON_DEVICE = {"accelerator": ACCELERATOR, "devices": 1}


@pytest.mark.parametrize(("precision", "net"), [("bf16-mixed", TinyGPT), ("16-mixed", TinyCNN)])
def test_results_are_those_of_lightning_to_the_bit(precision, net, same_as_baseline):
    plugin = LeanMixedPrecision(precision, recast_in_backward=True)
    baseline = {"plugins": [MixedPrecision(precision, DEVICE)]}
    options = {"gradient_clip_val": 0.1, "max_epochs": 2, **ON_DEVICE}
    same_as_baseline(lambda: LitTiny(net()), plugins=[plugin], baseline=baseline, **options)


def test_a_fused_optimizer_is_clipped_and_skips_overflows(fit):
    plugin = LeanMixedPrecision("fp16", scaler=torch.amp.GradScaler(DEVICE, init_scale=2.0**30))
    model = fit(lambda: Fused(TinyGPT()), plugins=[plugin], gradient_clip_val=0.1, max_epochs=8, **ON_DEVICE)
    assert 0 < plugin.overflow_steps < 24
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_auto_is_bf16_where_the_hardware_has_it(fit):
    plugin = LeanMixedPrecision("auto")
    fit(lambda: LitTiny(TinyGPT()), plugins=[plugin], **ON_DEVICE)
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


def test_exact_schemes_agree_on_the_same_gradients(same_as_baseline):
    split, master = (LeanMixedPrecision("bf16", parameters=name) for name in ("bf16+split", "bf16+master"))
    same_as_baseline(lambda: LitLinear(TinyGPT()), plugins=[split], baseline={"plugins": [master]}, **ON_DEVICE)
