"""``OptimizerInBackward``: weights of the plain run to the bit, by the user's own optimizer, undone after the fit."""

from functools import partial
from types import FunctionType
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.plugins import MixedPrecision
from pytorch_optimizer import Lion
from support.helpers import Forking, LitTiny, PlantedError, TinyGPT, assert_equal_weights
from support.host_layers import ADAMW, Layers
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from lightning_vram import (
    AccumulationScheduler,
    ActivationCheckpointing,
    ActivationOffload,
    EarlyRelease,
    InPlaceFusion,
    LeanMixedPrecision,
    LowBitOptimizer,
    MicroBatching,
    MomentsInBF16,
    OptimizerInBackward,
)
from lightning_vram.core.tensors.codecs import LowBitTensor
from lightning_vram.private_names.fsdp2 import local_shard

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TWO_PASS, PREVIOUS = partial(OptimizerInBackward, "two-pass"), partial(OptimizerInBackward, "previous")


class Grouped(LitTiny):
    """Two groups, a learning rate that falls after each step, and weights that are tied."""

    def __init__(self, make: Any = optim.AdamW) -> None:
        super().__init__(TinyGPT())
        self.net.head.weight = self.net.embed.weight
        self.make = make

    def configure_optimizers(self) -> Any:
        large = [one for one in self.parameters() if one.dim() > 1]
        small = [one for one in self.parameters() if one.dim() <= 1]
        optimizer = self.make([{"params": large, "weight_decay": 0.1}, {"params": small}], lr=1e-2)
        schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.fixture
def assert_same(same_as_baseline):
    """Fit with the callback and without it, and with others beside it in both."""

    def assert_same(make: Any = Grouped, *others: Any, ours: Any = OptimizerInBackward, **options: Any) -> Any:
        baseline = {"callbacks": [other() for other in others]}
        callbacks = [ours(), *(other() for other in others)]
        return same_as_baseline(make, *callbacks, baseline=baseline, max_epochs=2, **options)[0]

    return assert_same


def test_weights_states_and_rates_are_those_of_the_plain_run(same_as_baseline):  # others: optimizer_table.txt
    early, plain = same_as_baseline(Grouped, OptimizerInBackward(), max_epochs=2)
    (ours,), (theirs,) = early.trainer.optimizers, plain.trainer.optimizers
    assert type(ours) is type(theirs)
    assert [group["lr"] for group in ours.param_groups] == [group["lr"] for group in theirs.param_groups]
    for one, other in zip(early.parameters(), plain.parameters(), strict=True):
        assert one.grad is None
        assert ours.state[one].keys() == theirs.state[other].keys()
        for key, value in theirs.state[other].items():
            assert torch.equal(torch.as_tensor(ours.state[one][key]), torch.as_tensor(value))


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-true"},
        {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2},
    ],
    ids=str,
)
def test_it_is_exact_with(options, assert_same):
    assert_same(**options)


@pytest.mark.parametrize(
    "other",
    [
        partial(ActivationCheckpointing, "net.blocks.*"),
        partial(ActivationOffload, min_offload_bytes=0),
        InPlaceFusion,
        EarlyRelease,
        partial(BackboneFinetuning, 1),
        partial(MicroBatching, 2),
        partial(AccumulationScheduler, {0: 2}),
    ],
    ids=lambda one: getattr(one, "func", one).__name__,
)
def test_it_is_exact_beside(other, assert_same):
    make = Finetuned if getattr(other, "func", None) is BackboneFinetuning else Grouped
    assert_same(make, other, ours=TWO_PASS, gradient_clip_val=0.05)


@pytest.mark.parametrize(
    "others",
    [
        [partial(ActivationCheckpointing, "net.blocks.*"), InPlaceFusion, EarlyRelease],
        [partial(MicroBatching, 2)],
        [partial(AccumulationScheduler, {0: 2})],
    ],
    ids=["recomputed", "micro-batches", "windows"],
)
def test_a_single_pass_is_exact_beside(others, assert_same):
    assert_same(Grouped, *others)


class Finetuned(LitTiny):
    """Its blocks are thawed in the second epoch, in a group of their own."""

    def __init__(self) -> None:
        super().__init__(TinyGPT())
        self.backbone = self.net.blocks

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.AdamW([one for one in self.parameters() if one.requires_grad], lr=1e-2)


