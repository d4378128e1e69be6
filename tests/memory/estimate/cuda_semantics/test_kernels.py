"""What CUDA's kernels keep, and take for a moment, worked out by hand."""

import pytest
import torch
from torch import nn

from lightning_vram.memory.estimate.cuda_kernels import Processors, Scratch, reduction_buffers
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.tracking.tracker import track_memory


def saved_bytes(run):
    with track_memory() as tracker:
        result = run()
    assert result is not None
    return tracker.timeline.on("lazy:0").saved_for_backward_bytes


# Four steps of three samples, five features in, eight hidden.
@pytest.mark.parametrize(
    ("kind", "num_layers", "directions", "reserve"),
    [
        (nn.LSTM, 4, 1, 12 * 8 * (4 * 5 + 3)),
        (nn.GRU, 4, 1, 12 * 8 * (4 * 6 + 3)),
        (nn.LSTM, 2, 2, 2 * 12 * 8 * (2 * 5 + 1)),
        (nn.RNN, 1, 1, 12 * 8),
    ],
)
def test_recurrent_layers_keep_results_ends_and_cudnns_reserve(card, kind, num_layers, directions, reserve):
    notes = card()
    layers = kind(5, 8, num_layers, bidirectional=directions == 2, device="cuda")
    x = torch.empty(4, 3, 5, device="cuda", requires_grad=True)
    ends = num_layers * directions * 3 * 8
    num_states = 2 if kind is nn.LSTM else 1
    numbers = 12 * 8 * directions + 2 * ends * num_states + reserve  # the module makes zeros to begin with
    assert saved_bytes(lambda: layers(x)) == 4 * numbers
    layers(x)[0].sum().backward()
    assert layers.weight_hh_l0.grad.shape == layers.weight_hh_l0.shape
    assert list(notes) == ["nn.LSTM, nn.GRU, nn.RNN: memory that cuDNN saves for backward is a rough estimate."]


A100 = Processors(108, 2048)
CARD = DeviceSpec("mine", 2**30, capability=(8, 0), num_multiprocessors=108)


@pytest.mark.parametrize(("width", "num_bytes"), [(256, 8_388_608), (768, 25_165_824), (1024, 33_554_432)])
def test_the_gradient_of_a_bias_takes_what_the_allocator_recorded(width, num_bytes):
    # 4096 rows; 64 blocks for each output, of 32 threads with 4 outputs each: 256 * 64 * 32 * 4 sums of 4 bytes
    x = torch.empty(4096, width, device="meta")
    assert reduction_buffers(x, [0], 4, A100)[0] == num_bytes


@pytest.mark.parametrize("shape", [(8, 64), (0, 64), (1, 1), (4096, 300_000)])
def test_what_one_block_sums_takes_nothing(shape):
    assert reduction_buffers(torch.empty(shape, device="meta"), [0], 4, A100) == ()


def test_sums_of_all_are_one_number_of_each_block():
    # 2**20 numbers, loaded by 4: 512 threads, 2048 numbers each; 108 processors run 4 such blocks, 128 are enough
    assert reduction_buffers(torch.empty(2**20, device="meta"), [], 4, A100) == (4 * 128, 4)


def test_attention_s_backward_takes_sums_of_its_rows():
    told = []
    q = torch.empty(16, 4, 256, 64, device="meta")
    rows = torch.empty(16, 4, 256, device="meta")
    seed = torch.empty((), dtype=torch.int64, device="meta")
    with Scratch(CARD, torch.device("meta"), lambda op, device, sizes: told.append(sizes)):
        torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            q, q, q, q, None, q, rows, seed, seed, 0.0, [True, True, True, False], True
        )
    product, sums = told
    assert product == (q.numel() * 4,)
    assert sums == (16 * 4 * 256 * 4, 4_198_400)  # 64 heads, 4 tiles of 64 x 64 numbers with 16 bytes each


def scratch_of(run):
    told = []
    with Scratch(CARD, torch.device("cpu"), lambda op, device, sizes: told.append(sizes)):
        run()
    return told


def test_a_mask_becomes_the_places_that_it_selects():
    x, mask = torch.zeros(4, 6, 16), torch.arange(24).view(4, 6) % 3 == 0
    assert scratch_of(lambda: x[mask]) == [(8 * 2 * 8,)]  # 8 places of two numbers
    assert scratch_of(lambda: x[:, mask[0]]) == [(2 * 8,)]
    assert scratch_of(lambda: x[torch.arange(3)]) == [(0,)]  # they are places


def test_gradients_that_are_added_at_places_are_sorted():
    x, mask = torch.zeros(4, 6, 16), torch.arange(24).view(4, 6) % 3 == 0
    values = torch.ones(8, 16)
    assert scratch_of(lambda: x.index_put_((mask,), values, accumulate=True)) == [(8 * 2 * 8, *6 * (8 * 8,))]
    assert scratch_of(lambda: x.index_put_((mask,), values)) == []
