"""``fsdp_offload`` on an accelerator: the same results, what stays on the device, and what crosses the bus."""

import gc
import weakref
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from support.devices import ACCELERATOR, allocate_workspaces, device_module
from support.helpers import assert_equal_weights, saved_bytes
from support.host_layers import Layers, exceptions, host_bytes
from support.offload_nets import MODES, Fused, FusedCNN, Split, adamw, leave_group
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.data import DataLoader

from lightning_vram import LeanMixedPrecision
from lightning_vram.core.host import memory
from lightning_vram.core.host.memory import make_host_tensor
from lightning_vram.demos import ByteGPT
from lightning_vram.optimizers import averages
from lightning_vram.private_names.fsdp2 import local_shard
from lightning_vram.private_names.lightning import average_of
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy

pytestmark = [pytest.mark.device, pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
ON_DEVICE = {"accelerator": ACCELERATOR, "devices": 1}
NUM_LAYERS, WIDTH, LENGTH = 8, 512, 16


class LitBytes(ByteGPT):
    """Blocks of 12 MiB and hardly any activations; looks at itself after each step."""

    def __init__(self) -> None:
        super().__init__(NUM_LAYERS, WIDTH, 8, LENGTH, dropout=0.0)
        self.seen: set[tuple[str, str]] = set()

    validation_step = pl.LightningModule.validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.parameters())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.arange(4 * (LENGTH + 1)).view(4, LENGTH + 1) % 256, batch_size=1)

    def on_train_batch_end(self, *unused: Any) -> None:
        for parameter in self.parameters():
            state = self.trainer.optimizers[0].state[parameter]
            moments = {key: state[key] for key in ("exp_avg", "exp_avg_sq")}
            for kind, tensor in {"shard": parameter, "gradient": parameter.grad, **moments}.items():
                local = getattr(tensor, "_local_tensor", tensor)
                self.seen.add((kind, local.device.type))
                if kind in ("shard", "gradient") and local.is_pinned():
                    self.seen.add((kind, "pinned"))


class Peak(pl.Callback):
    """Largest bytes on the device after the first step, beside what was there before the fit."""

    def __init__(self) -> None:
        allocate_workspaces()
        gc.collect()
        self._before = device_module().memory_allocated()
        self.num_bytes = 0

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            device_module().reset_peak_memory_stats()
        self.num_bytes = device_module().max_memory_allocated() - self._before


class Copies(pl.Callback):
    """Profiles the step after the second: bytes and streams."""

    def __init__(self) -> None:
        self._profiler = torch.profiler.profile(acc_events=True)

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            finish(trainer)
            self._profiler.start()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            finish(trainer)
            self._profiler.stop()

    def _events(self, part: str) -> list[Any]:
        events = self._profiler.profiler.kineto_results.events()
        on_device = [event for event in events if str(event.device_type()).endswith("CUDA")]
        return [event for event in on_device if part in event.name()]

    def num_bytes(self, part: str) -> int:
        return sum(event.nbytes() for event in self._events(part))

    def streams(self, part: str) -> set[int]:
        return {event.device_resource_id() for event in self._events(part)}


def finish(trainer: pl.Trainer) -> None:
    trainer.strategy._finish_steps()
    device_module().synchronize()


@pytest.fixture
def train(fit: Any) -> Any:
    """Train by the strategy, or plainly if ``mode`` is ``None``."""

    def train(make: Any, mode: str | None, *callbacks: pl.Callback, offload: Any = None, **options: Any) -> Any:
        strategy: Any = "auto"
        if mode is not None:
            strategy = FSDPOffloadStrategy(**{"min_params": 100, **MODES[mode], **(offload or {})})
        elif options.pop("precision", "32-true") == "bf16-mixed":
            options["plugins"] = [LeanMixedPrecision("bf16")]  # Lightning's clips no fused optimizer
        return fit(make, *callbacks, strategy=strategy, **ON_DEVICE, **options)

    return train


