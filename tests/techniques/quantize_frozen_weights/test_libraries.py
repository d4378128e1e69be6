"""``library=``: kernels of bitsandbytes decode the same bytes to the same numbers, and so does a stub."""

from types import SimpleNamespace

import pytest
import torch
from support.lora_nets import LENGTH, VOCAB_SIZE, LoRANet

from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.private_names.dispatcher import FakeTensorMode
from lightning_vram.techniques.quantize_frozen_weights import packing, quantize_frozen_weights
from lightning_vram.techniques.quantize_frozen_weights import packing as libraries
from lightning_vram.techniques.quantize_frozen_weights.packing import Packing

NF4 = torch.tensor(packing._NF4)


def by_blocks(levels, scales, block_size, dtype):
    return (levels.view(-1, block_size) * scales[:, None]).to(dtype)


def dequantize_4bit(codes, scales, block_size, quant_type, shape, dtype):
    assert (quant_type, codes.dtype, codes.is_contiguous(), scales.dtype) == ("nf4", torch.uint8, True, torch.float32)
    halves = torch.stack([codes >> 4, codes & 15], -1)
    return by_blocks(NF4[halves.long()], scales, block_size, dtype).view(shape)


def dequantize_blockwise(codes, scales, levels, block_size, dtype):
    assert (codes.dtype, codes.is_contiguous(), levels.shape) == (torch.uint8, True, (256,))
    return by_blocks(levels[codes.long()], scales, block_size, dtype)


@pytest.fixture(params=["stub", "bitsandbytes"])
def operators(request, monkeypatch):
    if request.param == "bitsandbytes":
        pytest.importorskip("bitsandbytes")
    else:
        stub = SimpleNamespace(dequantize_4bit=dequantize_4bit, dequantize_blockwise=dequantize_blockwise)
        monkeypatch.setattr(libraries, "_operators", lambda: stub)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("bits", [8, 4])
def test_a_library_decodes_to_the_same_numbers_in_as_much_memory(bits, monkeypatch):
    monkeypatch.setattr(packing, "_PART", 4096)
    for size in (32, 64, 256):
        packed = Packing(bits, size).empty(10_000, torch.device("cpu"))
        Packing(bits, size).encode(torch.randn(10_000), packed)
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            ours, theirs = (
                Packing(bits, size).decode(packed, 10_000, dtype, library) for library in ("own", "bitsandbytes")
            )
            assert torch.equal(ours, theirs)
    tokens, found = torch.randint(VOCAB_SIZE, (4, LENGTH)), []
    for library in ("own", "bitsandbytes"):
        torch.manual_seed(0)
        model = LoRANet()
        quantize_frozen_weights(model, bits, library=library)
        with track_memory(model) as tracker:
            model(tokens).square().sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
        found.append((gradients, tracker.timeline.peak_bytes))
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[1][1] <= found[0][1] + 8 * 4096  # of a part


@pytest.mark.parametrize(
    ("device", "bits", "block_size", "is_installed", "is_theirs"),
    [
        ("cuda", 4, 64, True, True),
        ("cuda", 8, 4096, True, True),
        ("cuda", 4, 16, True, False),
        ("cuda", 4, 64, False, False),
        ("cpu", 4, 1024, True, True),
        ("cpu", 4, 2048, True, False),
        ("cpu", 8, 64, True, False),
        ("mps", 4, 64, True, False),
    ],
)
def test_auto_is_bitsandbytes_where_it_is_installed_and_faster(
    device, bits, block_size, is_installed, is_theirs, monkeypatch
):
    monkeypatch.setattr(libraries, "_operators", lambda: object() if is_installed else None)
    packed = SimpleNamespace(is_cuda=device == "cuda", device=torch.device(device))
    assert libraries.decodes_by_library("auto", bits, block_size, packed, torch.bfloat16) is is_theirs
    assert not libraries.decodes_by_library("own", bits, block_size, packed, torch.bfloat16)
    assert libraries.decodes_by_library("bitsandbytes", bits, block_size, packed, torch.bfloat16)
    assert not libraries.decodes_by_library("bitsandbytes", bits, block_size, packed, torch.float64)


def test_an_estimate_needs_no_library():
    with FakeTensorMode():
        packed = Packing(4, 64).empty(4096, torch.device("cpu"))
        assert Packing(4, 64).decode(packed, 4096, torch.float32, "bitsandbytes").shape == (4096,)
