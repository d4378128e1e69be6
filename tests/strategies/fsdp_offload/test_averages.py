"""Lightning's averages of weights under ``fsdp_offload`` are those of a plain run, as shards on the host."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from mutations.sharding import late_threads
from support.helpers import ForkingOffload, PlantedError, assert_equal_weights
from support.offload_nets import MODES, FusedCNN, Odd, Split, leave_group
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lightning_vram.private_names.fsdp2 import calls_derived_dispatch, own_shard_of
from lightning_vram.private_names.lightning import average_of

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of Lightning, about folders that exist
]
AVERAGES: dict[str, Any] = {
    "EMA": partial(EMAWeightAveraging, decay=0.9),
    "EMA, some steps": partial(EMAWeightAveraging, decay=0.9, update_every_n_steps=2, use_buffers=False),
    "mean": WeightAveraging,
    "EMA of many at once": partial(WeightAveraging, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=False),
}


@pytest.fixture(autouse=True)
def _slow_path():
    """A plain run validates by other kernels of transformers, and rounds otherwise."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


class Seeing:
    """Notes what validation sees of the average."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.loss(batch).item())


class Net(Seeing, Split):
    pass


class Images(Seeing, FusedCNN):
    """Its average has buffers."""


class Mixed(Seeing, Odd):
    """Scalars, which are whole; what is frozen or never used."""


@pytest.fixture
def train(fit):
    def train(make: Any, strategy: Any, average: Any, **options: Any) -> Any:
        callback = average()
        given = {"max_epochs": 2, "limit_val_batches": 1, "num_sanity_val_steps": 1, "use_distributed_sampler": False}
        model = fit(make, callback, strategy=strategy, **{**given, **options})
        vars(model).update(average=average_of(callback))  # as no part of the module
        leave_group()
        return model

    return train


def check_weights(ours: Any, plain: Any) -> None:
    assert_equal_weights(ours.average, plain.average)
    assert_equal_weights(ours, plain)


def check(ours: Any, plain: Any) -> None:
    check_weights(ours, plain)
    assert ours.seen == plain.seen
    assert len(plain.seen) == 1 + plain.trainer.current_epoch
    assert {type(p) for p in ours.average.parameters()} == {torch.nn.Parameter}
    assert not any(p.is_meta or p.numel() == 0 for p in ours.average.parameters())


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.quick_sample(1)
@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize("make", [Net, Images, Mixed])
def test_averages_are_those_of_a_plain_run(make, average, train):
    with late_threads():
        ours = train(make, ForkingOffload(), average)
    check(ours, train(make, "auto", average))


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.slow
@pytest.mark.parametrize("offload", MODES.values(), ids=MODES)
def test_wherever_the_shards_are(offload, train):
    average = AVERAGES["EMA"]
    check(train(Mixed, ForkingOffload(**offload), average), train(Mixed, "auto", average))
    if offload.get("offload") != "none":
        given = {"precision": "bf16-mixed"}
        split = train(Net, ForkingOffload(master="split", **offload), average, **given)
        check(split, train(Net, ForkingOffload(**offload), average, **given))


class Writing(Net):
    """Writes to its weights after each update of the average, which was begun before."""

    @torch.no_grad()
    def on_train_batch_end(self, *unused: Any) -> None:
        for parameter in self.parameters():
            parameter.mul_(0.99)


class WritingByOptimizer(Mixed):
    """Writes by way of its optimizer within the next step: to shards of what is gathered."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for parameter in self.trainer.optimizers[0].param_groups[0]["params"]:
                parameter.mul_(0.99)
        return super().training_step(batch, batch_idx)


needs_dispatch = pytest.mark.skipif(not calls_derived_dispatch, reason="such writes are not seen before torch 2.13")


@pytest.mark.quick_sample(1)
@pytest.mark.parametrize("make", [Writing, pytest.param(WritingByOptimizer, marks=needs_dispatch)])
def test_weights_that_are_written_by_hand_are_averaged_as_they_were(make, train):
    with late_threads():
        ours = train(make, ForkingOffload(), AVERAGES["EMA"])
    check(ours, train(make, "auto", AVERAGES["EMA"]))


