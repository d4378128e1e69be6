"""``fsdp_offload`` in the Trainer: whatever a LightningModule does, weights are those of a plain run, to the bit."""

import gc
from contextlib import nullcontext
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from support.helpers import ForkingOffload, PlantedError, describe_module
from support.offload_nets import GAN, MODES, Fused, FusedCNN, Odd, Split, adamw
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_vram.techniques.sharding import FullSharding

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]


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


@pytest.mark.quick_sample(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [GAN, Freezing])
def test_manual_optimization(make, mode, same_in_modes):
    same_in_modes(make, (mode,))


class Seldom(Fused):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else self.loss(batch)


@pytest.mark.quick_sample(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", [Odd, FusedCNN])
def test_parameters_and_layers_of_all_kinds(make, mode, same_in_modes):
    same_in_modes(make, (mode,))


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.quick_sample(3)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Odd, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (Odd, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}),
        (Seldom, {"accumulate_grad_batches": 2}),
        (Odd, {"precision": "bf16-mixed"}),
        (Odd, {"precision": "64-true"}),
        (Fused, {"limit_val_batches": 1, "num_sanity_val_steps": 1, "val_check_interval": 1}),
    ],
)
def test_options_of_the_trainer(make, options, same_in_modes):
    same_in_modes(make, ("params", "optimizer"), **options)


def test_calls_of_the_trainer(same_in_modes):
    calls = ("validate", "fit", "test", "predict", "fit")
    same_in_modes(FusedCNN, ("params", "none"), calls=calls, limit_val_batches=1)


def test_predictions_are_those_of_a_plain_run(make_trainer):
    model = FusedCNN()
    torch.manual_seed(1)
    expected = make_trainer().predict(model)
    torch.manual_seed(1)
    ours = make_trainer(strategy=ForkingOffload()).predict(model)
    assert torch.equal(ours[0], expected[0])


class GANOnTwoRanks(GAN):
    def training_step(self, batch, batch_idx):
        super().training_step([part[self.trainer.global_rank :: self.trainer.world_size] for part in batch], batch_idx)


class Spread(Split):
    def on_train_start(self):
        assert self.trainer.world_size == 1 or isinstance(self.net.blocks[0].linear1.weight, DTensor)


@pytest.mark.quick_sample(1)
@pytest.mark.parametrize(
    ("make", "devices", "arguments"),
    [(GANOnTwoRanks, 2, {}), (Spread, 4, {"shard": "hybrid", "data_parallel_replicate_size": 2})],
    ids=["two ranks", "replicas of shards"],
)
def test_several_ranks_train_as_one_does(make, devices, arguments, same_as_baseline):
    options = {"devices": devices, "use_distributed_sampler": False}
    same_as_baseline(make, tolerance=1e-6, baseline={"devices": 1}, strategy=ForkingOffload(**arguments), **options)


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("error", [PlantedError, KeyboardInterrupt])
@pytest.mark.parametrize("hook", ["configure_optimizers", "on_train_start", "training_step", "on_train_batch_end"])
def test_a_fit_that_ends_early_leaves_a_plain_module(hook, error, make_trainer):
    model = FusedCNN()
    before = describe_module(model)

    def fail(*_):
        raise error

    setattr(model, hook, fail)
    with pytest.raises((PlantedError, KeyboardInterrupt, SystemExit)):
        make_trainer(strategy=ForkingOffload()).fit(model)
    delattr(model, hook)
    assert describe_module(model) == before
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
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
def test_what_was_made_before_sharding_counts(make, same_in_modes):
    same_in_modes(make, ("params", "none"))


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
