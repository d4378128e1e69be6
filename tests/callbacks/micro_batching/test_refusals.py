"""What MicroBatching refuses, and what a user with an unusual batch can do."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import LitManual, LitTiny, TinyCNN, TinyGPT, assert_equal_weights
from support.memory_limit import MemoryLimit
from support.micro_batching_models import BATCH, HeavyLayer, LitRegression
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_vram import MicroBatching
from lightning_vram.core.batches.splitting import BatchSplitError
from lightning_vram.memory.units import MIB

pytestmark = pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`")  # Lightning, of odd batches


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"size": 0}, ValueError, "(size) must be at least 1, got 0."),
        ({"size": "half"}, TypeError, "(size) must be a number of samples or 'auto', got 'half' of type str."),
        ({"eval": -1}, ValueError, "(eval) must be at least 1, got -1."),
        ({"regrow_after_n_batches": 0}, ValueError, "(regrow_after_n_batches) must be at least 1, got 0."),
        (
            {"shared_keys": "mask"},
            TypeError,
            "(shared_keys) must be a list of names of entries, such as ['mask'] or [] for none, got 'mask'.",
        ),
        ({"split": "halves"}, TypeError, "(split) must be a function split(batch, size), got 'halves'."),
        ({"batch_dim": "1"}, TypeError, "(batch_dim) must be a dimension such as 1, or None, got '1' of type str."),
        (
            {"batch_dim": 1, "split": lambda batch, size: [batch]},
            ValueError,
            " takes batch_dim= or split=, not both: split= alone decides how a batch is split.",
        ),
        (
            {"batch_dim": 1, "weight": "shifted_tokens"},
            ValueError,
            "(weight='shifted_tokens') expects labels as [samples, time]. With batch_dim= give a function of the "
            "batch, such as weight=lambda batch: (batch[1][1:] != -100).sum().",
        ),
        (
            {"weight": "words"},
            ValueError,
            "(weight) must be a function or one of samples, tokens, shifted_tokens, sum, got 'words'.",
        ),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        MicroBatching(**arguments)
    assert str(caught.value) == f"MicroBatching{message}"


class Taking(LitTiny):
    def training_step(self, dataloader_iter) -> Tensor:
        return self.loss(next(dataloader_iter)[0])


class Hooked(LitTiny):
    def on_train_start(self) -> None:
        self.net[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (LitManual, "does not work with manual optimization"),
        (Taking, "dataloader_iter"),
        (Hooked, r"post-accumulate-grad hooks.*Remove the hook of net\.0\.weight"),
    ],
)
def test_steps_that_cannot_be_repeated_in_parts_are_refused(make_trainer, kind: Any, message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        make_trainer(callbacks=[MicroBatching()]).fit(kind(TinyCNN()))


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_what_only_the_reducer_can_do_is_refused(make_trainer, monkeypatch) -> None:
    def fit(callback: MicroBatching, **options: Any) -> None:
        strategy = DDPStrategy(start_method="fork", **options)
        make_trainer(callbacks=[callback], strategy=strategy, devices=2, max_epochs=1).fit(LitTiny(TinyGPT()))

    with pytest.raises(Exception, match=r"MicroBatching does not work with DDPStrategy\(static_graph=True\)"):
        fit(MicroBatching(1), static_graph=True)
    monkeypatch.setattr(
        "lightning_vram.callbacks.micro_batching.callback.why_reducer_is_needed", lambda ddp: "a communication hook"
    )  # Lightning registers them on GPUs only
    with pytest.raises(Exception, match=r"MicroBatching\('auto'\) does not work with a communication hook"):
        fit(MicroBatching())


class Weighted(LitRegression):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        assert batch["scale"].shape == (3,)
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader:
        batches = list(super().train_dataloader())
        return DataLoader([{**batch, "scale": torch.ones(3)} for batch in batches], batch_size=None)


def test_what_cannot_be_split_is_an_error_in_the_first_batch_that_names_the_ways_out(make_trainer) -> None:
    with pytest.raises(BatchSplitError, match=r'batch\["scale"\] has 3 rows.*shared_keys=\["scale"\].*split_batch'):
        make_trainer(callbacks=[MicroBatching(8)]).fit(Weighted())


class Counting(pl.LightningModule):
    """Makes its samples itself: a batch is a whole number."""

    def __init__(self) -> None:
        super().__init__()
        pl.seed_everything(0, verbose=False)
        self.layer = nn.Linear(2, 1)
        self.heavy = HeavyLayer("forward")

    def training_step(self, batch: int, batch_idx: int) -> Tensor:
        return self.heavy(self.layer(torch.full((4, 2), float(batch)))).sum()

    def validation_step(self, batch: int, batch_idx: int) -> None:
        self.log("val", self.layer(torch.full((4, 2), float(batch))).sum(), batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> range:
        return range(3)

    val_dataloader = train_dataloader


UNCUT = (
    "No entry of the batch shows how many samples it has: int. To split it, pass split= to MicroBatching, or "
    "define split_batch(batch, size) on the LightningModule."
)


def test_a_batch_that_cannot_be_cut_runs_whole_with_one_warning_for_each_loop(make_trainer) -> None:
    plain, model, callback = Counting(), Counting(), MicroBatching(eval="auto")
    reference, trainer = make_trainer(), make_trainer(callbacks=[callback])
    reference.fit(plain)
    with pytest.warns(UserWarning, match="MicroBatching") as caught:
        trainer.fit(model)
    warnings = [str(one.message) for one in caught if "MicroBatching" in str(one.message)]
    assert warnings == 2 * [
        f"MicroBatching('auto') cannot split this batch. It runs the batch whole, and cannot help after an "
        f"out-of-memory error. {UNCUT}"
    ]
    assert torch.equal(model.layer.weight, plain.layer.weight)
    assert trainer.callback_metrics == reference.callback_metrics
    assert callback.micro_batch_size is None


@pytest.mark.filterwarnings("ignore:MicroBatching.'auto'. cannot split this batch")
def test_the_error_of_a_batch_that_cannot_be_cut_says_so_when_memory_runs_out(make_trainer) -> None:
    with MemoryLimit(int(2.5 * MIB)) as limit, pytest.raises(torch.OutOfMemoryError) as caught:
        make_trainer(callbacks=[MicroBatching()]).fit(Counting())
    assert limit.num_errors == 1
    assert caught.value.__notes__ == [f"MicroBatching: out of memory in a batch that cannot be split. {UNCUT}"]


class Padded(LitRegression):
    """Its batches are padded to their longest sample, and it counts on that."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        longest = int(batch["lengths"].max())
        mask = torch.arange(longest) < batch["lengths"][:, None]
        return (self.net(batch["x"]).squeeze(-1) * mask).sum() / len(mask)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass

    def train_dataloader(self) -> DataLoader:
        x = torch.randn(4, 5, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return DataLoader([{"x": x, "lengths": torch.tensor([5, 3, 2, 4])}], batch_size=None)


def test_an_error_of_the_model_in_a_part_says_that_the_cut_may_be_its_cause(make_trainer) -> None:
    with pytest.raises(RuntimeError, match="must match the size of tensor b") as caught:
        make_trainer(callbacks=[MicroBatching(2)]).fit(Padded())
    assert caught.value.__notes__ == [
        "MicroBatching: this error is from micro-batch 2 of 2. If the whole batch runs without it, splitting "
        "is the cause, for example with a batch padded to its longest sample. Trim each micro-batch in "
        "MicroBatching(split=...), or in split_batch(batch, size) of the LightningModule. Name entries that "
        "belong to all samples in shared_keys=."
    ]


@pytest.mark.parametrize("is_method", [True, False], ids=["hook", "argument"])
def test_the_user_may_split(make_trainer, is_method: bool) -> None:
    class Splitting(Weighted):
        if is_method:

            def split_batch(self, batch: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
                return halves(batch, size)

    def halves(batch: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
        parts = zip(batch["x"].split(size), batch["y"].split(size), strict=True)
        return [{"x": x, "y": y, "scale": batch["scale"]} for x, y in parts]

    model = Splitting(heavy="forward")
    callback = MicroBatching(split=None if is_method else halves)
    with MemoryLimit(int(4.5 * MIB)):
        make_trainer(callbacks=[callback], max_epochs=1).fit(model)
    assert callback.micro_batch_size == BATCH // 2


def test_what_a_step_takes_out_of_its_batch_is_there_again(make_trainer) -> None:
    class Taking(LitRegression):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
            x = batch.pop("x")
            return super().training_step(batch | {"x": x * 2}, batch_idx)

    models = []
    for callback, limit in ((MicroBatching(2), None), (MicroBatching(regrow_after_n_batches=None), int(2.5 * MIB))):
        models.append(Taking(heavy="forward"))
        with MemoryLimit(limit):
            make_trainer(callbacks=[callback], max_epochs=1).fit(models[-1])
    assert_equal_weights(*models)


def test_a_step_that_skips_some_parts_counts_the_others(make_trainer) -> None:
    class Skipping(LitRegression):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
            return None if float(batch["x"][0, 0]) > 0 else super().training_step(batch, batch_idx)["loss"]

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            pass

    model = Skipping()
    Closure.warning_cache.clear()  # Lightning warns once per process
    with pytest.warns(UserWarning, match="returned `None`"):
        make_trainer(callbacks=[MicroBatching(1)], max_epochs=1).fit(model)
    assert 0 < len(model.sizes) < 28


def time_first(samples: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.stack(one, 1) for one in zip(*samples, strict=True))


class TimeFirst(pl.LightningModule):
    """An LSTM as PyTorch makes it by default, on batches of [T, B, D]."""

    def __init__(self) -> None:
        super().__init__()
        pl.seed_everything(0, verbose=False)
        self.rnn = nn.LSTM(2, 3)
        self.predicted: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.rnn(batch[0])[0].sub(batch[1]).square().mean()

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.rnn(batch[0])[0]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(12, 5, 2, generator=generator), torch.randn(12, 5, 3, generator=generator)
        return DataLoader([*zip(x, y, strict=True)], batch_size=6, collate_fn=time_first)

    predict_dataloader = train_dataloader


def test_samples_in_the_second_dimension_are_cut_there(make_trainer) -> None:
    plain, model = TimeFirst(), TimeFirst()
    make_trainer(max_steps=3).fit(plain)
    trainer = make_trainer(max_steps=3, callbacks=[MicroBatching(3, batch_dim=1, eval=2)])
    trainer.fit(model)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    predicted = trainer.predict(model, return_predictions=True)
    assert all(map(torch.allclose, predicted, make_trainer().predict(model, return_predictions=True)))


def test_a_batch_whose_samples_are_unclear_is_refused(make_trainer) -> None:
    with pytest.raises(BatchSplitError, match=r"layer 'rnn' has batch_first=False.*Pass batch_dim=1"):
        make_trainer(max_steps=1, callbacks=[MicroBatching(2)]).fit(TimeFirst())


class Pooled(TimeFirst):
    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().predict_step(batch, batch_idx).mean(0)[:, :2]


def test_an_output_whose_samples_are_unclear_is_refused(make_trainer) -> None:
    trainer = make_trainer(callbacks=[MicroBatching(batch_dim=1, eval=2)])
    with pytest.raises(ValueError, match=r"output cannot be combined: .* in dimensions \[0, 1\]"):
        trainer.predict(Pooled())