class Saving(Net):
    """Writes a checkpoint after its first epoch."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/first.ckpt", weights_only=False)


KINDS: dict[str, Any] = {
    "plain": lambda: "auto",
    "full": lambda: ForkingOffload(),
    "sharded": lambda: ForkingOffload(state_dict_type="sharded"),
    "full, later": lambda: ForkingOffload(async_save=True),
}


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize(
    ("first", "second"), [("sharded", "full"), ("full", "plain"), ("plain", "sharded"), ("full, later", "full")]
)
def test_a_run_goes_on_from_its_checkpoint(first, second, train, tmp_path):
    average, path = AVERAGES["EMA"], tmp_path / "first.ckpt"
    unbroken = train(Saving, KINDS[first](), average, num_sanity_val_steps=0)

    resumed = train(Net, KINDS[second](), average, ckpt_path=path, num_sanity_val_steps=0)

    assert_equal_weights(resumed.average, unbroken.average)
    assert_equal_weights(resumed, unbroken)
    assert resumed.seen == unbroken.seen[1:]


class Counted(Net):
    """Counts the bytes of its average, each memory once."""

    def on_train_batch_end(self, *unused: Any) -> None:
        (callback,) = [one for one in self.trainer.callbacks if isinstance(one, WeightAveraging)]
        parts = [own_shard_of(p) for p in average_of(callback).parameters()]
        assert {part.device.type for part in parts} == {"cpu"}
        self.num_bytes = sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parts}.values())


class OnTwo(ForkingOffload):
    """Leaves in a file what a rank has when the fit is over: each has trained in a process of its own."""

    def teardown(self) -> None:
        module, trainer = self.lightning_module, self.lightning_module.trainer
        super().teardown()
        (callback,) = [one for one in trainer.callbacks if isinstance(one, WeightAveraging)]
        state = {"module": module.state_dict(), "average": average_of(callback).state_dict(), "bytes": module.num_bytes}
        torch.save(state, f"{trainer.default_root_dir}/{trainer.global_rank}.pt")


class SavingCounted(Counted, Saving):
    pass


@pytest.mark.slow
def test_two_ranks_have_half_of_the_average_each_and_four_bytes_for_each_weight(train, tmp_path):
    average = AVERAGES["EMA"]
    train(SavingCounted, OnTwo(state_dict_type="sharded"), average, devices=2, num_sanity_val_steps=0)
    plain = train(Net, "auto", average, num_sanity_val_steps=0)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    for key, expected in (("module", plain.state_dict()), ("average", plain.average.state_dict())):
        for name, value in expected.items():
            assert torch.equal(ranks[0][key][name], ranks[1][key][name])
            torch.testing.assert_close(ranks[0][key][name], value, rtol=1e-4, atol=1e-6)
    assert sum(rank["bytes"] for rank in ranks) == 4 * sum(p.numel() for p in plain.parameters())

    resumed = train(Net, ForkingOffload(), average, ckpt_path=tmp_path / "first.ckpt", num_sanity_val_steps=0)

    for one, other in zip(resumed.average.parameters(), plain.average.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


class Failing(Net):
    """Its thread fails while an average is to be moved."""

    def on_train_batch_end(self, *unused: Any) -> None:
        raise PlantedError


def fail(*unused: Any) -> None:
    raise PlantedError


@pytest.mark.parametrize("average", [EMAWeightAveraging, partial(WeightAveraging, avg_fn=fail)])
def test_what_fails_leaves_a_whole_module(average, make_trainer):
    callback, model = average(), Failing() if average is EMAWeightAveraging else Net()
    with pytest.raises(PlantedError):
        make_trainer(strategy=ForkingOffload(), callbacks=[callback], max_epochs=2).fit(model)
    assert {type(p) for p in average_of(callback).parameters()} == {torch.nn.Parameter}
    assert all(p.numel() and type(p) is torch.nn.Parameter for p in model.parameters())


def test_a_checkpoint_without_an_average_is_where_one_begins(train, fit, tmp_path):
    path = tmp_path / "first.ckpt"
    fit(Net, strategy=ForkingOffload()).trainer.save_checkpoint(path)
    leave_group()
    message = "The checkpoint has no averaged weights: WeightAveraging starts from its weights."
    with pytest.warns(UserWarning, match=f"^{re.escape(message)}$"):
        ours = train(Net, ForkingOffload(), AVERAGES["EMA"], ckpt_path=path)
    check_weights(ours, train(Net, "auto", AVERAGES["EMA"], ckpt_path=path))


class Growing(Callback):
    """Gives the module another layer at the setup."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.adapter = torch.nn.Linear(16, 16)


def test_a_module_that_has_grown_since_it_was_copied_is_refused(fit):
    message = (
        "EMAWeightAveraging copied the module when it had 27 parameters; now it has 29. Put callbacks that "
        "change the module before it in Trainer(callbacks=...)."
    )
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        fit(Net, EMAWeightAveraging(), Growing(), strategy=ForkingOffload())