@pytest.mark.parametrize("make", [Split, FusedCNN])
@pytest.mark.parametrize(
    ("precision", "tolerance", "options"),
    [("32-true", 2e-6, {}), ("bf16-mixed", 2e-4, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2})],
    ids=["fp32", "bf16"],
)
def test_results_are_those_of_a_plain_run(make, precision, tolerance, options, train):
    plain = train(make, None, precision=precision, **options)
    for mode in MODES:  # AdamW's kernel on the host rounds otherwise than that on the device
        ours = train(make, mode, precision=precision, **options)
        is_exact = mode == "none" and make is Split and not options
        atol = 0 if is_exact else tolerance
        assert_close(ours.cpu().state_dict(), plain.cpu().state_dict(), rtol=0, atol=atol)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_where_weights_are_kept_changes_no_bit(precision, train):
    options = {"precision": precision, "gradient_clip_val": 0.1}
    ours = train(Split, "params", **options)
    assert_equal_weights(train(Split, "optimizer", **options), ours)
    assert_equal_weights(train(Split, "params", offload={"narrow_transfers": False}, **options), ours)
    assert_equal_weights(train(Split, "params", offload={"pin_memory": False}, **options), ours)


def test_three_blocks_are_on_the_device_at_most(train):
    model = LitBytes()
    block_bytes = sum(p.numel() * p.element_size() for p in model.net.blocks[0].parameters())
    root_bytes = sum(p.numel() * p.element_size() for p in model.parameters()) - NUM_LAYERS * block_bytes
    batch = next(iter(model.train_dataloader()))
    activation_bytes = saved_bytes(model, lambda: model._loss(batch))
    allowed_bytes = 2 * (3 * block_bytes + root_bytes) + activation_bytes
    plain, ours = Peak(), Peak()
    train(LitBytes, None, plain)
    train(LitBytes, "params", ours)
    assert ours.num_bytes <= allowed_bytes
    assert plain.num_bytes > 3 * NUM_LAYERS * block_bytes > allowed_bytes


def test_gradients_and_states_are_on_the_host_and_pinned(train):
    kinds = ("shard", "gradient", "exp_avg", "exp_avg_sq")
    pinned = {("shard", "pinned"), ("gradient", "pinned")}
    assert train(LitBytes, "params").seen == pinned | {(kind, "cpu") for kind in kinds}


@pytest.mark.gpu
def test_copies_have_a_stream_of_their_own(train):
    copies = Copies()
    train(LitBytes, "params", copies)
    # of matrix products, by the names that cuBLAS has for them; those of Hopper and later begin with "nvjet"
    computing = copies.streams("gemm") | copies.streams("cutlass") | copies.streams("nvjet")
    assert computing
    for direction in ("HtoD", "DtoH"):
        assert copies.streams(direction) - computing


@pytest.mark.gpu
def test_narrow_weights_and_gradients_are_half_as_many_bytes(train):
    narrow, wide = Copies(), Copies()
    train(LitBytes, "params", narrow, precision="bf16-mixed")
    train(LitBytes, "params", wide, precision="bf16-mixed", offload={"narrow_transfers": False})
    model = LitBytes()
    num_narrow = sum(p.numel() for m in model.modules() if isinstance(m, nn.Linear) for p in m.parameters())
    num_narrow -= model.net.head.weight.numel()  # is the embedding's as well
    num_wide = sum(p.numel() for p in model.parameters()) - num_narrow
    assert narrow.num_bytes("DtoH") == pytest.approx(2 * num_narrow + 4 * num_wide, rel=0.01)
    assert wide.num_bytes("DtoH") == pytest.approx(4 * (num_narrow + num_wide), rel=0.01)
    assert narrow.num_bytes("HtoD") <= 0.55 * wide.num_bytes("HtoD")
    assert wide.num_bytes("HtoD") <= 8.5 * (num_narrow + num_wide)  # for the forward, and for the backward


@pytest.mark.gpu
def test_what_is_pinned_is_not_rounded_up():
    before = device_module().host_memory_stats().get("allocated_bytes.current", 0)
    tensor = make_host_tensor(5 * 2**20 + 1, torch.uint8, pin_memory=True)
    assert tensor.is_pinned()
    assert tensor.untyped_storage().nbytes() == 5 * 2**20 + 1
    assert device_module().host_memory_stats().get("allocated_bytes.current", 0) == before  # not torch's, which rounds


class Unseen(LitBytes):
    on_train_batch_end = pl.LightningModule.on_train_batch_end  # there is no state before the first step


