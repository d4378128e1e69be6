"""Offloaded activations come back as they were: gradients, errors and memory are those of a plain run, or less."""

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from techniques.saved_tensors import attention, byte_gpt, lstm
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lightning_vram.core.host import memory as host_arena
from lightning_vram.core.host.disk import STAGING_BYTES
from lightning_vram.core.host.memory import OffloadError
from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.memory.units import KIB, MIB
from lightning_vram.techniques.activation_offload.items import OffloadedItem, find_span
from lightning_vram.techniques.activation_offload.stage import ActivationOffloading

SIDE = 64
MATRIX = SIDE * SIDE * 4


@pytest.fixture(autouse=True)
def _no_collector():
    """What only a reference cycle keeps alive is alive."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=["host", "disk"])
def disk_path(request, tmp_path):
    return tmp_path if request.param == "disk" else None


def weight(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(*(shape or (SIDE, SIDE))).requires_grad_()


def gradients(module: nn.Module, compute: Callable[[], Tensor], context: AbstractContextManager[Any]) -> list[Tensor]:
    torch.manual_seed(0)
    module.zero_grad()
    with context:
        loss = compute()
    loss.backward()
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    assert len(actual) == len(expected) > 0
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def to_bytes(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().reshape(-1).clone().view(torch.uint8)


@pytest.mark.parametrize("make", [byte_gpt, lstm, attention])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_gradients_of_networks_are_equal_to_the_bit_and_memory_does_not_grow(make, dtype, disk_path) -> None:
    torch.manual_seed(0)
    module, compute = make()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        offloading, sizes = ActivationOffloading(module, min_offload_bytes=256, disk_path=disk_path), set()
        for step in range(5):
            expected = gradients(module, compute, nullcontext())
            assert_equal(gradients(module, compute, offloading), expected)
            if step > 0:
                sizes.add((offloading.report.disk_bytes, disk_path is None and offloading.report.host_bytes))
            assert offloading.num_away == 0
    assert offloading.report.offloaded_bytes > 0
    assert len(sizes) == len(offloading._history._last) == 1
    assert offloading.report.host_bytes <= 5 * STAGING_BYTES
    offloading.close()


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: (x * 2)[3:40, 5:].exp().sum(0, keepdim=True),
        lambda x: (x[:1] * 2).expand(SIDE, SIDE).sin() * x,
        lambda x: torch.stack([row.sin() for row in (x * 2).unbind(1)]),
        lambda x: (x * 2).as_strided((SIDE, 8), (4, 1), 1).sin().sum(0) * x[0, :8],
        lambda x: torch.view_as_complex((x * 2).view(SIDE, -1, 2)).exp().conj().square().real,
        lambda x: torch.view_as_complex((x * 2).view(SIDE, -1, 2)).conj().imag.mul(x[:, :32]),
        lambda x: (x.to(torch.bfloat16) * 2).sin().float() + x.to(torch.float16).exp().float(),
        lambda x: torch.vmap(lambda row: row.exp() * row)(x.sin() + 2) * torch.func.grad(lambda t: t.sin().sum())(x),
    ],
)
def test_views_strides_and_dtypes_come_back(compute: Callable[[Tensor], Tensor]) -> None:
    x = weight()
    (expected,) = torch.autograd.grad(compute(x).abs().square().sum(), x)
    for window_bytes in (0, "auto", 10**9):
        offloading = ActivationOffloading(min_offload_bytes=1, window_bytes=window_bytes)
        for _ in range(3):
            with offloading:
                loss = compute(x).abs().square().sum()
            assert offloading.report.offloaded_bytes + offloading.report.kept_bytes > 0
            assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
            del loss
            assert offloading.num_away == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(6, 5).t(),
        lambda: torch.randn(6, 1).expand(6, 7),
        lambda: torch.randn(3, 4, 5)[:, 1:3, ::2],
        lambda: torch.randn(4, 4, dtype=torch.complex64),
        lambda: torch.randn(1000)[5:9],
        lambda: torch.rand(7) > 0.5,
        lambda: torch.randn(8).to(torch.float8_e4m3fn),
        lambda: torch.tensor(2.0, dtype=torch.float64),
        lambda: torch.arange(19, dtype=torch.uint8)[2:18].view(torch.int16),
    ],
)
@pytest.mark.parametrize("window_bytes", [0, 10**9])
def test_a_tensor_comes_back_with_its_strides_bits_and_dtype(make: Callable[[], Tensor], window_bytes: int) -> None:
    torch.manual_seed(0)
    tensor = make()
    offloading = ActivationOffloading(min_offload_bytes=1, window_bytes=window_bytes)
    for _ in range(2):
        with offloading:
            packed = offloading._pack(tensor)
            back = offloading._unpack(packed)
            assert (back.shape, back.stride(), back.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
            assert torch.equal(to_bytes(back), to_bytes(tensor))
        del packed
    assert offloading.report.offloaded_bytes + offloading.report.kept_bytes > 0


def test_views_of_one_memory_travel_once() -> None:
    x = weight()
    offloading = ActivationOffloading(min_offload_bytes=1)
    with offloading:
        y = x * 2
        loss = (y.sin() * y.t().exp()).sum() + (y[:40].square()).sum()  # saved: y four times, sin, exp
    assert offloading.report.offloaded_bytes == 3 * MATRIX
    assert offloading.report.num_offloaded == offloading.num_away == 3
    loss.backward()


def test_a_small_view_sends_what_it_covers_and_a_large_one_all() -> None:
    offloading = ActivationOffloading(min_offload_bytes=1)
    memory = torch.randn(SIDE, SIDE)
    with offloading:
        packed = [offloading._pack(memory[3])]
        assert offloading.report.offloaded_bytes == SIDE * 4
        packed.append(offloading._pack(memory[3].view(8, 8)))  # the same span
        assert offloading.report.offloaded_bytes == SIDE * 4
        packed.append(offloading._pack(memory[: SIDE // 2]))
        assert offloading.report.offloaded_bytes == SIDE * 4 + MATRIX
        packed.append(offloading._pack(memory[7]))  # known by now
        assert offloading.report.offloaded_bytes == SIDE * 4 + MATRIX
    views = (memory[3], memory[3].view(8, 8), memory[: SIDE // 2], memory[7])
    for one, view in zip(packed, views, strict=True):
        assert torch.equal(offloading._unpack(one), view)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex128])
@pytest.mark.parametrize("compress", ["none", "bf16"])
def test_a_small_view_comes_back_at_an_address_as_aligned_as_its_own(dtype: torch.dtype, compress: Any) -> None:
    offloading = ActivationOffloading(min_offload_bytes=1, window_bytes=0, compress=compress)
    size, memory = dtype.itemsize, torch.arange(4000).to(dtype)
    with offloading:
        for start, below in ((0, 0), (1, 1), (256 // size, 0), (512 // size + 3, 3), (1000, 1000 % (256 // size))):
            assert find_span(memory[start : start + 100]) == (start - below, 100 + below)
            back = offloading._unpack(offloading._pack(memory[start : start + 100]))
            assert back.storage_offset() == below
            assert back.untyped_storage().nbytes() < 100 * size + 256
            assert compress == "bf16" or torch.equal(back, memory[start : start + 100])


def test_memory_that_was_written_to_meanwhile_travels_again() -> None:
    x = weight()
    offloading = ActivationOffloading(min_offload_bytes=1)
    with offloading:
        y = x.detach() * 2
        first, taken = (y * x).sum(), y.clone()
        handle = offloading.take(y)
        y.add_(1)
        again = offloading.take(y)
    assert torch.equal(handle.give(), taken)  # a snapshot
    assert torch.equal(again.give(), taken + 1)
    assert offloading.report.num_offloaded == 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


def test_parameters_buffers_and_small_tensors_never_travel() -> None:
    layer = nn.BatchNorm1d(SIDE)
    layer.register_buffer("table", torch.randn(SIDE, SIDE))
    offloading = ActivationOffloading(layer, min_offload_bytes=1024)
    with offloading:
        for tensor in (layer.weight, layer.weight.data, layer.table, layer.table.t(), layer.table[1:]):
            assert not isinstance(offloading._pack(tensor)[-1], type(offloading.take(torch.randn(SIDE, SIDE))))
        num_offloaded = offloading.report.num_offloaded
        assert offloading.take(layer.weight.data) is None
        assert offloading.take(torch.randn(255)) is None
        assert offloading.take(torch.randn(2, 0)) is None
        assert offloading.take(torch.randn(1000)[:255]) is None
        assert offloading.report.num_offloaded == num_offloaded
        assert offloading.take(torch.randn(256)) is not None


def test_a_batch_that_was_named_stays() -> None:
    layer, batch = nn.Linear(SIDE, SIDE), {"x": torch.randn(SIDE, SIDE)}
    offloading = ActivationOffloading(layer, min_offload_bytes=1)
    offloading.keep_in_place(batch)
    offloading.keep_in_place([torch.randn(3)])  # earlier names hold
    with offloading:
        layer(batch["x"]).sum()
    assert offloading.report.num_offloaded == 0
    reference = weakref.ref(batch["x"].untyped_storage())
    del batch
    assert reference() is None


def test_indices_on_the_host_stay_where_the_module_is_elsewhere() -> None:
    with ActivationOffloading(nn.Linear(2, 2, device="meta"), min_offload_bytes=1) as offloading:
        assert offloading.take(torch.randn(SIDE)) is None
        assert offloading.take(torch.randn(SIDE, device="meta")) is None  # nothing is behind it


def test_gradients_of_gradients_retained_and_partial_backwards() -> None:
    results = []
    for context in (nullcontext(), ActivationOffloading(min_offload_bytes=1, window_bytes=2 * MATRIX)):
        x, w = weight(), weight()
        with context:
            y = (x @ w).tanh()
            first, second = (y @ w).sin().sum(), (y * y).exp().mean()
        (gradient,) = torch.autograd.grad(first, x, create_graph=True)
        found = [gradient.detach(), *torch.autograd.grad(gradient.square().sum(), (x, w), retain_graph=True)]
        found += torch.autograd.grad(second, w, retain_graph=True)
        found += torch.autograd.grad(first + second, (x, w), retain_graph=True)
        found += torch.autograd.grad(second, (x, y))
        results.append(found)
        if isinstance(context, ActivationOffloading):
            del first, second, y, gradient
            assert context.num_away == 0
    assert_equal(results[1], results[0])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_offload_their_inputs(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE)) for _ in range(4))
    x = torch.randn(SIDE, SIDE).requires_grad_()

    def compute() -> Tensor:
        hidden = x
        for layer in layers:
            hidden = checkpoint(layer, hidden, use_reentrant=use_reentrant)
        return hidden.sum()

    expected = gradients(layers, compute, nullcontext())
    offloading = ActivationOffloading(layers, min_offload_bytes=1)
    assert_equal(gradients(layers, compute, offloading), expected)
    assert offloading.report.offloaded_bytes == 4 * MATRIX
    with offloading:  # entered still when layers are run again
        gradients(layers, compute, nullcontext())
    assert offloading.report.offloaded_bytes + offloading.report.kept_bytes == 4 * MATRIX


def test_compiled_parts() -> None:
    module = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE))
    x = torch.randn(SIDE, SIDE)
    expected = gradients(module, lambda: module(x).sin().sum(), nullcontext())
    compiled = torch.compile(module, backend="aot_eager")
    offloading = ActivationOffloading(module, min_offload_bytes=1)
    for _ in range(2):
        found = gradients(module, lambda: compiled(x).sin().sum(), offloading)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    assert offloading.report.num_offloaded > 0


def test_what_comes_last_stays_from_the_second_forward_on() -> None:
    x = weight()
    offloading = ActivationOffloading(min_offload_bytes=1, window_bytes=2 * MATRIX)
    for step in range(3):
        with offloading:
            loss = x.sin().sin().sin().sin().sum()  # four are saved: the weight and three results
        assert offloading.report.offloaded_bytes == (4 if step == 0 else 2) * MATRIX
        assert offloading.report.kept_bytes == (0 if step == 0 else 2) * MATRIX
        loss.backward()
    with offloading:
        x[:5].sin().sum()  # another batch: nothing is known of it
    assert offloading.report.kept_bytes == 0


@pytest.mark.parametrize(("window", "most"), [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_at_most_the_window_is_fetched_ahead(window: int, most: int) -> None:
    offloading = ActivationOffloading(min_offload_bytes=1, window_bytes=window * MATRIX)
    num_here = []
    with offloading:
        handles = [offloading.take(torch.randn(SIDE, SIDE)) for _ in range(6)]
    items = [handle.item for handle in handles]
    while handles:
        handles.pop().give()
        items.pop()
        num_here.append(1 + sum(item.is_here for item in items))
    assert num_here[0] == most
    assert max(num_here) == most


def to_fake(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Put fake parameters on meta, which stands for a GPU: the host is counted apart."""
    made: dict[int, nn.Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                fake = mode.from_tensor(parameter.detach().to("meta"))
                part._parameters[name] = made.setdefault(id(parameter), nn.Parameter(fake))
    return module


def test_device_and_host_bytes_of_fake_tensors_are_those_worked_out() -> None:
    mode = FakeTensorMode()
    module = to_fake(nn.Sequential(*(nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh()) for _ in range(4))), mode)
    with mode:
        x = torch.empty(SIDE, SIDE, device="meta")
        offloading = ActivationOffloading(module, min_offload_bytes=MATRIX, window_bytes=0)
        offloading.keep_in_place(x)
        with track_memory(module, inputs=x) as tracker:
            with offloading:
                loss = module(x).sum()
            assert offloading.report.offloaded_bytes == 4 * MATRIX
            loss.backward()
            del loss
    timeline = tracker.timeline
    assert timeline.device == "meta"
    assert timeline.saved_for_backward_bytes == 8  # the loss and its gradient
    assert timeline.host_peak_bytes == MIB  # one chunk
    assert offloading.num_away == 0


