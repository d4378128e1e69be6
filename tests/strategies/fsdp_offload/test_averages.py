"""Lightning's averages of weights under ``fsdp_offload`` are those of a plain run, as shards on the host."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from mutations.sharding import late_threads
from support.helpers import ForkingOffload, assert_equal_weights
from support.offload_nets import MODES, FusedCNN, Odd, Split, leave_group
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lightning_vram.core.host import split_weights
from lightning_vram.optimizers.on_host import averages, split_steps
from lightning_vram.private_names.fsdp2.sharded_tensors import own_part_of
from lightning_vram.private_names.lightning.callbacks import average_of

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
def _alone():
    yield
    leave_group()


@pytest.fixture
def _small_parts(monkeypatch):
    """Weights in several parts, and parts of several weights."""
    for module in (averages, split_weights, split_steps):
        monkeypatch.setattr(module, "PART_ELEMENTS", 512)


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
def fit(make_trainer, tmp_path):
    def fit(make: Any, strategy: Any, average: Any, *, ckpt_path: Any = None, **options: Any) -> Any:
        torch.manual_seed(0)
        model, callback = make(), average()
        given = {"max_epochs": 2, "limit_val_batches": 1, "num_sanity_val_steps": 1, **options}
        trainer = make_trainer(strategy=strategy, callbacks=[callback], use_distributed_sampler=False, **given)
        torch.manual_seed(1)
        trainer.fit(model, ckpt_path=ckpt_path)
        model.average, model.saved_by = average_of(callback), trainer
        leave_group()
        return model

    return fit


def check(ours: Any, plain: Any) -> None:
    assert_equal_weights(ours.average, plain.average)
    assert_equal_weights(ours, plain)
    assert ours.seen == plain.seen
    assert len(plain.seen) == 1 + plain.saved_by.current_epoch
    assert {type(p) for p in ours.average.parameters()} == {torch.nn.Parameter}
    assert not any(p.is_meta or p.numel() == 0 for p in ours.average.parameters())


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize("make", [Net, Images, Mixed])
def test_averages_are_those_of_a_plain_run(make, average, fit):
    with late_threads():
        ours = fit(make, ForkingOffload(), average)
    check(ours, fit(make, "auto", average))


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("options", MODES.values(), ids=MODES)
def test_wherever_the_shards_are(options, fit):
    average = AVERAGES["EMA"]
    check(fit(Mixed, ForkingOffload(**options), average), fit(Mixed, "auto", average))


def test_with_states_on_a_disk(fit, tmp_path):
    average = AVERAGES["EMA"]
    check(fit(Net, ForkingOffload(nvme_path=tmp_path), average), fit(Net, "auto", average))


@pytest.mark.usefixtures("_small_parts")
@pytest.mark.parametrize("options", [{}, {"offload": "optimizer"}, {"device_bytes": 0.3}])
def test_of_weights_that_are_split_at_rest(options, fit):
    given = {"precision": "bf16-mixed"}
    split = fit(Net, ForkingOffload(master="split", **options), AVERAGES["EMA"], **given)
    check(split, fit(Net, ForkingOffload(**options), AVERAGES["EMA"], **given))


@pytest.mark.parametrize("options", [{"gradient_clip_val": 0.01}, {"accumulate_grad_batches": 2}])
def test_however_the_optimizer_is_stepped(options, fit):
    ours, plain = (fit(Net, strategy, WeightAveraging, **options) for strategy in (ForkingOffload(), "auto"))
    if "gradient_clip_val" in options:  # the norm of shards is added up in another order
        for one, other in zip(ours.average.parameters(), plain.average.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    else:
        check(ours, plain)


class Saving(Net):
    """Writes a checkpoint after its first epoch."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.trainer.save_checkpoint(f"{self.trainer.default_root_dir}/first.ckpt", weights_only=False)


class Resumed(Net):
    pass


KINDS: dict[str, Any] = {
    "plain": "auto",
    "full": lambda: ForkingOffload(),
    "sharded": lambda: ForkingOffload(state_dict_type="sharded"),
    "full, later": lambda: ForkingOffload(async_save=True),
    "split": lambda: ForkingOffload(state_dict_type="sharded", async_save=True),
}
WAYS = [pair for pair in itertools.product(KINDS, KINDS) if pair[0] != "sharded" or pair[1] != "plain"]


def make(kind: str) -> Any:
    return KINDS[kind] if isinstance(KINDS[kind], str) else KINDS[kind]()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("full", "full"),
        ("sharded", "sharded"),
        ("full", "plain"),
        ("plain", "full"),
        ("full", "sharded"),
        ("sharded", "full"),
        ("full, later", "plain"),
    ],
)
def test_a_run_goes_on_from_its_checkpoint(first, second, fit, tmp_path):
    average = AVERAGES["EMA"]
    unbroken = fit(Saving, make(first), average, num_sanity_val_steps=0)

    resumed = fit(Net, make(second), average, ckpt_path=tmp_path / "first.ckpt", num_sanity_val_steps=0)

    assert_equal_weights(resumed.average, unbroken.average)
    assert_equal_weights(resumed, unbroken)
    assert resumed.seen == unbroken.seen[1:]


def test_a_full_checkpoint_is_that_of_a_plain_run(fit, tmp_path):
    files = []
    for kind in ("full", "plain"):
        fit(Saving, make(kind), AVERAGES["EMA"])
        files.append(torch.load(tmp_path / "first.ckpt"))
    ours, plain = files
    assert ours.keys() == plain.keys()
    for key in ("state_dict", "current_model_state", "averaging_state"):
        assert list(ours[key]) == list(plain[key])
        assert {type(value) for value in ours[key].values()} == {torch.Tensor}
        assert all(torch.equal(ours[key][name], plain[key][name]) for name in plain[key])


class Counted(Net):
    """Counts the bytes of its average, each memory once."""

    def on_train_batch_end(self, *unused: Any) -> None:
        (callback,) = [one for one in self.trainer.callbacks if isinstance(one, WeightAveraging)]
        parts = [own_part_of(p) for p in average_of(callback).parameters()]
        assert {part.device.type for part in parts} == {"cpu"}
        self.num_bytes = sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in parts}.values())
        if self.trainer.world_size > 1 and self.global_rank == 0:
            (self.trainer.default_root_dir / "bytes").write_text(str(self.num_bytes))


def test_an_average_takes_four_bytes_for_each_weight(fit):
    counted = fit(Counted, ForkingOffload(), EMAWeightAveraging)
    assert counted.num_bytes == 4 * sum(p.numel() for p in counted.parameters())
