"""Lean parameters on an accelerator: kernels of its own, a module that is moved, and a host beside it."""

import pytest
import torch
from support.devices import DEVICE
from support.lean_nets import EXACT, assert_same_weights, make_net
from torch.optim import AdamW

from lightning_vram.optimizers.bf16_weights import SCHEMES, LeanParameters

pytestmark = pytest.mark.device


@pytest.mark.parametrize("scheme", EXACT)
@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
def test_a_module_moved_after_conversion_steps_as_in_fp32(scheme, options):
    net, plain = make_net(), make_net().to(DEVICE)
    lean = LeanParameters(net.parameters(), scheme)
    net.to(DEVICE)
    optimizer, reference = AdamW(net.parameters(), lr=0.01, **options), AdamW(plain.parameters(), lr=0.01, **options)
    lean.attach([optimizer])
    for seed in range(10):
        for some_net, some in ((net, optimizer), (plain, reference)):
            give_gradients_on_the_device(some_net, seed)
            some.step()
    assert lean._chunks[0].rest.device.type == DEVICE
    net.cpu()  # as Lightning does before the teardown of plugins
    lean.restore()
    assert_same_weights(net, plain.cpu())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_frozen_parameters_lack_stays_on_the_host_and_a_nan_of_the_device_stays_one(scheme):
    net = make_net().to(DEVICE)
    net[0].requires_grad_(False)
    before = net[0].weight.clone()
    lean = LeanParameters(net.parameters(), scheme)
    optimizer = AdamW(net.parameters())
    lean.attach([optimizer])
    for parameter in net[1].parameters():
        parameter.grad = torch.full_like(parameter, torch.inf)
    optimizer.step()
    rests = [chunk.rest for chunk in lean._chunks if not chunk.parameters[0].requires_grad]
    assert [rest.device.type for rest in rests] == ["cpu"]
    assert net[1].weight.isnan().all()  # 0x7fffffff, which overflows when it is rounded
    lean.restore()
    assert torch.equal(net[0].weight, before)


def give_gradients_on_the_device(net, seed):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for parameter in net.parameters():
        gradient = torch.randn(parameter.shape, generator=generator, device=DEVICE).bfloat16()
        parameter.grad = gradient.to(parameter.dtype)