def test_it_is_exact_with_the_precision_plugin(same_as_baseline):
    lean = {"plugins": [LeanMixedPrecision("bf16", recast_in_backward=True)]}
    same_as_baseline(Grouped, TWO_PASS(), baseline=lean, gradient_clip_val=0.05, **lean)


def make_scaler() -> Any:
    """Overflows in the first steps, and grows in the later ones."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**34, growth_interval=2, backoff_factor=2.0**-10)


SCALED: dict[str, Any] = {
    "Lightning's": lambda: MixedPrecision("16-mixed", "cpu", scaler=make_scaler()),
    "lean": lambda: LeanMixedPrecision("fp16", scaler=make_scaler()),
}


@pytest.mark.parametrize(
    ("name", "make", "options"),
    [
        ("Lightning's", partial(Grouped, partial(optim.AdamW, fused=True)), {}),  # skips in its kernel
        ("Lightning's", Grouped, {"gradient_clip_val": 0.02, "accumulate_grad_batches": 2}),
        ("lean", Grouped, {}),
        ("lean", Grouped, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
    ],
    ids=["fused", "norm of windows", "lean", "lean, value"],
)
def test_scaled_gradients_step_or_are_skipped_as_in_the_plain_run(name, make, options, fit):
    plain, early = (fit(make, *ours, plugins=[SCALED[name]()], max_epochs=3, **options) for ours in ([], [TWO_PASS()]))
    assert_equal_weights(early, plain)
    (ours, theirs) = (one.trainer.precision_plugin.scaler for one in (early, plain))
    assert ours.state_dict() == theirs.state_dict()
    assert ours.get_scale() < 2.0**34
    assert vars(ours).keys() == vars(theirs).keys()
    (mine,), (others,) = early.trainer.optimizers, plain.trainer.optimizers
    assert [one["step"] for one in mine.state.values()] == [one["step"] for one in others.state.values()]


def test_a_scaled_step_is_two_backwards_and_a_skipped_one_is_one(fit):
    calls: list[str] = []

    class Counting(Grouped):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            loss.register_hook(lambda _: calls.append("backward"))
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            assert all(one.grad is None for one in self.parameters())
            calls.append("end")

    model = fit(Counting, TWO_PASS(), plugins=[SCALED["lean"]()], max_epochs=1)
    steps = model.trainer.precision_plugin.overflow_steps
    assert 0 < steps < 3
    assert calls == ["backward", "end"] * steps + ["backward", "backward", "end"] * (3 - steps)


@pytest.mark.parametrize(("is_first", "options"), [(True, {"gradient_clip_val": 0.02}), (False, {})], ids=str)
def test_it_steps_moments_in_bf16_to_the_same_bits(options, is_first, fit):
    narrow = fit(Grouped, MomentsInBF16(), **options)
    callbacks = [MomentsInBF16(), TWO_PASS()]
    early = fit(Grouped, *(callbacks[::-1] if is_first else callbacks), **options)
    assert_equal_weights(early, narrow)
    (optimizer,) = early.trainer.optimizers
    assert all(state["exp_avg"].dtype == torch.bfloat16 for state in optimizer.state.values())
    assert isinstance(vars(optimizer)["step"], FunctionType)  # of the scheduler, as it was


@pytest.mark.parametrize(("make", "bits", "clip"), [(ADAMW, 8, None), (partial(Lion, lr=1e-3), 4, 0.02)])
def test_it_steps_moments_in_few_bits_to_the_same_bits(bits, clip, make, fit):
    model = partial(Layers, make, num_batches=4)
    low = fit(model, LowBitOptimizer(bits), gradient_clip_val=clip)
    early = fit(model, TWO_PASS(), LowBitOptimizer(bits), gradient_clip_val=clip)
    assert_equal_weights(early, low)
    (optimizer,) = early.trainer.optimizers
    kept = [value for state in optimizer.state.values() for value in state.values()]
    assert sum(isinstance(value, LowBitTensor) for value in kept) in (2, 4)  # of the two large parameters


class Stepping(Grouped):
    """Has a step and a zeroing of its own, as warm-ups have."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        if batch_idx == 1:
            optimizer_closure()
            optimizer.step()
        else:
            optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (batch_idx + 1)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad()


