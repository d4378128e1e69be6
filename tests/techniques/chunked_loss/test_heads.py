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


def test_a_head_can_be_named():
    assert list(find_heads(nn.ModuleList([Net(), Net()]), "0.head")) == ["0.head"]
    assert list(find_heads(nn.Sequential(nn.Linear(2, 2)), nn.Linear)) == ["0"]


class Cosine(nn.Linear):
    """Computes something else."""

    def forward(self, hidden):
        return nn.functional.linear(hidden, nn.functional.normalize(self.weight))


def with_head(kind):
    net = Net()
    net.head = kind(8, 60)
    if kind is nn.Linear:
        net.head.forward = lambda hidden: nn.Linear.forward(net.head, hidden) * 2
    return net


NAME_IT = r"Name it: ChunkedLoss\(heads='net\.head'\), as in named_modules\(\)\.$"
OWN = (
    r" cannot be a head: it has its own forward, and chunks are computed as in nn\.Linear\. Leave out ChunkedLoss, or "
    r"name other heads\.$"
)


@pytest.mark.parametrize(
    ("make", "heads", "message"),
    [
        (
            lambda: DigitsResNet((1,), 4),
            "auto",
            rf"^No head found: no nn\.Linear has as many outputs as an nn\.Embedding has entries\. {NAME_IT}",
        ),
        (Net, "embed", rf"^embed \(Embedding\) cannot be a head: only nn\.Linear can\. {NAME_IT}"),
        (lambda: with_head(Cosine), "auto", rf"^head \(Cosine\){OWN}"),
        (lambda: with_head(nn.Linear), "head", rf"^head \(Linear\){OWN}"),
        (Net, "none", r"^heads='none' matches no module or class of Net\."),
    ],
    ids=["no head", "embedding", "own class", "own forward", "no name"],
)
def test_what_is_no_head_is_refused(make, heads, message):
    with pytest.raises(ValueError, match=message):
        find_heads(make(), heads)


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
