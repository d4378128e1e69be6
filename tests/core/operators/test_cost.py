"""FLOP equivalents are worked out by hand; families and names are those of torch.ops."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_vram.core import operators
from lightning_vram.core.operators import ATTENTION, BALANCE, MATMULS, operator_work, parts_of, resolve_operators
from lightning_vram.private_names.dispatcher import FakeTensorMode

aten = torch.ops.aten


def is_costly(func: Any) -> bool:
    return operators._qualified_name(func) in MATMULS | ATTENTION


def run(func: Any, *args: Any, **kwargs: Any) -> float:
    return operator_work(func, args, kwargs, func(*args, **kwargs)).cost


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


A, B, HEADS = meta(4096, 2048), meta(2048, 1024), meta(2, 4, 1024, 64)
CONVOLUTION = meta(8, 256, 32, 32), meta(512, 256, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1


@pytest.mark.parametrize(
    ("func", "args", "flops"),
    [
        (aten.mm.default, (A, B), 2 * 4096 * 2048 * 1024),
        (aten.addmm.default, (meta(1024), A, B), 2 * 4096 * 2048 * 1024),
        (aten.bmm.default, (meta(8, 4096, 1024), meta(8, 1024, 4096)), 2 * 8 * 4096 * 1024 * 4096),
        (aten.linear.default, (A, meta(1024, 2048)), 2 * 4096 * 2048 * 1024),  # without a formula in torch
        (aten.convolution.default, CONVOLUTION, 2 * 8 * 512 * 32 * 32 * 256 * 9),
        (
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            (HEADS, HEADS, HEADS),
            2 * 2 * 4 * 1024 * 1024 * (64 + 64),
        ),
    ],
    ids=str,
)
def test_large_products_cost_their_flops(func: Any, args: tuple[Any, ...], flops: int) -> None:
    assert run(func, *args) == flops


def test_a_thin_product_costs_its_memory_traffic() -> None:
    assert run(aten.mm.default, meta(1, 4096), meta(4096, 4096)) == BALANCE * 4 * (4096 + 4096 * 4096 + 4096)


@pytest.mark.parametrize(
    ("func", "args", "num_bytes"),
    [
        (aten.relu.default, (meta(10, 10),), 800),  # reads and writes
        (aten.relu_.default, (meta(10, 10),), 800),
        (aten.add.Tensor, (meta(10, 10), meta(10).expand(10, 10)), 840),
        (aten.add.Tensor, (meta(10, 10, dtype=torch.bfloat16), 1.0), 400),
        (aten.cat.default, ([meta(10), meta(20)],), 240),
        (aten._foreach_add_.Scalar, ([meta(10), meta(20)], 1.0), 120),  # a write without a result
        (aten.embedding.default, (meta(50257, 8), meta(5, dtype=torch.int64)), 5 * 8 + 2 * 5 * 8 * 4),
    ],
    ids=str,
)
def test_cheap_operators_cost_their_memory_traffic(func: Any, args: tuple[Any, ...], num_bytes: int) -> None:
    assert run(func, *args) == BALANCE * num_bytes


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.view.default, (meta(4, 4), [16])),
        (aten._unsafe_view.default, (meta(4, 4), [16])),  # a view whose schema hides it
        (aten.expand.default, (meta(4), [4, 4])),
        (aten.split.Tensor, (meta(4, 4), 2)),
        (aten.detach.default, (meta(4, 4),)),
        (aten.empty_like.default, (meta(4, 4),)),  # uninitialised memory
        (aten.is_same_size.default, (meta(4), meta(4))),  # a question
    ],
    ids=str,
)
def test_views_and_metadata_are_free(func: Any, args: tuple[Any, ...]) -> None:
    assert run(func, *args) == 0


def test_an_operator_of_another_library_costs_its_memory_traffic() -> None:
    with torch.library._scoped_library("lightning_vram_cost", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        assert run(torch.ops.lightning_vram_cost.twice.default, torch.zeros(8)) == BALANCE * 64
        assert not is_costly(torch.ops.lightning_vram_cost.twice.default)
        assert not is_costly(aten._scaled_dot_product_flash_attention_backward.default)
        assert is_costly(*resolve_operators(["higher_order.flex_attention"]))
        assert resolve_operators(["lightning_vram_cost.twice"]) == {torch.ops.lightning_vram_cost.twice.default}


def test_without_torchs_formulas_products_are_counted_by_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_FLOP_FORMULAS", {})
    assert run(aten.mm.default, A, B) == 2 * 4096 * 2048 * 1024
    assert run(aten.convolution.default, *CONVOLUTION) == 2 * 8 * 512 * 32 * 32 * 256 * 9


def test_a_recurrent_kernel_costs_every_weight_for_every_row() -> None:
    lstm, input = nn.LSTM(512, 512), torch.zeros(64, 32, 512)
    args = (input, *lstm.parameters())
    assert operator_work(aten.mkldnn_rnn_layer.default, args, {}, lstm(input)).cost == 2 * (2 * 4 * 512 * 512) * (
        64 * 32
    )


def test_this_torch_knows_the_usual_names() -> None:
    known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    assert (MATMULS | ATTENTION) - known <= {"higher_order::flex_attention"}


@pytest.mark.parametrize("name", ["aten.mm", "torch.ops.aten.mm", "aten::mm"])
def test_a_name_without_overload_means_all_overloads(name: str) -> None:
    assert resolve_operators([name]) == {getattr(aten.mm, overload) for overload in aten.mm.overloads()}
    assert resolve_operators([f"{name}.default"]) == {aten.mm.default}


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("aten.mmm", "'aten.mm'"),
        ("aten.addmm.other", "'aten.addmm'"),
        ("addmm", "'aten.addmm'"),
        ("nowhere_xyzzy.flash", None),
        ("", None),
        ("aten.mm.default.x", "'aten.mm'"),
        ("aten.__class__", None),
    ],
)
def test_an_unknown_name_is_refused_with_close_ones(name: str, close: str | None) -> None:
    message = (
        rf"^operators='{name}' is not an operator of torch\.ops\.( Close names: (?P<close>.*)\.)? Write "
        r"'namespace\.name' as under torch\.ops, and import the library that defines it first\.$"
    )
    with pytest.raises(ValueError, match=message) as caught:
        resolve_operators([name])
    found = re.match(message, str(caught.value))["close"]
    assert close is None or close in found.split(", ")


def test_wrong_kinds_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^operators must be a list of names, got the string 'aten.mm'. Write"):
        resolve_operators("aten.mm")
    with pytest.raises(TypeError, match=r"^operators must be names such as 'aten.mm', got 3 of type int\.$"):
        resolve_operators([3])


class Work(TorchDispatchMode):
    num_bytes = num_calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        work = operator_work(func, args, kwargs or {}, result)
        if work.num_bytes:
            self.num_bytes, self.num_calls = self.num_bytes + work.num_bytes, self.num_calls + work.num_calls
        return result


def double(numbers):
    seen = []
    with Work() as work:
        for part in parts_of(len(numbers), 3, numbers):
            numbers[part].mul(2)
            seen.append((part.start, part.stop))
    return work, seen


def test_the_work_of_a_fake_is_that_of_a_real_tensor():
    numbers = torch.ones(11, 4)
    real, seen = double(numbers)
    with FakeTensorMode() as mode:
        fake, of_fake = double(mode.from_tensor(numbers))
    assert seen == [(0, 3), (3, 6), (6, 9), (9, 11)]
    assert of_fake == [(0, 3), (9, 11)]
    assert (fake.num_bytes, fake.num_calls) == (real.num_bytes, real.num_calls) == (2 * 11 * 4 * 4, 4)