@pytest.mark.sim
@pytest.mark.parametrize("windows", [1, 2])
def test_gradients_come_to_memory_of_the_sizes_asked_for_and_used_again(train, monkeypatch, windows):
    """The device fails on races, such as memory that is given to the next while a copy is under way."""
    registered: list[int] = []  # bytes

    def pin(tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        device_module().host_register(address, tensor.nbytes)
        registered.append(tensor.nbytes)
        weakref.finalize(tensor.untyped_storage(), device_module().host_unregister, address)
        return True

    monkeypatch.setattr(memory, "pin_in_place", pin)
    rounded = device_module().host_memory_stats()["allocated_bytes.current"]
    model = train(Unseen, "params", accumulate_grad_batches=windows)
    plain = train(Unseen, None, accumulate_grad_batches=windows)
    assert_close(model.cpu().state_dict(), plain.cpu().state_dict(), rtol=0, atol=2e-6)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    asked = 2 * weights + (windows - 1) * 3 * max(registered)  # what is added to gradients is there for a moment
    assert 2 * weights <= sum(registered) <= 1.02 * asked
    assert device_module().host_memory_stats()["allocated_bytes.current"] == rounded


# --- how weights, states and averages are kept on the host ---


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.01}, {"accumulate_grad_batches": 2}])
@pytest.mark.parametrize("form", ["fp32", "bf16", "8bit"])
def test_how_weights_and_states_are_kept_changes_no_bit(form, options, fit_layers, tmp_path):
    make = partial(Layers, num_batches=8)
    expected = fit_layers(make, {"host_state": form}, **ON_DEVICE, **options)
    for more in ({"master": "split"}, {"offload": "optimizer"}, {"master": "split", "nvme_path": tmp_path}):
        assert_equal_weights(fit_layers(make, {"host_state": form, **more}, **ON_DEVICE, **options), expected)


class Adapted(Layers):
    """Counts the bytes of the host, and looks where moments are."""

    def __init__(self) -> None:
        super().__init__(num_batches=6)
        self.base = nn.Linear(16, 16, bias=False).requires_grad_(requires_grad=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.base(batch), batch_idx)

    def on_train_batch_end(self, *unused: Any) -> None:
        self.host_bytes.append(host_bytes(self) - exceptions(self))
        states = self.trainer.optimizers[0].state.values()
        moments = [local_shard(state[key]) for state in states for key in ("exp_avg", "exp_avg_sq")]
        self.kinds = {(value.dtype, value.device.type) for value in moments}


@pytest.mark.parametrize(
    ("form", "master", "most"),
    [
        ("fp32", "fp32", 18),
        ("fp32", "split", 14),
        ("bf16", "fp32", 14),
        ("bf16", "split", 10),
        ("8bit", "split", 8.3),
        ("4bit", "split", 7.3),
    ],
)
def test_a_weight_takes_as_many_bytes_of_the_host_and_four_if_it_is_frozen(form, master, most, fit_layers):
    model = fit_layers(Adapted, {"host_state": form, "master": master}, **ON_DEVICE)
    num_bytes = model.host_bytes[-1] - 4 * model.base.weight.numel()
    num_weights = sum(p.numel() for p in model.net.parameters())
    assert num_bytes <= most * num_weights
    assert "bit" in form or num_bytes == most * num_weights
    assert model.kinds == {(torch.bfloat16 if form == "bf16" else torch.float32, "cpu")}


class Weighed(Fused):
    def on_train_batch_end(self, *unused: Any) -> None:
        self.seen.append(device_module().memory_allocated())


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_an_average_takes_nothing_of_the_device(mode, fit, monkeypatch):
    monkeypatch.setattr(averages, "PART_ELEMENTS", 512)

    def weigh(*callbacks: pl.Callback) -> list[object]:
        strategy = FSDPOffloadStrategy(**{"min_params": 100, **mode})
        model = fit(Weighed, *callbacks, strategy=strategy, **ON_DEVICE)
        parts = [part for one in callbacks for part in (*average_of(one).parameters(), *average_of(one).buffers())]
        assert {part.device.type for part in parts} <= {"cpu"}
        return model.seen

    with_it = weigh(EMAWeightAveraging(decay=0.9))
    leave_group()  # and the first module
    assert weigh() == with_it


class Summed(Split):
    """Steps by a kernel that rounds alike on the host and on the device."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.125, foreach=False)


@pytest.mark.parametrize("mode", ["params", "half"])
def test_averages_are_those_of_a_plain_run(mode, train, monkeypatch):
    monkeypatch.setattr(averages, "PART_ELEMENTS", 512)
    fitted = []
    for one in (mode, None):
        callback = EMAWeightAveraging(decay=0.9)
        train(Summed, one, callback, max_epochs=2)
        fitted.append(average_of(callback).cpu())
        leave_group()
    assert_equal_weights(*fitted)
