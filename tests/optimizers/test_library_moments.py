"""Moments as torchao and bitsandbytes store them: float32 tensors of codes by a map, and which optimizers have them."""

import pickle
from functools import partial

import pytest
import torch
from torch.optim import AdamW

from lightning_vram.optimizers import library_moments
from lightning_vram.optimizers.library_moments import CodeMap, MappedTensor, empty_mapped, form_of
from lightning_vram.optimizers.moment_forms import FORMS
from lightning_vram.private_names.dispatcher import FakeTensorMode


@pytest.mark.parametrize(("size", "num_bytes"), [(256, 5000 + 4 * 40), (16, 2500 + 4 * 40)])
@pytest.mark.parametrize("is_positive", [False, True])
def test_what_a_kernel_has_written_is_written_again_to_the_same_values(is_positive, size, num_bytes):
    generator = torch.Generator().manual_seed(0)
    values = torch.linspace(0.01 if is_positive else -0.9929687, 1, size)
    if not is_positive:
        values[values.abs().argmin()] = 0  # of which the missing end of the last block is made
    made = empty_mapped(torch.empty(50, 100), CodeMap(values, 128))
    assert (made.bits, made.is_positive, made.nbytes) == (8 if size == 256 else 4, is_positive, num_bytes)
    assert not made.any()
    numbers = torch.randn(40, 128, generator=generator) * 10 ** torch.randn(40, 1, generator=generator)
    numbers = numbers.abs() if is_positive else numbers
    numbers.view(-1)[5000:] = 0
    made.scales.copy_(numbers.abs().amax(1))
    codes = (numbers / made.scales.view(-1, 1)).flatten()[:5000].view(-1, 1).sub(values).abs().argmin(1)
    made.records.copy_(codes[::2] << 4 | codes[1::2] if size == 16 else codes)
    read = made.decode()
    assert (read.flatten() - numbers.flatten()[:5000]).abs().max() < numbers.abs().max() * 2 / size
    again = empty_mapped(made, made.code_map)
    again.copy_(read)
    assert torch.equal(again.decode(), read)
    assert isinstance(again.clone(), MappedTensor)
    copied = pickle.loads(pickle.dumps(again))
    assert type(copied) is torch.Tensor
    assert torch.equal(copied, read)


@pytest.mark.parametrize(
    ("installed", "bits", "optimizer", "chosen"),
    [
        (["torchao", "bitsandbytes"], 8, AdamW, "bitsandbytes"),
        (["torchao", "bitsandbytes"], 4, AdamW, "torchao"),
        (["torchao"], 8, AdamW, "torchao"),
        (["torchao", "bitsandbytes"], 8, partial(AdamW, fused=True), "own"),
        (["bitsandbytes"], 4, AdamW, "own"),
        ([], 8, AdamW, "own"),
    ],
)
def test_on_cuda_auto_is_what_is_installed_and_can(installed, bits, optimizer, chosen, monkeypatch):
    class OnCuda(torch.nn.Parameter):
        device = torch.device("cuda")

    monkeypatch.setattr(library_moments, "find_spec", lambda name: name if name in installed else None)
    one = optimizer([torch.nn.Parameter(torch.ones(2))])
    monkeypatch.setattr(library_moments.rounds, "iterate_parameters", lambda optimizer: [OnCuda(torch.ones(2))])
    form = form_of("auto", FORMS[f"{bits}bit"], one)
    assert getattr(form, "library", "own") == chosen
    assert form.bits == bits


@pytest.mark.parametrize("library", ["torchao", "bitsandbytes", "auto"])
def test_an_estimate_for_cuda_has_our_own_moments(library, monkeypatch):
    monkeypatch.setattr(library_moments, "find_spec", lambda name: name)
    with FakeTensorMode():
        optimizer = AdamW([torch.nn.Parameter(torch.ones(2, device="cuda"))])
    assert form_of(library, FORMS["8bit"], optimizer) is FORMS["8bit"]
