"""``fsdp_offload`` in the Trainer: whatever a LightningModule does, weights are those of a plain run, to the bit."""

import gc
from contextlib import nullcontext
from weakref import ref

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from support.helpers import ForkingOffload, PlantedError, assert_equal_weights, describe_module, fail_in
from support.offload_nets import GAN, MODES, Fused, FusedCNN, Odd, Split, adamw, leave_group
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_vram.techniques.sharding import FullSharding

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]


@pytest.fixture(autouse=True)
def _alone():
    yield
    leave_group()


@pytest.fixture
def run(make_trainer):
    def run(make, strategy=None, calls=("fit",), **arguments):
        """Train from scratch; returns the model and its trainer."""
        pl.seed_everything(0, verbose=False)
        model = make()
        trainer = make_trainer(strategy=strategy or "auto", devices=1, **{"max_epochs": 1, **arguments})
        before, parameters = describe_module(model), list(model.parameters())
        for call in calls:
            getattr(trainer, call)(model)
        if strategy is not None:
            assert describe_module(model) == before
            assert all(now is then for now, then in zip(model.parameters(), parameters, strict=True))
        return model

    return run


@pytest.fixture
def check(run):
    def check(make, calls=("fit",), modes=("params", "none"), **arguments):
        """Train plain and sharded, and compare everything."""
        plain = run(make, None, calls, **arguments)
        for mode in modes:
            ours = run(make, ForkingOffload(**MODES[mode]), calls, **arguments)
            assert_equal_weights(ours, plain)
            assert ours.seen == plain.seen

    return check


class Accumulating(Fused):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.05)
            optimizer.step()
            optimizer.zero_grad()