class Hooked(Grouped):
    """Counts what hooks of the optimizer see, and changes the rate within a forward."""

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        optimizer, self.calls = configured["optimizer"], []
        optimizer.register_step_pre_hook(lambda *_: self.calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: self.calls.append("after"))
        return configured

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.optimizers().param_groups[0]["weight_decay"] = 0.3 * batch_idx
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class LateHooks(Grouped):
    def on_train_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(halve)


def halve(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def test_what_hooks_of_the_user_do_to_gradients_counts(assert_same):
    assert_same(LateHooks)


@pytest.mark.parametrize("make", [Stepping, Hooked])
def test_steps_and_hooks_of_the_user_are_called_as_ever(make, assert_same):
    model = assert_same(make)
    assert getattr(model, "calls", ["before", "after"] * 6) == ["before", "after"] * 6


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_a_closure_that_is_called_before_the_step_is_clipped_too(algorithm, assert_same):
    assert_same(Stepping, ours=TWO_PASS, gradient_clip_val=1e-3, gradient_clip_algorithm=algorithm)


Clipped = partial(Layers, num_batches=5)


@pytest.mark.parametrize(("make", "accumulate"), [(Grouped, 2), (Clipped, 1)], ids=["tied", "layers"])
def test_two_passes_clip_to_the_same_bits(make, accumulate, assert_same):
    options = {"gradient_clip_val": 0.02, "accumulate_grad_batches": accumulate}
    assert_same(make, ours=TWO_PASS, **options)


def by_previous(num_epochs: int, window: int = 1) -> nn.Module:
    """Written out: each step is clipped by the norm of the one before, the first by its own."""
    pl.seed_everything(0, verbose=False)
    model = Clipped()
    model.trainer = pl.Trainer(logger=False, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False)
    optimizer, norm = model.configure_optimizers(), None
    batches = list(model.train_dataloader())
    for start in [start for _ in range(num_epochs) for start in range(0, len(batches), window)]:
        optimizer.zero_grad()
        for batch in batches[start : start + window]:
            (model.training_step(batch, 0) / window).backward()
        now = torch.nn.utils.get_total_norm([one.grad for one in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.02, now if norm is None else norm)
        optimizer.step()
        norm = now
    return model


@pytest.mark.parametrize("window", [1, 2])
def test_the_norm_of_the_step_before_clips_and_is_resumed(window, fit, tmp_path):
    options = {"gradient_clip_val": 0.02, "accumulate_grad_batches": window}
    whole = fit(Clipped, PREVIOUS(), max_epochs=2, **options)
    assert_equal_weights(whole, by_previous(2, window))
    fit(Clipped, PREVIOUS(), **options).trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert_equal_weights(fit(Clipped, PREVIOUS(), max_epochs=2, ckpt_path=tmp_path / "last.ckpt", **options), whole)


@pytest.mark.distributed
def test_the_norm_of_the_step_before_is_that_of_all_ranks(fit):
    ddp = {"devices": 2, "strategy": "ddp_fork", "use_distributed_sampler": False}
    model = fit(Clipped, PREVIOUS(), gradient_clip_val=0.02, **ddp)
    for ours, expected in zip(model.parameters(), by_previous(1).parameters(), strict=True):
        assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True)])
def test_checkpoints_are_plain_and_go_on_with_and_without(first, second, fit, tmp_path):
    def ours(is_used: bool) -> list[OptimizerInBackward]:
        return [OptimizerInBackward()] if is_used else []

    fit(Grouped, *ours(first)).trainer.save_checkpoint(tmp_path / "last.ckpt")
    fit(Grouped).trainer.save_checkpoint(tmp_path / "plain.ckpt")
    resumed = fit(Grouped, *ours(second), ckpt_path=tmp_path / "last.ckpt", max_epochs=2)
    assert_equal_weights(resumed, fit(Grouped, ckpt_path=tmp_path / "plain.ckpt", max_epochs=2))
    ours_, theirs = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["optimizer_states"][0] for name in ("last", "plain")
    )
    assert ours_["param_groups"] == theirs["param_groups"]
    assert ours_["state"].keys() == theirs["state"].keys()
    for place, state in theirs["state"].items():
        assert {type(value) for value in ours_["state"][place].values()} == {Tensor}
        assert all(torch.equal(ours_["state"][place][key], value) for key, value in state.items())


class Failing(Grouped):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        def fail(_: Tensor) -> None:
            raise PlantedError

        if self.global_step == 1:
            self.net.blocks[0].norm1.weight.register_hook(fail)
        return super().training_step(batch, batch_idx)


