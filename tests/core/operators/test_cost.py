"""FLOP equivalents are worked out by hand; families and names are those of torch.ops."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_vram.core import operators
from lightning_vram.core.operators import ATTENTION, BALANCE, MATMULS, operator_work, resolve_operators

aten = torch.ops.aten


def is_costly(func: Any) -> bool:
    return operators._qualified_name(func) in MATMULS | ATTENTION


def run(func: Any, *args: Any, **kwargs: Any) -> float:
    return operator_work(func, args, kwargs, func(*args, **kwargs)).cost


class Costs(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, float, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        self.seen.append((str(func), operator_work(func, args, kwargs or {}, outputs).cost, is_costly(func)))
        return outputs


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, device="meta", dtype=dtype)


@pytest.mark.parametrize(
    ("func", "args", "flops"),
    [
        pytest.param(aten.mm.default, (meta(4096, 2048), meta(2048, 1024)), 2 * 4096 * 2048 * 1024, id="mm"),
        pytest.param(
            aten.addmm.default, (meta(1024), meta(4096, 2048), meta(2048, 1024)), 2 * 4096 * 2048 * 1024, id="addmm"
        ),
        pytest.param(
            aten.bmm.default, (meta(8, 4096, 1024), meta(8, 1024, 4096)), 2 * 8 * 4096 * 1024 * 4096, id="bmm"
        ),
        pytest.param(
            aten.linear.default,
            (meta(4096, 2048), meta(1024, 2048)),
            2 * 4096 * 2048 * 1024,
            id="linear, without a formula in torch",
        ),
        pytest.param(
            aten.convolution.default,
            (meta(8, 256, 32, 32), meta(512, 256, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
            2 * 8 * 512 * 32 * 32 * 256 * 9,
            id="convolution",
        ),
        pytest.param(
            aten._scaled_dot_product_flash_attention_for_cpu.default,
            (meta(2, 4, 1024, 64), meta(2, 4, 1024, 64), meta(2, 4, 1024, 64)),
            2 * 2 * 4 * 1024 * 1024 * (64 + 64),
            id="attention on the CPU",
        ),
    ],
)
def test_large_products_cost_their_flops(func: Any, args: tuple[Any, ...], flops: int) -> None:
    assert run(func, *args) == flops


def test_a_thin_product_costs_its_memory_traffic() -> None:
    weight = meta(4096, 4096)

    assert run(aten.mm.default, meta(1, 4096), weight) == BALANCE * 4 * (4096 + 4096 * 4096 + 4096)


@pytest.mark.parametrize(
    ("func", "args", "num_bytes"),
    [
        pytest.param(aten.relu.default, (meta(10, 10),), 800, id="reads and writes"),
        pytest.param(aten.relu_.default, (meta(10, 10),), 800, id="in place likewise"),
        pytest.param(aten.add.Tensor, (meta(10, 10), meta(10).expand(10, 10)), 840, id="an expanded input"),
        pytest.param(aten.add.Tensor, (meta(10, 10, dtype=torch.bfloat16), 1.0), 400, id="half the width"),
        pytest.param(aten.cat.default, ([meta(10), meta(20)],), 240, id="a list of inputs"),
        pytest.param(aten._foreach_add_.Scalar, ([meta(10), meta(20)], 1.0), 120, id="a write without a result"),
        pytest.param(
            aten.embedding.default, (meta(50257, 8), meta(5, dtype=torch.int64)), 5 * 8 + 2 * 5 * 8 * 4, id="a look-up"
        ),
    ],
)
def test_cheap_operators_cost_their_memory_traffic(func: Any, args: tuple[Any, ...], num_bytes: int) -> None:
    assert run(func, *args) == BALANCE * num_bytes


@pytest.mark.parametrize(
    ("func", "args"),
    [
        pytest.param(aten.view.default, (meta(4, 4), [16]), id="view"),
        pytest.param(aten._unsafe_view.default, (meta(4, 4), [16]), id="a view whose schema hides it"),
        pytest.param(aten.t.default, (meta(4, 4),), id="transpose"),
        pytest.param(aten.expand.default, (meta(4), [4, 4]), id="expand"),
        pytest.param(aten.split.Tensor, (meta(4, 4), 2), id="several views"),
        pytest.param(aten.detach.default, (meta(4, 4),), id="detach"),
        pytest.param(aten.empty_like.default, (meta(4, 4),), id="uninitialised memory"),
        pytest.param(aten.is_same_size.default, (meta(4), meta(4)), id="a question"),
    ],
)
def test_views_and_metadata_are_free(func: Any, args: tuple[Any, ...]) -> None:
    assert run(func, *args) == 0


def test_an_operator_of_another_library_costs_its_memory_traffic() -> None:
    with torch.library._scoped_library("lightning_vram_cost", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")

        assert run(torch.ops.lightning_vram_cost.twice.default, torch.zeros(8)) == BALANCE * 64
        assert not is_costly(torch.ops.lightning_vram_cost.twice.default)
        assert resolve_operators(["lightning_vram_cost.twice"]) == {torch.ops.lightning_vram_cost.twice.default}


def test_without_torchs_formulas_products_are_counted_by_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_FLOP_FORMULAS", {})

    assert run(aten.mm.default, meta(4096, 2048), meta(2048, 4096)) == 2 * 4096 * 2048 * 4096
    convolution = (meta(8, 256, 32, 32), meta(512, 256, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert run(aten.convolution.default, *convolution) == 2 * 8 * 512 * 32 * 32 * 256 * 9


def test_a_recurrent_kernel_costs_every_weight_for_every_row() -> None:
    lstm, input = nn.LSTM(512, 512), torch.zeros(64, 32, 512)
    outputs = lstm(input)
    weights = list(lstm.parameters())
    args = (input, *weights)

    cost = operator_work(aten.mkldnn_rnn_layer.default, args, {}, outputs).cost

    assert cost == 2 * (2 * 4 * 512 * 512) * (64 * 32)


def test_a_transformer_layer_has_four_products_and_attention() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    with Costs() as costs:
        layer(torch.zeros(2, 4, 8))

    costly = [name for name, _, is_of_family in costs.seen if is_of_family]
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert costly.pop(1) == attention
    assert len(costly) == 4
    assert set(costly) <= {"aten.mm.default", "aten.addmm.default"}
    assert all(cost > 0 for _, cost, is_of_family in costs.seen if is_of_family)
    assert not is_costly(aten._scaled_dot_product_flash_attention_backward.default)
    assert is_costly(*resolve_operators(["higher_order.flex_attention"]))


def test_this_torch_knows_the_usual_names() -> None:
    known = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}

    unknown = (MATMULS | ATTENTION) - known

    assert unknown <= {"higher_order::flex_attention"}


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
