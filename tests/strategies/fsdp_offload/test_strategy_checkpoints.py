"""Runs of ``fsdp_offload`` that are resumed through the Trainer go on as if nothing had been."""

import json
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import ForkingOffload, assert_equal_weights
from support.offload_nets import Split, adamw, leave_group

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of Lightning, about folders that exist
]
STEPS = 6  # two epochs of three batches; in the midst of one Lightning begins with its first batch again
PLAIN, DDP, FULL, SHARDED, LATER = "plain", "ddp", "full", "sharded", "full, saved in a thread"


class Noting(Split):
    """Writes the mean loss of each step to a file; its learning rate changes with every one."""

    def __init__(self, file):
        super().__init__()
        self.file = file

    def on_train_batch_end(self, outputs, batch, batch_idx):
        loss = self.trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean")
        if self.trainer.is_global_zero:
            with self.file.open("a") as file:
                file.write(json.dumps([self.trainer.global_step, loss.item()]) + "\n")

    def configure_optimizers(self):
        optimizer = adamw(self.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def make_strategy(name):
    if name == PLAIN:
        return "auto"
    if name == DDP:
        return "ddp_fork"
    return ForkingOffload(state_dict_type=SHARDED if name == SHARDED else FULL, async_save=name == LATER)


@pytest.fixture
def train(fit, tmp_path):
    def train(strategy, devices, name, *callbacks, make=Noting, **options):
        """Train for two epochs, and return the losses by step."""
        file = tmp_path / f"{name}.json"
        given = {"strategy": make_strategy(strategy), "devices": devices, "use_distributed_sampler": False}
        fit(
            partial(make, file),
            *callbacks,
            **{"max_epochs": 2, "enable_checkpointing": bool(callbacks)},
            **given,
            **options,
        )
        leave_group()
        return dict(map(json.loads, file.read_text().splitlines()))

    return train


@pytest.mark.quick_sample(1)
@pytest.mark.parametrize(
    ("saving", "resuming"),
    [
        ((FULL, 1), (SHARDED, 2)),
        ((LATER, 2), (FULL, 2)),
        ((SHARDED, 2), (FULL, 1)),
        ((PLAIN, 1), (FULL, 2)),
        ((SHARDED, 1), (SHARDED, 2)),
        ((FULL, 2), (PLAIN, 1)),
        ((DDP, 2), (SHARDED, 2)),
    ],
    ids=lambda case: f"{case[0]} on {case[1]}",
)
def test_a_resumed_run_goes_on_as_one_that_was_not_interrupted(saving, resuming, train, tmp_path):
    expected = train(PLAIN, 1, "expected")
    assert len(expected) == STEPS
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True)
    saved = train(*saving, "saved", saver, max_steps=4)
    assert (tmp_path / "step=2.ckpt").exists()
    assert (tmp_path / "last.ckpt").exists()
    resumed = train(*resuming, "resumed", ckpt_path=tmp_path / "step=3.ckpt")
    assert sorted(saved) == [1, 2, 3, 4]
    assert sorted(resumed) == [4, 5, 6]
    for step, loss in (saved | resumed).items():
        assert abs(loss - expected[step]) <= 1e-6, step


class Renaming(Noting):
    """Saves its weights under other names."""

    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = {f"old.{name}": value for name, value in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint):
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name.removeprefix("old."): value for name, value in state.items()}


def test_what_hooks_do_to_a_full_checkpoint_counts(train, tmp_path):
    saver, path = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1), tmp_path / "step=3.ckpt"
    expected = train(FULL, 1, "expected", saver, make=Renaming)
    assert all(name.startswith("old.") for name in torch.load(path, weights_only=True)["state_dict"])
    resumed = train(FULL, 1, "resumed", make=Renaming, ckpt_path=path)
    assert resumed == {step: loss for step, loss in expected.items() if step > 3}


class Unsafe:
    """No class that ``torch.load(weights_only=True)`` knows."""


class SavesAnObject(Noting):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["unsafe"] = Unsafe()


@pytest.mark.quick_sample(1)
@pytest.mark.parametrize("kind", [FULL, SHARDED, LATER])
def test_a_checkpoint_is_saved_after_the_fit_and_may_hold_what_its_reader_trusts(kind, make_trainer, tmp_path):
    model, other, path = SavesAnObject(tmp_path / "x"), Noting(tmp_path / "y"), tmp_path / "after.ckpt"
    trainer = make_trainer(strategy=make_strategy(kind), max_epochs=1, limit_val_batches=0)
    trainer.fit(model)
    trainer.save_checkpoint(path)
    with pytest.raises(Exception, match="weights_only"):
        make_trainer(strategy=make_strategy(kind)).validate(other, ckpt_path=path, weights_only=True)
    leave_group()
    make_trainer(strategy=make_strategy(kind)).validate(other, ckpt_path=path, weights_only=False)
    assert_equal_weights(other, model)


@pytest.mark.parametrize("kind", [FULL, SHARDED])
def test_a_checkpoint_can_be_saved_before_any_run(kind, make_trainer, tmp_path):
    trainer = make_trainer(strategy=make_strategy(kind), devices=1)
    model, other = Noting(tmp_path / "x"), Noting(tmp_path / "y")
    trainer.strategy.connect(model)
    trainer.save_checkpoint(tmp_path / "first.ckpt")
    make_trainer(strategy=make_strategy(kind), devices=1).validate(other, ckpt_path=tmp_path / "first.ckpt")
    assert_equal_weights(other, model)


def test_processes_that_have_not_met_save_nothing_together(make_trainer, tmp_path, monkeypatch):
    trainer = make_trainer(strategy=make_strategy(FULL), devices=1)
    trainer.strategy.connect(Split())
    monkeypatch.setattr(type(trainer.strategy), "world_size", 2)
    with pytest.raises(MisconfigurationException) as caught:
        trainer.save_checkpoint(tmp_path / "first.ckpt")
    assert str(caught.value) == (
        "Trainer.save_checkpoint: the 2 processes connect in the first fit, validate, test or predict. "
        "Save after that, or save module.state_dict()."
    )
