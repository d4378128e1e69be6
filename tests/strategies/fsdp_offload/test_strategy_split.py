"""``master="split"``: the bits of ``master="fp32"``, in 14 bytes of the host for each weight in place of 18."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from support.helpers import assert_equal_weights
from support.host_layers import Layers, exceptions, host_bytes
from support.offload_nets import MODES, leave_group
from torch import Tensor, nn

from lightning_vram.private_names.fsdp2 import calls_derived_dispatch

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
OPTIMIZERS: dict[str, Any] = {
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
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_weights_and_gradients_are_the_same_to_the_bit(optimizer, options, fit_both):
    fit_both(partial(Layers, optimizer, num_batches=8), **options)


@pytest.mark.quick_sample(1)
@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("offload", [MODES[mode] for mode in MODES if mode not in ("params", "none")], ids=str)
def test_it_goes_with_every_way_to_shard(offload, fit_both):
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
def test_weights_are_read_and_written_by_hand(offload, fit_both):
    split, plain = fit_both(partial(Handled, num_batches=12), offload)
    assert split.seen == plain.seen


class Kept(Layers):
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
    fit_both(partial(Kept, num_batches=12))


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize(("first", "second"), [("split", "fp32"), ("fp32", "split")])
def test_a_run_goes_on_from_a_checkpoint_of_either(first, second, kind, fit_layers, tmp_path):
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


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.01}, {"accumulate_grad_batches": 2}])
@pytest.mark.parametrize("form", ["8bit", "bf16", "fp32"])
def test_two_ranks_train_to_the_same_bits(form, options, fit_layers, tmp_path):
    for master in ("split", "fp32"):
        offload = {"master": master, "host_state": form}
        fit_layers(partial(Written, num_batches=12), offload, devices=2, **options)
    split, plain = (torch.load(tmp_path / f"{master}.pt") for master in ("split", "fp32"))
    assert split.keys() == plain.keys()
    assert all(torch.equal(split[name], plain[name]) for name in plain)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_weights_that_do_not_travel_as_bf16_are_refused(precision, fit_layers):
    needed = "precision='bf16-mixed' with narrow_transfers=True"
    message = f"ForkingOffload(master='split') needs {needed}, got {precision!r}."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        fit_layers(Layers, {"master": "split"}, precision=precision)