def test_nothing_is_alive_after_a_step_or_an_exception() -> None:
    module, x = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Tanh(), nn.Linear(SIDE, SIDE)), torch.randn(SIDE, SIDE)
    offloading = ActivationOffloading(module, min_offload_bytes=1)
    gradients(module, lambda: module(x).sum(), offloading)
    assert offloading.num_away == 0
    with pytest.raises(ZeroDivisionError), offloading:
        module(x).sum() / (1 // 0)
    assert offloading.num_away == 0

    def fail(gradient: Tensor) -> None:
        raise ZeroDivisionError

    with offloading:
        hidden = module[1](module[0](x))
        hidden.register_hook(fail)
        loss = module[2](hidden).sum()
    assert offloading.num_away > 0
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    del loss, hidden
    assert offloading.num_away == 0
    reference = weakref.ref(offloading)
    del offloading
    assert reference() is None


def test_the_offloading_may_go_before_the_graph() -> None:
    x = weight()
    offloading = ActivationOffloading(min_offload_bytes=1)
    with offloading:
        loss = x.sin().exp().sum()
    offloading.close()
    del offloading
    assert torch.equal(*(torch.autograd.grad(one, x)[0] for one in (loss, x.sin().exp().sum())))


def test_it_can_be_closed_and_entered_again(disk_path) -> None:
    x = weight()
    offloading = ActivationOffloading(min_offload_bytes=1, disk_path=disk_path)
    for _ in range(2):
        with offloading:
            loss = x.sin().exp().sum()
        loss.backward()
        offloading.close()
        offloading.close()
        assert (offloading.report.host_bytes, offloading.report.disk_bytes) == (0, 0)


def test_a_host_that_is_too_small_is_refused_and_all_stays_usable(monkeypatch) -> None:
    x, offloading = weight(), ActivationOffloading(min_offload_bytes=1)
    with monkeypatch.context() as patched:
        patched.setattr(host_arena, "available_host_bytes", lambda: 1024 * MIB + 5 * KIB)
        message = r"^activation offload needs 1\.00 MiB of host memory, but 1\.00 GiB are available"
        with pytest.raises(RuntimeError, match=message), offloading:
            x.sin().exp().sum()
    with offloading:
        loss = x.sin().exp().sum()
    assert torch.equal(torch.autograd.grad(loss, x)[0], torch.autograd.grad(x.sin().exp().sum(), x)[0])


def test_in_bfloat16_they_take_half_of_the_host_and_come_back_rounded() -> None:
    x, y = torch.randn(512, 512), torch.randn(512, 512, dtype=torch.float64).t()
    offloading = ActivationOffloading(min_offload_bytes=1, compress="bf16")
    with offloading:
        indices = offloading.take(torch.arange(512 * 512))
        handles = [offloading.take(tensor) for tensor in (x, y, x.t())]
        bits = offloading.take(x.view(torch.int32))
    for handle, tensor in zip(handles, (x, y, x.t()), strict=True):
        back = handle.give()
        assert (back.dtype, back.stride()) == (tensor.dtype, tensor.stride())
        assert torch.equal(back, tensor.to(torch.bfloat16).to(tensor.dtype))
    assert torch.equal(indices.give(), torch.arange(512 * 512))
    assert torch.equal(bits.give(), x.view(torch.int32))
    assert offloading.report.offloaded_bytes == (4 + 8 + 8 + 4) * 2**18
    assert offloading.report.host_bytes == 7 * MIB  # chunks of 1, 2 and 4 for 0.5 + 0.5 + 2 + 1


def test_nesting_and_a_disk_path_that_is_no_folder_are_refused() -> None:
    with (
        ActivationOffloading() as offloading,
        pytest.raises(RuntimeError, match=r"^this ActivationOffloading is already"),
    ):
        offloading.__enter__()
    with pytest.raises(ValueError, match=r"^disk_path must be an existing folder, got '/nowhere'\.$"):
        ActivationOffloading(disk_path="/nowhere")


class GivesWhatItSaved(torch.autograd.Function):
    """As fused losses do: the gradient is the saved tensor itself."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.clone())
        return (weight * x).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


@pytest.mark.parametrize("clip", [lambda gradient: gradient.mul_(0.5), lambda gradient: gradient.data.mul_(0.5)])
def test_a_gradient_that_is_a_saved_tensor_may_be_clipped_between_backwards(clip: Callable[[Tensor], Any]) -> None:
    w, x = weight(), torch.randn(SIDE, SIDE)
    with ActivationOffloading(min_offload_bytes=1):
        loss = GivesWhatItSaved.apply(w, x)
    loss.backward(retain_graph=True)
    clip(w.grad)
    loss.backward()
    assert torch.equal(w.grad, 1.5 * x)


class WritesToWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.saved_tensors[0].mul_(2) * gradient


@pytest.mark.parametrize("window_bytes", [0, 10**6])
def test_a_backward_that_writes_to_its_copy_spoils_that_of_nobody_else(window_bytes: int) -> None:
    w, b = weight(), weight()
    with ActivationOffloading(min_offload_bytes=1, window_bytes=window_bytes):
        x = w * 3
        saved = x.detach().clone()
        product = x * b
        loss = WritesToWhatItSaved.apply(x).sum() + product.sum()
        del x, product
    loss.backward()
    assert torch.equal(b.grad, saved)


def test_writes_without_a_version_do_not_change_what_was_sent_nor_hide_behind_it(disk_path) -> None:
    weights = [weight() for _ in range(4)]
    x, y = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    offloading = ActivationOffloading(min_offload_bytes=1, window_bytes=0, disk_path=disk_path)
    with offloading:
        values, products = [x.clone()], [x * weights[0]]
        weights[0].exp()  # what has no gradient is sent when the next operator saves something
        x.data.mul_(2)
        values.append(x.clone())
        products.append(x * weights[1])
        other = y.data  # counts on its own: both are at version 1 when they are saved
        other.mul_(2)
        values.append(other.clone())
        products.append(other * weights[2])
        weights[0].exp()
        y.add_(1)
        values.append(y.clone())
        products.append(y * weights[3])
        loss = torch.stack(products).sum()
    loss.backward()
    assert_equal([one.grad for one in weights], values)
    offloading.close()


def test_forwards_without_a_backward_do_not_pile_up() -> None:
    w = weight(8)
    offloading = ActivationOffloading(min_offload_bytes=1)
    with offloading:
        for _ in range(500):
            loss = w.sin().exp().sum()
        run = offloading._history._run
        assert len(run.items) <= 128
        assert run.saved_bytes <= 128 * 32
    loss.backward()


def test_what_cannot_be_fetched_ahead_fails_nobody(monkeypatch) -> None:
    offloading = ActivationOffloading(min_offload_bytes=1, window_bytes=10**6)
    tensors = [torch.randn(SIDE) for _ in range(3)]
    with offloading:
        handles = [offloading.take(tensor) for tensor in tensors]
    fetch = OffloadedItem.fetch
    for error in (torch.OutOfMemoryError, OffloadError):

        def fail(item: OffloadedItem, error: type[Exception] = error) -> Tensor:
            if item is handles[2].item:
                return fetch(item)
            raise error("no room")

        monkeypatch.setattr(OffloadedItem, "fetch", fail)
        assert torch.equal(handles[2].give(), tensors[2])
    monkeypatch.undo()
    assert torch.equal(handles[0].give(), tensors[0])


def limited(most_bytes: int | None, **arguments: Any) -> ActivationOffloading:
    return ActivationOffloading(min_offload_bytes=1, most_bytes=most_bytes, **({"window_bytes": 0} | arguments))


def sines(x: Tensor) -> Tensor:
    """Save eight matrices: ``x``, and seven results."""
    for _ in range(8):
        x = x.sin()
    return x


@pytest.mark.parametrize(
    ("most_bytes", "num_sent"),
    [(None, 8), (0, 0), (MATRIX - 1, 0), (MATRIX, 1), (3 * MATRIX + 1, 3), (8 * MATRIX, 8), (10**9, 8)],
)
def test_what_is_saved_first_travels_from_the_first_forward_on(most_bytes: int | None, num_sent: int) -> None:
    x = weight()
    (expected,) = torch.autograd.grad(sines(x).sum(), x)
    offloading = limited(most_bytes)
    for _ in range(3):
        with offloading:
            loss = sines(x).sum()
        assert offloading.report.offloaded_bytes == num_sent * MATRIX
        assert offloading.report.kept_bytes == (8 - num_sent) * MATRIX
        assert offloading.num_away == offloading.report.num_offloaded == num_sent
        assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
        del loss
        assert offloading.num_away == 0


def test_the_window_comes_out_of_what_may_travel() -> None:
    x = weight()
    offloading = limited(7 * MATRIX, window_bytes=2 * MATRIX)
    for sent in (7, 6, 6):
        with offloading:
            loss = sines(x).sum()
        assert offloading.report.offloaded_bytes == sent * MATRIX
        loss.backward()


def test_each_forward_of_a_step_has_its_own_limit() -> None:
    """A generator and a discriminator, say: forward, backward, forward, backward."""
    x = weight()
    (expected,) = torch.autograd.grad(sines(x).sum(), x)
    offloading = limited(3 * MATRIX)
    with offloading:
        for num_forwards in (1, 2):
            loss = sines(x).sum()
            assert offloading.report.offloaded_bytes == num_forwards * 3 * MATRIX
            assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_it_may_be_set_between_steps() -> None:
    x = weight()
    offloading = limited(None)
    for most_bytes, num_sent in ((None, 8), (2 * MATRIX, 2), (0, 0), (None, 8)):
        offloading.most_bytes = most_bytes
        with offloading:
            sines(x).sum().backward()
        assert offloading.report.num_offloaded == num_sent