def test_it_is_undone(make_trainer):
    model, callback = Failing(), OptimizerInBackward()
    trainer = make_trainer(callbacks=[callback])
    with pytest.raises(PlantedError):
        trainer.fit(model)
    (optimizer,) = trainer.optimizers
    assert not isinstance(vars(optimizer).get("step"), type(callback))
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())
    assert not {"backward", "clip_gradients"} & vars(trainer.precision_plugin).keys()
    assert not optimizer._optimizer_step_pre_hooks
    before = {name: one.clone() for name, one in model.named_parameters()}
    for one in model.parameters():
        one._backward_hooks = None
    optimizer.zero_grad()
    model.loss(next(iter(model.train_dataloader()))).backward()
    assert all(one.grad is not None for one in model.parameters())
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters())
    optimizer.step()
    assert not any(torch.equal(one, before[name]) for name, one in model.named_parameters() if "embed" in name)


class Segments(Layers):
    """Uses one layer in two checkpointed segments."""

    use_reentrant = True

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        layer = nn.functional.linear
        weight = self.net[0].weight[:16]
        hidden = batch.requires_grad_()
        for _ in range(2):
            hidden = checkpoint(lambda x: layer(x, self.net[0].weight[:16]), hidden, use_reentrant=self.use_reentrant)
        return hidden.square().mean() + 0 * weight.sum()


def test_a_second_gradient_in_one_step_is_an_error(fit):
    message = (
        r"^OptimizerInBackward: 'net\.0\.weight' got a second gradient in one step, after it was stepped with the "
        r"first\. Call backward once per step, and checkpoint with use_reentrant=False\.$"
    )
    with pytest.raises(RuntimeError, match=message):
        fit(Segments, OptimizerInBackward())


def test_parameters_that_are_used_in_several_segments_step_once(assert_same, monkeypatch):
    monkeypatch.setattr(Segments, "use_reentrant", False)
    assert_same(partial(Segments, num_batches=4))


@pytest.mark.distributed
@pytest.mark.parametrize("window", [1, 2])
def test_two_passes_are_exact_on_two_ranks_of_ddp(window, fit):
    options = {"devices": 2, "strategy": "ddp_fork", "use_distributed_sampler": False, "gradient_clip_val": 0.02}
    if window > 1:
        options["accumulate_grad_batches"] = window
    fitted = []
    for ours in ([], [TWO_PASS()]):
        plugins = [SCALED["Lightning's"]()] if window == 1 else []
        fitted.append(fit(Clipped, *ours, plugins=plugins, **options))
    assert_equal_weights(*fitted)


class Shards(Layers):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for layer in self.net:
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def state_dict(self, **arguments: Any) -> dict[str, Any]:
        return {}  # the launcher cannot hand shards to the parent process

    def on_train_end(self) -> None:
        shards = {name: local_shard(one).detach() for name, one in self.named_parameters()}
        name = "early" if any(isinstance(one, OptimizerInBackward) for one in self.trainer.callbacks) else "plain"
        torch.save(shards, f"{self.trainer.default_root_dir}/{name}{self.trainer.global_rank}.pt")


@pytest.mark.distributed
def test_two_passes_are_exact_on_two_ranks_of_fsdp2(fit, tmp_path):
    options = {"gradient_clip_val": 0.02, "accumulate_grad_batches": 2, "devices": 2}
    for ours in ([], [TWO_PASS()]):
        fit(partial(Shards, ADAMW, num_batches=5), *ours, strategy=Forking(), **options)
    for rank in range(2):
        plain, early = (torch.load(tmp_path / f"{name}{rank}.pt") for name in ("plain", "early"))
        assert all(torch.equal(early[name], plain[name]) for name in plain)


@pytest.mark.distributed
def test_the_norm_of_the_step_before_is_that_of_all_shards(fit, tmp_path):
    fsdp2 = {"strategy": Forking(), "devices": 2, "use_distributed_sampler": False}
    fit(partial(Shards, ADAMW, num_batches=5), PREVIOUS(), gradient_clip_val=0.02, **fsdp2)
    shards = [torch.load(tmp_path / f"early{rank}.pt") for rank in range(2)]
    for name, expected in by_previous(1).named_parameters():
        assert torch.allclose(torch.cat([one[name] for one in shards]), expected, atol=1e-5)
