"""``host_state`` and ``master="split"``: fewer bytes of the host, to the same bits whatever way they are kept."""

import re
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.helpers import ForkingOffload, assert_equal_weights
from support.host_layers import ADAMW, Layers, exceptions, host_bytes
from support.offload_nets import MODES, leave_group
from torch import Tensor, nn
from torch.optim import NAdam, RAdam

from lightning_vram.optimizers import on_disk as disk_states
from lightning_vram.private_names.fsdp2 import calls_derived_dispatch, local_shard

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
FORMS = ("bf16", "8bit")
OPTIMIZERS: dict[str, Any] = {
    "AdamW": ADAMW,
    "amsgrad, one by one": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, foreach=False),
    "Adamax": torch.optim.Adamax,
    "NAdam": NAdam,
    "RAdam": RAdam,
}


# --- bytes ---


class Counted(Layers):
    """Counts the bytes of the host, but for the one weight of 131072 that takes more."""

    def on_train_batch_end(self, *unused: Any) -> None:
        self.host_bytes.append(host_bytes(self) - exceptions(self))


def num_weights(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def in_blocks(model: nn.Module) -> int:
    """Bytes of a moment in 8 bit: a number each, and a scale for each 128 or a smaller tensor."""
    return sum(n + 4 if (n := p.numel()) < 128 else -(-n // 128) * 132 for p in model.parameters())


@pytest.mark.parametrize(
    ("form", "master", "bytes_each"),
    # Where the CPU is the device, too, a copy that travels is made for each fetch.
    [("fp32", "fp32", 16), ("fp32", "split", 14), ("bf16", "fp32", 12), ("bf16", "split", 10), ("8bit", "split", 6)],
)
def test_a_weight_takes_as_many_bytes(form, master, bytes_each, fit_layers):
    model = fit_layers(partial(Counted, num_batches=5), {"host_state": form, "master": master})
    moments = 2 * in_blocks(model) if form == "8bit" else 0  # for the others they are in the number
    assert model.host_bytes[2:] == [bytes_each * num_weights(model) + moments] * 3
    assert form != "8bit" or model.host_bytes[-1] <= 8.2 * num_weights(model)


# --- the same bits ---


@pytest.mark.quick_sample(1)
@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("form", FORMS)
def test_weights_are_the_same_whatever_way_they_and_states_are_kept(form, optimizer, fit_layers, tmp_path, monkeypatch):
    make = partial(
        Layers, optimizer, num_batches=8 if optimizer is RAdam else 5
    )  # it is another from its sixth step on
    expected = fit_layers(make, {"host_state": form})
    assert not all(map(torch.equal, expected.parameters(), fit_layers(make).parameters()))
    assert_equal_weights(fit_layers(make, {"host_state": form, "offload": "optimizer"}), expected)
    assert_equal_weights(fit_layers(make, {"host_state": form, "nvme_path": tmp_path}), expected)
    monkeypatch.setattr(disk_states, "CHUNK_ELEMENTS", 4096)
    offload = {"host_state": form, "master": "split", "nvme_path": tmp_path}
    assert_equal_weights(fit_layers(make, offload), expected)


def test_on_the_device_moments_are_float32(fit_layers):
    make, everything = partial(Layers, num_batches=6), {"device_bytes": 1.0}
    assert_equal_weights(fit_layers(make, {"host_state": "8bit", **everything}), fit_layers(make, everything))


# --- checkpoints ---


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("form", FORMS)
def test_a_resumed_run_ends_at_the_same_bits(form, on_disk, kind, fit_layers, tmp_path):
    make, path = partial(Layers, num_batches=6), tmp_path / "last.ckpt"
    offload = {"host_state": form, "state_dict_type": kind, "master": "split"}
    fit_layers(make, offload).trainer.save_checkpoint(path)
    offload |= {"nvme_path": tmp_path} if on_disk else {}
    resumed = fit_layers(make, offload, ckpt_path=path, max_epochs=2)
    assert_equal_weights(resumed, fit_layers(make, {"host_state": form}, max_epochs=2))


class Saving(Layers):
    """Writes a checkpoint in the middle of a run, and notes the states."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/3.ckpt")
            self.trainer.strategy._finish_steps()
            self.states = states_of(self)


def states_of(model: pl.LightningModule) -> list[dict[str, Tensor]]:
    states = model.trainer.optimizers[0].state.values()
    return [{key: local_shard(value).float().clone() for key, value in state.items()} for state in states]


class Loaded(Layers):
    """Notes the states that it begins with."""

    def on_train_start(self) -> None:
        self.states = states_of(self)
        self.kinds = {local_shard(s["exp_avg"]).dtype for s in self.trainer.optimizers[0].state.values()}


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize(
    ("first", "second", "kind", "async_save"),
    [
        ("bf16", "fp32", "full", False),
        ("8bit", "fp32", "sharded", True),
        ("8bit", "bf16", "full", True),
        ("fp32", "bf16", "sharded", False),
    ],
)
def test_a_checkpoint_loads_whatever_host_state_is(first, second, async_save, kind, fit_layers, tmp_path):
    offload = {"host_state": first, "state_dict_type": kind, "async_save": async_save}
    saved = fit_layers(partial(Saving, num_batches=6), offload)
    offload = {"host_state": second, "async_save": True}
    loaded = fit_layers(partial(Loaded, num_batches=8), offload, ckpt_path=tmp_path / "3.ckpt")
    assert loaded.kinds == {torch.bfloat16 if second == "bf16" else torch.float32}
    for ours, theirs in zip(loaded.states, saved.states, strict=True):
        for key, value in theirs.items():
            is_rounded = second == "bf16" and key != "step"
            torch.testing.assert_close(ours[key], value.bfloat16().float() if is_rounded else value, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_a_full_checkpoint_is_one_of_a_plain_run(form, fit, fit_layers, tmp_path):
    saved = fit_layers(partial(Saving, num_batches=6), {"host_state": form})
    checkpoint = torch.load(tmp_path / "3.ckpt", weights_only=True)
    for state, theirs in zip(checkpoint["optimizer_states"][0]["state"].values(), saved.states, strict=True):
        assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
        assert {type(value) for value in state.values()} == {Tensor}
        assert all(torch.equal(state[key].float(), value) for key, value in theirs.items())
    model = fit(partial(Loaded, num_batches=8), ckpt_path=tmp_path / "3.ckpt")
    assert model.kinds == {torch.float32}
    for ours, theirs in zip(model.states, saved.states, strict=True):
        assert torch.equal(ours["exp_avg"], theirs["exp_avg"])


# --- around a run ---


class Kept(Layers):
    """Returns the same optimizer for each run."""

    def configure_optimizers(self) -> Any:
        if self.optimizer is ADAMW:
            self.optimizer = ADAMW(self.parameters())
        return self.optimizer


@pytest.mark.parametrize("form", FORMS)
def test_after_a_run_the_optimizer_steps_by_itself_and_in_another(form, fit_layers, make_trainer):
    model = fit_layers(partial(Kept, ADAMW, num_batches=4), {"host_state": form})
    narrow = {value.dtype for state in model.optimizer.state.values() for value in state.values() if value.dim()}
    assert narrow == {torch.bfloat16 if form == "bf16" else torch.float32}  # until somebody steps
    for host_state in (form, "fp32"):
        trainer = make_trainer(strategy=ForkingOffload(host_state=host_state), max_epochs=1, precision="bf16-mixed")
        trainer.fit(model)
        leave_group()
    model.optimizer.step()
    values = [value for state in model.optimizer.state.values() for value in state.values()]
    assert {(type(value), value.dtype) for value in values} == {(Tensor, torch.float32)}
    assert {float(state["step"]) for state in model.optimizer.state.values()} == {13.0}


# --- what is refused ---


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adafactor, torch.optim.RMSprop])
def test_optimizers_without_such_moments_are_refused(optimizer, fit_layers):
    message = (
        f"host_state='8bit' is for the moments of Adam, AdamW, Adamax, NAdam, RAdam, SGD with momentum and Lion, got "
        f"{optimizer.__name__}: use one of these, as torch.optim has it, or host_state='fp32'."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fit_layers(partial(Layers, optimizer, num_batches=1), {"host_state": "8bit"})


def test_weights_of_16_bit_are_refused(fit_layers):
    message = (
        "host_state='bf16' is for the moments of float32 weights, got torch.bfloat16 in AdamW: use "
        "precision='bf16-mixed' or '32-true', or host_state='fp32'."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fit_layers(partial(Layers, num_batches=1), {"host_state": "bf16"}, precision="bf16-true")


# --- master="split" ---


SPLIT_OPTIMIZERS: dict[str, Any] = {
    "AdamW": partial(torch.optim.AdamW, lr=1e-2),
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "NAdam, one by one": partial(torch.optim.NAdam, lr=1e-2, foreach=False),
    "whole matrices": torch.optim.Adafactor,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "early steps": {},
    "clipped": {"gradient_clip_val": 0.01},
    "clipped by value": {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 2},
}


@pytest.fixture
def fit_both(fit_layers):
    """Train with split and with whole weights, and compare weights and gradients; returns both models."""

    def fit_both(make=Layers, offload=None, **options):
        arguments = ({"master": master, **(offload or {})} for master in ("split", "fp32"))
        split, plain = (fit_layers(make, one, **options) for one in arguments)
        check(split, plain)
        return split, plain

    return fit_both


def check(split: nn.Module, plain: nn.Module) -> None:
    assert_equal_weights(split, plain)
    for ours, theirs in zip(split.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        assert ours.grad is None or torch.equal(ours.grad, theirs.grad)


@pytest.mark.quick_sample(3)
@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("optimizer", SPLIT_OPTIMIZERS.values(), ids=SPLIT_OPTIMIZERS)
def test_split_weights_and_gradients_are_the_same_to_the_bit(optimizer, options, fit_both):
    fit_both(partial(Layers, optimizer, num_batches=8), **options)


@pytest.mark.quick_sample(1)
@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("offload", [MODES[mode] for mode in MODES if mode not in ("params", "none")], ids=str)
def test_split_weights_go_with_every_way_to_shard(offload, fit_both):
    fit_both(partial(Layers, num_batches=8), offload)


class Adapted(Layers):
    """A frozen base, and an adapter that is trained; counts the bytes of the host."""

    def __init__(self, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(**options)
        self.base = nn.Linear(16, 16).requires_grad_(requires_grad=False).to(dtype)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(self.base(batch), batch_idx)

    def on_train_batch_end(self, *unused: Any) -> None:
        self.host_bytes.append(host_bytes(self) - exceptions(self))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_weights_take_their_own_bytes(dtype, fit_both):
    split, _ = fit_both(partial(Adapted, dtype, num_batches=6))
    frozen = sum(p.nbytes for p in split.base.parameters())
    assert split.host_bytes[-1] == frozen + 14 * sum(p.numel() for p in split.net.parameters())


class Handled(Layers):
    """Reads and writes weights by hand, in every way at hand, and looks at gradients."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[float] = []

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        first, last = self.net[0].weight, self.net[2].weight
        self.seen += [whole(first).sum().item(), whole(last.grad).norm().item()]
        if batch_idx % 4 == 0:
            first.data = first.data * 0.9
        elif batch_idx % 4 == 1:
            first.add_(0.01)
            self.net[4].bias.data.mul_(1.01)
        elif batch_idx % 4 == 2:
            torch._foreach_mul_(list(self.net.parameters()), 0.99)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(whole(self.net[0].weight.grad).double().sum().item())


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("offload", [{}, {"offload": "optimizer"}])
def test_split_weights_are_read_and_written_by_hand(offload, fit_both):
    split, plain = fit_both(partial(Handled, num_batches=8), offload)
    assert split.seen == plain.seen


class Holding(Layers):
    """Keeps what it once got hold of, and reads and writes it later."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.local = self.net[0].weight.to_local()
        elif batch_idx > 3:
            assert torch.equal(self.local, self.net[0].weight.to_local())
        if batch_idx > 6:
            self.local.mul_(0.9)


@pytest.mark.skipif(not calls_derived_dispatch, reason="such writes are not seen before torch 2.13")
def test_memory_that_somebody_holds_stays_the_weight(fit_both):
    fit_both(partial(Holding, num_batches=12))


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize(("first", "second"), [("split", "fp32"), ("fp32", "split")])
def test_a_run_goes_on_from_a_checkpoint_of_split_or_whole_weights(first, second, kind, fit_layers, tmp_path):
    make, path = partial(Layers, num_batches=4), tmp_path / "last.ckpt"
    fit_layers(make, {"master": first, "state_dict_type": kind}).trainer.save_checkpoint(path)
    leave_group()
    resumed = fit_layers(make, {"master": second, "state_dict_type": kind}, ckpt_path=path, max_epochs=2)
    leave_group()
    check(resumed, fit_layers(make, max_epochs=2))


class Written(Handled):
    """Leaves its weights in a file: several ranks train in processes of their own."""

    def on_train_end(self) -> None:
        self.trainer.strategy._finish_steps()
        weights = {name: whole(parameter).detach().clone() for name, parameter in self.named_parameters()}
        if self.trainer.is_global_zero:
            torch.save(weights, f"{self.trainer.default_root_dir}/{self.trainer.strategy.arguments.master}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.01}, {"accumulate_grad_batches": 2}])
@pytest.mark.parametrize("form", ["8bit", "bf16", "fp32"])
def test_two_ranks_train_to_the_same_bits(form, options, fit_layers, tmp_path):
    for master in ("split", "fp32"):
        offload = {"master": master, "host_state": form}
        fit_layers(partial(Written, num_batches=8), offload, devices=2, **options)
    split, plain = (torch.load(tmp_path / f"{master}.pt") for master in ("split", "fp32"))
    assert split.keys() == plain.keys()
    assert all(torch.equal(split[name], plain[name]) for name in plain)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_weights_that_do_not_travel_as_bf16_are_not_split(precision, fit_layers):
    needed = "precision='bf16-mixed' with narrow_transfers=True"
    message = f"ForkingOffload(master='split') needs {needed}, got {precision!r}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fit_layers(Layers, {"master": "split"}, precision=precision)


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("async_save", [False, True])
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_checkpoint_in_the_middle_holds_split_weights_and_changes_none(kind, async_save, fit_layers, tmp_path):
    trained, saved = [], []
    for master in ("split", "fp32"):
        offload = {"master": master, "state_dict_type": kind, "async_save": async_save}
        trained.append(fit_layers(partial(Saving, num_batches=6), offload))
        leave_group()
        path = (tmp_path / "3.ckpt").rename(tmp_path / f"{master}.ckpt")
        saved.append(
            fit_layers(partial(Layers, num_batches=6), ckpt_path=path, max_steps=4)
        )  # loads, trains no further
        leave_group()
    check(*trained)
    assert_equal_weights(*saved)


class Evaluated(Layers):
    """Computes without autocast between its steps."""

    def on_train_batch_end(self, *unused: Any) -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            self.host_bytes.append(self.net(torch.ones(1, 16)).sum().item())


def test_split_weights_are_sent_whole_where_they_are_not_cast(fit_both):
    split, plain = fit_both(partial(Evaluated, num_batches=6))
    assert split.host_bytes == plain.host_bytes