class Repeating(Accumulating):
    """Several steps in a training step, each on what the one before has written."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        for _ in range(2):
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.seen.append(loss.item())


class ByValue(GAN):
    algorithm = "value"


class Freezing(GAN):
    """Freezes parameters by hand, some of layers and some that are gathered at that time."""

    def training_step(self, batch, batch_idx):
        generator, critic = self.optimizers()
        for part in (self.critic, self.small):
            part.requires_grad_(requires_grad=False)
        for _ in range(2):
            fake = self.fake(batch[1])
            self.manual_backward((self.critic(fake) + self.small(fake).sum(1)).mean())
        generator.step()
        generator.zero_grad()
        for part in (self.critic, self.small):
            part.requires_grad_(requires_grad=True)
        self.seen.append([p.grad is None for p in (*self.critic.parameters(), *self.small.parameters())])
        fake = self.fake(batch[1]).detach()
        self.manual_backward((self.critic(fake) + self.small(fake).sum(1)).mean())
        critic.step()
        critic.zero_grad()


@pytest.mark.parametrize("make", [GAN, Freezing])
def test_two_optimizers_of_manual_optimization(make, check):
    check(make, modes=MODES, limit_val_batches=0)


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("make", [ByValue, Accumulating, Repeating])
def test_manual_optimization(make, check):
    check(make, modes=("params", "all in the root"), limit_val_batches=0)


class Scheduled(Fused):
    interval = "epoch"

    def configure_optimizers(self):
        optimizer = adamw(self.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": self.interval}]


class ScheduledBySteps(Scheduled):
    interval = "step"


class OnPlateau(Fused):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = adamw(self.parameters())
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9, threshold_mode="abs")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}


class Groups(Fused):
    """Two groups; the head is not trained."""

    def configure_optimizers(self):
        matrices = [p for p in self.net.blocks.parameters() if p.ndim > 1]
        vectors = [p for p in self.net.blocks.parameters() if p.ndim <= 1]
        return adamw([{"params": matrices, "weight_decay": 0.1, "lr": 3e-3}, {"params": vectors, "weight_decay": 0.0}])


class Warmup(Fused):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 + self.trainer.global_step)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


class Skipping(Fused):
    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        if batch_idx % 2:
            optimizer_closure()
            self.seen.append(self.net.head.weight.grad.norm().item())
        else:
            optimizer.step(closure=optimizer_closure)


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("make", [Scheduled, ScheduledBySteps, OnPlateau, Groups, Warmup, Skipping])
def test_optimizers_and_schedules(make, check):
    check(make, modes=("params",), max_epochs=3, limit_val_batches=0)


class Seldom(Fused):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else self.loss(batch)


class InPlace(Fused):
    """Changes what layers return, which is a view, in place."""

    def loss(self, batch):
        logits = self.net(batch[0])
        logits += 1
        logits *= 2
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("make", [Odd, FusedCNN, InPlace])
def test_parameters_and_layers_of_all_kinds(make, check):
    check(make, modes=MODES)


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("make", [Odd, FusedCNN])
@pytest.mark.parametrize(
    "arguments",
    [
        {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    ],
    ids=["accumulation and clipping", "clipping by value"],
)
def test_accumulation_and_clipping(make, arguments, check):
    check(make, modes=("params", "optimizer"), **arguments)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("accumulate_grad_batches", [1, 2])
def test_a_training_step_that_returns_nothing(accumulate_grad_batches, check):
    check(Seldom, accumulate_grad_batches=accumulate_grad_batches)


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_precisions(precision, check):
    check(Odd, modes=("params", "optimizer"), precision=precision)
    check(FusedCNN, modes=("params",), precision=precision)


def test_anomaly_detection_and_one_batch_again_and_again(check):
    check(Fused, modes=("params",), limit_train_batches=2, limit_val_batches=0, detect_anomaly=True)
    check(Fused, modes=("params",), overfit_batches=1)


@pytest.mark.parametrize("arguments", [{}, {"val_check_interval": 1, "accumulate_grad_batches": 2}])
def test_validation_and_sanity_checks_within_a_fit(arguments, check):
    check(Fused, num_sanity_val_steps=1, **arguments)


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize(
    "calls", [("validate",), ("test",), ("predict",), ("fit", "fit"), ("validate", "fit", "test", "predict", "fit")]
)
def test_calls_of_the_trainer(calls, check):
    check(FusedCNN, calls, max_epochs=1)


def test_predictions_are_those_of_a_plain_run(make_trainer):
    model = FusedCNN()
    torch.manual_seed(1)
    expected = make_trainer().predict(model)
    torch.manual_seed(1)
    ours = make_trainer(strategy=ForkingOffload()).predict(model)
    assert torch.equal(ours[0], expected[0])


class Compiled(Fused):
    """One layer compiled in place, one wrapped."""

    def __init__(self):
        super().__init__()
        torch._dynamo.reset()
        self.net.blocks[0].compile(backend="aot_eager")
        self.net.blocks[1] = torch.compile(self.net.blocks[1], backend="aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # dynamo's
def test_compiled_layers(check):
    check(Compiled, modes=("params",), limit_val_batches=0)


class OnTwoRanks(Split):
    def on_train_start(self):
        assert self.trainer.world_size == 1 or isinstance(self.net.blocks[0].linear1.weight, DTensor)


class GANOnTwoRanks(GAN):
    def training_step(self, batch, batch_idx):
        super().training_step([part[self.trainer.global_rank :: self.trainer.world_size] for part in batch], batch_idx)


@pytest.mark.parametrize("make", [OnTwoRanks, GANOnTwoRanks])
def test_two_ranks_train_as_one_does(make, run, make_trainer):
    plain = run(make, limit_val_batches=0)
    pl.seed_everything(0, verbose=False)
    ours = make()
    arguments = {"max_epochs": 1, "limit_val_batches": 0, "use_distributed_sampler": False}
    make_trainer(strategy=ForkingOffload(), devices=2, **arguments).fit(ours)
    for name, parameter in ours.named_parameters():
        assert torch.allclose(parameter, plain.get_parameter(name), rtol=0, atol=1e-6), name


def test_replicas_of_shards_train_as_one_rank_does(run, make_trainer):
    plain = run(Split, limit_val_batches=0)
    pl.seed_everything(0, verbose=False)
    ours = Split()
    strategy = ForkingOffload(shard="hybrid", data_parallel_replicate_size=2)
    arguments = {"max_epochs": 1, "limit_val_batches": 0, "use_distributed_sampler": False}
    make_trainer(strategy=strategy, devices=4, **arguments).fit(ours)
    for name, parameter in ours.named_parameters():
        assert torch.allclose(parameter, plain.get_parameter(name), rtol=0, atol=1e-6), name


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("hook", ["configure_optimizers", "on_train_start", "training_step", "on_train_batch_end"])
def test_a_fit_that_fails_leaves_a_plain_module(hook, make_trainer):
    model = FusedCNN()
    before = describe_module(model)
    fail_in(model, hook, make_trainer(strategy=ForkingOffload()))
    assert describe_module(model) == before
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    make_trainer(strategy=ForkingOffload()).fit(model)


class Interrupted(Fused):
    def on_train_batch_end(self, *unused):
        raise KeyboardInterrupt


def test_a_fit_that_is_interrupted_leaves_a_plain_module(make_trainer):
    model = Interrupted()
    before = describe_module(model)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        make_trainer(strategy=ForkingOffload()).fit(model)
    assert describe_module(model) == before
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


def test_planted_errors_are_not_swallowed(make_trainer):
    model = Fused()
    model.backward = lambda loss: (_ for _ in ()).throw(PlantedError)
    with pytest.raises(PlantedError):
        make_trainer(strategy=ForkingOffload()).fit(model)


class Keeping(Fused):
    """Keeps its losses, each with the graph that it comes from."""

    fails_after = None

    def training_step(self, batch, batch_idx):
        self.seen.append(super().training_step(batch, batch_idx))
        if len(self.seen) == self.fails_after:
            raise PlantedError
        return self.seen[-1]


@pytest.mark.parametrize("fails_after", [2, None], ids=["failed", "ended"])
def test_a_module_that_keeps_its_losses_keeps_nothing_else_of_its_fit(fails_after, make_trainer):
    model, trainer = Keeping(), make_trainer(strategy=ForkingOffload(), max_steps=2, limit_val_batches=0)
    model.fails_after = fails_after
    with pytest.raises(PlantedError) if fails_after else nullcontext():
        trainer.fit(model)
    parts = [ref(trainer), ref(trainer.strategy)]
    model.trainer = trainer = None
    gc.collect()
    assert [part() for part in parts] == [None, None]
    assert not any(type(one) is FullSharding for one in gc.get_objects())
    if fails_after:  # after a backward torch says that the graph is gone
        with pytest.raises(
            RuntimeError, match=r"^backward\(\) was called after the fit whose sharded weights it needs"
        ):
            model.seen[-1].backward()


class Reentrant(Fused):
    """Calls one layer three times, each in a reentrant checkpoint, which computes it again in the backward."""

    def loss(self, batch):
        hidden = self.net.embed(batch[0])
        for _ in range(3):
            hidden = checkpoint(self.net.blocks[0], hidden, use_reentrant=True)
        return F.cross_entropy(self.net.head(hidden).flatten(0, -2), batch[1].flatten())


class Marked(Fused):
    """Chooses groups by attributes of parameters, whose gradients go through hooks made with the module."""

    def __init__(self):
        super().__init__()
        for parameter in self.parameters():
            parameter.is_vector = parameter.ndim == 1
            parameter.register_hook(lambda gradient: gradient * 0.5)

    def configure_optimizers(self):
        vectors = [p for p in self.parameters() if getattr(p, "is_vector", False)]
        others = [p for p in self.parameters() if not getattr(p, "is_vector", False)]
        return adamw([{"params": vectors, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.5}])


class MadeBefore(Fused):
    """Makes its optimizer with its layers."""

    def __init__(self):
        super().__init__()
        self.made = adamw(self.parameters())

    def configure_optimizers(self):
        return self.made


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("make", [Reentrant, Marked, MadeBefore])
def test_what_was_made_before_sharding_counts(make, check):
    check(make, modes=("params", "none"), limit_val_batches=0)


class Listed(Fused):
    def __init__(self):
        super().__init__()
        self.kept = list(self.parameters())

    def loss(self, batch):
        return super().loss(batch) + sum(p.square().sum() for p in self.kept)


class Penalized(Fused):
    def loss(self, batch):
        return super().loss(batch) + self.net.blocks[0].linear1.weight.square().sum()


class Replaced(Fused):
    def on_train_batch_end(self, *unused):
        self.net.head.weight = nn.Parameter(self.net.head.weight.detach() * 0.9)


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Listed, "stored before the module was sharded"),
        (Penalized, "outside its forward"),
        (Replaced, "was replaced while it is sharded"),
    ],
)
def test_what_would_be_lost_without_a_word_is_refused(make, message, make_trainer):
    with pytest.raises(RuntimeError, match=message):
        make_trainer(strategy=ForkingOffload(), limit_val_batches=0).fit(make())
