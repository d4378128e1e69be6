"""Which layers make logits."""

import pytest
import torch
from torch import nn

from lightning_vram.demos import ByteGPT, DigitsResNet
from lightning_vram.techniques.chunked_loss.apply import apply_chunked_loss, find_heads
from lightning_vram.techniques.chunked_loss.lazy_logits import find_chunk_rows
from tests.techniques.chunked_loss.spellings import Net


def test_a_head_has_as_many_results_as_the_embedding_has_entries():
    model = ByteGPT(2, 16, 2, 32)
    (name,) = find_heads(model)
    assert model.get_submodule(name).out_features == 256
    assert list(find_heads(nn.ModuleList([Net(), Net()]))) == ["0.head", "1.head"]


def test_layers_as_wide_as_the_vocabulary_or_the_positions_are_none():
    assert list(find_heads(ByteGPT(num_layers=2, width=64, sequence_length=64))) == ["net.head"]


def test_a_head_can_be_named():
    assert list(find_heads(nn.ModuleList([Net(), Net()]), "0.head")) == ["0.head"]
    assert list(find_heads(nn.Sequential(nn.Linear(2, 2)), nn.Linear)) == ["0"]


def test_a_model_without_a_head_is_refused():
    with pytest.raises(
        ValueError,
        match=r"^No head found: no nn\.Linear has as many outputs as an nn\.Embedding has entries\. Name it: "
        r"ChunkedLoss\(heads='net\.head'\), as in named_modules\(\)\.$",
    ):
        find_heads(DigitsResNet((1,), 4))


def test_what_is_no_linear_layer_is_refused():
    with pytest.raises(
        ValueError,
        match=r"^embed \(Embedding\) cannot be a head: only nn\.Linear can\. Name it: "
        r"ChunkedLoss\(heads='net\.head'\), as in named_modules\(\)\.$",
    ):
        find_heads(Net(), "embed")


class Cosine(nn.Linear):
    """Computes something else."""

    def forward(self, hidden):
        return nn.functional.linear(hidden, nn.functional.normalize(self.weight))


@pytest.mark.parametrize("heads", ["auto", "head"])
@pytest.mark.parametrize("kind", [Cosine, nn.Linear])
def test_what_does_not_compute_as_linear_layers_do_is_refused(heads, kind):
    net = Net()
    net.head = kind(8, 60)
    if kind is nn.Linear:
        net.head.forward = lambda hidden: nn.Linear.forward(net.head, hidden) * 2
    with pytest.raises(
        ValueError,
        match=rf"^head \({kind.__name__}\) cannot be a head: it has its own forward, and chunks are computed as "
        r"in nn\.Linear\. Leave out ChunkedLoss, or name other heads\.$",
    ):
        find_heads(net, heads)
    with pytest.raises(ValueError, match=r"^heads='none' matches no module or class of Net\."):
        find_heads(net, "none")


def test_a_head_is_taken_once():
    net = Net()
    apply_chunked_loss(net)
    with pytest.raises(ValueError, match=r"^module Linear cannot be changed: it already was\.$"):
        apply_chunked_loss(net)


@pytest.mark.parametrize(
    ("chunk", "num_rows", "width", "num_classes", "rows"),
    [
        (10, 4096, 64, 64, 10),
        ("auto", 16384, 2048, 248320, 256),  # 135 make as many logits as hidden numbers
        ("auto", 16384, 4096, 128256, 1024),  # 523
        ("auto", 8, 64, 64, 128),
    ],
)
def test_a_chunk_of_logits_is_as_large_as_the_hidden_states(chunk, num_rows, width, num_classes, rows):
    hidden = torch.empty(num_rows, width, device="meta" if rows != 128 else "cpu")
    assert find_chunk_rows(chunk, hidden, num_rows, num_classes) == rows
