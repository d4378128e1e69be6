"""What is noted about results is true, and is not believed after a write."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_vram.techniques.activation_compression.value_notes import ValueNotes

POOLED = torch.randn(2, 3, 12, 10)
POOLED_3D = torch.randn(2, 3, 6, 4, 5)
SORTED = torch.randn(30, 7)

INDICES = {
    "max_pool1d": (lambda: F.max_pool1d(POOLED[0].requires_grad_(), 2, return_indices=True), 9),
    "max_pool2d": (lambda: F.max_pool2d(POOLED, 2, return_indices=True), 119),
    "max_pool2d padded": (lambda: F.max_pool2d(POOLED, 3, 1, 1, return_indices=True), 119),
    "max_pool3d": (lambda: F.max_pool3d(POOLED_3D, 2, return_indices=True), 119),
    "adaptive_max_pool2d": (lambda: F.adaptive_max_pool2d(POOLED, 3, return_indices=True), 119),
    "adaptive_max_pool3d": (lambda: F.adaptive_max_pool3d(POOLED_3D, 2, return_indices=True), 119),
    "fractional_max_pool2d": (lambda: F.fractional_max_pool2d(POOLED, 2, 3, return_indices=True), 119),
    "fractional_max_pool3d": (lambda: F.fractional_max_pool3d(POOLED_3D, 2, 2, return_indices=True), 119),
    "max": (lambda: SORTED.max(0), 29),
    "min": (lambda: SORTED.min(1), 6),
    "sort": (lambda: SORTED.sort(0), 29),
    "sort, last by default": (lambda: SORTED.sort(), 6),
    "sort stable": (lambda: SORTED.sort(dim=0, stable=True), 29),
    "argsort": (lambda: (SORTED.argsort(0),), 29),
    "topk": (lambda: SORTED.topk(3, -2), 29),
    "kthvalue": (lambda: SORTED.kthvalue(2, 0), 29),
    "median": (lambda: SORTED.median(0), 29),
    "nanmedian": (lambda: SORTED.nanmedian(0), 29),
    "mode": (lambda: SORTED.mode(0), 29),
    "cummax": (lambda: SORTED.cummax(0), 29),
    "cummin": (lambda: SORTED.cummin(1), 6),
    "argmax": (lambda: (SORTED.argmax(1),), 6),
    "argmin of all": (lambda: (SORTED.argmin(),), 209),
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_are_noted_with_a_bound_that_holds(name: str) -> None:
    run, largest = INDICES[name]
    with ValueNotes(notes_exact=False) as notes:
        indices = run()[-1]
        assert notes.largest_index(indices) == largest
        assert not notes.may_be_two_valued(indices)
        assert indices.max() <= largest


def test_a_view_of_indices_is_indices_and_their_bytes_are_not() -> None:
    with ValueNotes(notes_exact=False) as notes:
        indices = SORTED.sort(0).indices
        assert notes.largest_index(indices.t()[1:]) == 29
        assert notes.largest_index(indices.view(torch.int32)) is None
        assert notes.largest_index(indices.clone()) is None


WRITES = {
    "in place": lambda x: x.add_(3),
    "a view": lambda x: x[0].zero_(),
    "detached": lambda x: x.detach().fill_(1),
    ".data": lambda x: x.data.zero_(),
    "foreach": lambda x: torch._foreach_add_([x], 1),
    "out": lambda x: torch.add(x, 1, out=x),
    "copy_": lambda x: x.copy_(torch.ones_like(x)),
    "set_": lambda x: x.set_(torch.ones_like(x)),
    ".data =": lambda x: setattr(x, "data", torch.ones_like(x)),
    "index_put_": lambda x: x.__setitem__(0, 5),
}


@pytest.mark.parametrize("name", WRITES)
def test_indices_that_are_written_to_are_none_any_more(name: str) -> None:
    with ValueNotes(notes_exact=False) as notes:
        indices = SORTED.sort(0).indices
        WRITES[name](indices)
        assert notes.largest_index(indices) is None


def test_masks_of_dropout_are_noted_as_long_as_they_are_only_scaled() -> None:
    with ValueNotes(notes_exact=False) as notes:
        mask = torch.empty(8).bernoulli_(0.5)
        assert notes.may_be_two_valued(mask)
        mask.div_(0.5).mul_(3)
        assert notes.may_be_two_valued(mask)
        assert notes.may_be_two_valued(mask.view(2, 4))
        assert notes.may_be_two_valued(torch.bernoulli(torch.full((4,), 0.5)))
        mask.mul_(torch.arange(8))
        assert not notes.may_be_two_valued(mask)


@torch.library.custom_op("lightning_vram_tests::quiet_write", mutates_args=())
def quiet_write(x: Tensor) -> Tensor:
    x.numpy()[:] = 7
    return x.sum()


def test_what_an_operator_of_an_extension_got_is_not_believed() -> None:
    with ValueNotes(notes_exact=False) as notes:
        indices = SORTED.sort(0).indices
        quiet_write(indices)
        assert notes.largest_index(indices) is None


def test_notes_keep_nothing_alive_and_die_with_the_memory() -> None:
    with ValueNotes(notes_exact=True) as notes:
        for _ in range(20):
            indices = SORTED.sort(0).indices
            storage = indices.untyped_storage()._weak_ref()
            del indices
            assert torch.UntypedStorage._expired(storage)
            other = torch.full((30, 7), 1000)  # likely at the same address
            assert notes.largest_index(other) is None
            torch.UntypedStorage._free_weak_ref(storage)
            del other


EXACT = {
    "mean of layer norm": lambda x: torch.native_layer_norm(x, [8], None, None, 1e-5)[1],
    "scale of layer norm": lambda x: torch.native_layer_norm(x, [8], None, None, 1e-5)[2],
    "mean of batch norm": lambda x: torch.ops.aten._native_batch_norm_legit(
        x, None, None, torch.zeros(8), torch.ones(8), True, 0.1, 1e-5
    )[1],
    "logsumexp of attention": lambda x: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        x[None, None], x[None, None], x[None, None]
    )[1],
    "mean": lambda x: x.mean(0),
    "rsqrt": lambda x: x.rsqrt(),
    "cast weight": lambda x: nn.Parameter(x).to(torch.bfloat16),
    "view of a cast weight": lambda x: nn.Parameter(x).to(torch.bfloat16).t(),
    "merged weight": lambda x: nn.Parameter(x) + nn.Parameter(x) @ nn.Parameter(x) * 0.5,
}
NOT_EXACT = {
    "layer norm": lambda x: torch.native_layer_norm(x, [8], None, None, 1e-5)[0],
    "product with a weight": lambda x: x @ nn.Parameter(x),
    "cast": lambda x: x.to(torch.bfloat16),
    "second of a split": lambda x: x.split(4)[1],
    "sum with a weight": lambda x: x + nn.Parameter(x),
}


@pytest.mark.parametrize("name", [*EXACT, *NOT_EXACT])
def test_statistics_and_weights_are_noted_as_exact(name: str) -> None:
    with ValueNotes(notes_exact=True) as notes:
        result = {**EXACT, **NOT_EXACT}[name](torch.rand(8, 8))
        assert notes.is_exact(result) == (name in EXACT)
