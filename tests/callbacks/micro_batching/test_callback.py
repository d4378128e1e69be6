"""Splitting batches inside a step: equal to the whole batch, and after out-of-memory to the split from the start."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from support.memory_limit import MemoryLimit
from support.micro_batching_models import LitRegression, Script
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_vram import ActivationCheckpointing, VRAMMonitor
from lightning_vram.callbacks.micro_batching.callback import MicroBatching
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.memory.units import MIB


@pytest.fixture
def fit(make_trainer: Callable[..., pl.Trainer]) -> Callable[..., LitRegression]:
    def run(callbacks: Sequence[pl.Callback] = (), limit: MemoryLimit | None = None, **options: Any) -> LitRegression:
        model_options = {key: options.pop(key) for key in ("dropout", "norm", "heavy") if key in options}
        model = LitRegression(**model_options)
        torch.manual_seed(7)
        with limit or MemoryLimit():
            trainer = make_trainer(callbacks=list(callbacks), **options)
            trainer.fit(model)
        model.metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        return model

    return run


def assert_close(one: LitRegression, other: LitRegression, tolerance: float = 1e-12) -> None:
    assert len(one.gradients) == len(other.gradients)
    for ours, theirs in zip(one.gradients, other.gradients, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a - b).abs().max() <= tolerance
    for ours, theirs in zip(one.logged, other.logged, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)  # metrics are float32
    assert one.metrics == pytest.approx(other.metrics, abs=1e-6)


def assert_equal(one: LitRegression, other: LitRegression) -> None:
    for ours, theirs in zip(one.gradients, other.gradients, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert one.logged == other.logged
    assert one.metrics == other.metrics
    expected = other.state_dict()
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}, {"gradient_clip_val": 0.1}], ids=str)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_micro_batches_give_gradients_logs_and_metrics_of_the_whole_batch(fit, size: int, options: dict) -> None:
    assert_close(fit([MicroBatching(size)], **options), fit(**options))


def test_a_batch_that_fits_runs_whole_and_to_the_bit(fit) -> None:
    plain, auto = fit(dropout=0.5, norm=True), fit([MicroBatching("auto")], dropout=0.5, norm=True)
    assert auto.sizes == plain.sizes
    assert_equal(auto, plain)


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}], ids=str)
def test_out_of_memory_leaves_no_trace(fit, where: str, options: dict) -> None:
    options = {"dropout": 0.5, "norm": True, "heavy": where, **options}
    expected = fit([MicroBatching(2)], **options)
    limit = MemoryLimit(int(2.5 * MIB))
    actual = fit([MicroBatching("auto", regrow_after_n_batches=None)], limit, **options)
    assert limit.num_errors == 2  # eight, then four; the last batch, of four, begins with what is known
    assert limit.errors_in_backward == (2 if where == "backward" else 0)
    assert [len(out) for out in actual.gradients] == [len(out) for out in expected.gradients]
    assert_equal(actual, expected)


def scripted(sizes: Sequence[int | None]) -> MicroBatching:
    callback = MicroBatching(1)
    callback._choosers["training"] = Script(sizes)
    return callback


class LimitFrom(pl.Callback):
    """Memory gets short at some batch."""

    def __init__(self, limit: MemoryLimit, limits: dict[int, int | None]) -> None:
        self.limit = limit
        self.limits = limits

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == 0 and batch_idx in self.limits:
            self.limit.limit_bytes = self.limits[batch_idx]


def test_norms_count_batches_and_get_their_momentum_back(fit) -> None:
    plain, split = fit(norm=True), fit([MicroBatching(2)], norm=True)
    norm = split.net[1]
    assert norm.num_batches_tracked == plain.net[1].num_batches_tracked == 8
    assert norm.momentum == 0.1


class LiftAtError(pl.Callback):
    """The trainer's clean-up has memory again."""

    def __init__(self, limit: MemoryLimit) -> None:
        self.limit = limit

    def on_exception(self, *args: Any) -> None:
        self.limit.limit_bytes = None


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_second_batch_of_a_window_may_run_out_twice(fit, where: str) -> None:
    options = {"dropout": 0.5, "norm": True, "heavy": where, "accumulate_grad_batches": 2}
    expected = fit([scripted([None, 2, 2, 2] + 4 * [2])], **options)
    limit = MemoryLimit()
    callbacks = [MicroBatching("auto", regrow_after_n_batches=None), LimitFrom(limit, {1: int(2.5 * MIB)})]
    actual = fit(callbacks, limit, **options)
    assert limit.num_errors == 2
    assert_equal(actual, expected)


def test_it_grows_again_when_there_is_room(fit) -> None:
    limit = MemoryLimit()
    callbacks = [
        MicroBatching("auto", regrow_after_n_batches=2),
        LimitFrom(limit, {0: int(4.5 * MIB), 1: None}),
    ]
    model = fit(callbacks, limit, heavy="forward", max_epochs=2)
    assert model.sizes == [4, 4, 4, 4, 8, 4, 8, 8, 8, 4]


def test_growing_in_vain_waits_twice_as_long(fit) -> None:
    limit = MemoryLimit(int(5.5 * MIB))
    fit([MicroBatching("auto", regrow_after_n_batches=1)], limit, heavy="forward", max_epochs=5)
    assert limit.num_errors == 1 + 3  # fifteen batches of eight: after 1, 2 and 4 good ones, not after 8


def test_one_sample_that_does_not_fit_raises_the_error_with_the_monitors_report(fit) -> None:
    limit = MemoryLimit(MIB // 2)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        fit([LiftAtError(limit), MicroBatching("auto"), VRAMMonitor(path=None)], limit, heavy="forward")
    assert limit.num_errors == 4  # eight, four, two and one
    notes = "\n".join(caught.value.__notes__)
    assert "one sample per micro-batch" in notes
    assert "VRAMMonitor, in the batch that ran out of memory: train epoch 0 batch 0: peak" in notes
    assert "parameters" in notes


def test_a_fixed_size_that_does_not_fit_raises_at_once(fit) -> None:
    limit, callback = MemoryLimit(int(2.5 * MIB)), MicroBatching(4)
    with pytest.raises(torch.OutOfMemoryError):
        fit([callback], limit, heavy="forward")
    assert callback.micro_batch_size is None


def test_other_errors_are_not_taken_for_out_of_memory(fit) -> None:
    class Failing(pl.Callback):
        def on_before_backward(self, *args: Any) -> None:
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        fit([MicroBatching("auto"), Failing()])


def test_activations_are_those_of_one_micro_batch() -> None:
    def peak(callbacks: list[pl.Callback]) -> int:
        pl.seed_everything(0, verbose=False)
        trainer = pl.Trainer(
            accelerator="cpu", max_steps=2, callbacks=callbacks, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        model = LitDeep()
        with track_memory(model) as tracker:
            trainer.fit(model)
        return tracker.timeline.peak_of(Category.ACTIVATIONS)

    assert peak([MicroBatching(64 // 4)]) <= 0.30 * peak([])


class LitDeep(pl.LightningModule):
    """Twelve layers of activations."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 64), *(layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU()))
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(128, 4), batch_size=64)


def test_checkpointing_scaler_clipping_and_accumulation_compose(fit) -> None:
    def options() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        return {
            "plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)],
            "gradient_clip_val": 0.1,
            "accumulate_grad_batches": 2,
            "norm": True,
            "dropout": 0.5,
            "heavy": "backward",
        }

    def checkpointing() -> ActivationCheckpointing:
        return ActivationCheckpointing([nn.Linear])

    expected = fit([checkpointing(), MicroBatching(2)], **options())
    limit = MemoryLimit(int(2.5 * MIB))
    actual = fit([checkpointing(), MicroBatching("auto", regrow_after_n_batches=None)], limit, **options())
    assert limit.num_errors == 2
    assert_equal(actual, expected)


def test_hooks_see_one_step(fit) -> None:
    calls: list[str] = []

    class Listening(pl.Callback):
        def on_before_zero_grad(self, *args: Any) -> None:
            calls.append("zero")

        def on_before_backward(self, *args: Any) -> None:
            calls.append("before")

        def on_after_backward(self, *args: Any) -> None:
            calls.append("after")

        def on_before_optimizer_step(self, *args: Any) -> None:
            calls.append("step")

        def on_train_batch_end(self, *args: Any) -> None:
            calls.append("end")

    fit([MicroBatching(3), Listening()], max_epochs=1)
    assert calls == 4 * ["zero", "before", "after", "step", "end"]


class LitOrdered(LitRegression):
    """Says what happens when, and whether there are gradients in its forward."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[str] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        self.calls.append("step" if self.net[0].weight.grad is None else "step with gradients")
        return super().training_step(batch, batch_idx)

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("before zero")

    def optimizer_zero_grad(self, *args: Any) -> None:
        self.calls.append("zero")
        super().optimizer_zero_grad(*args)

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls.append("before backward")


BEGINNING = ["before zero", "zero", "before backward"]


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}], ids=str)
@pytest.mark.parametrize("size", ["auto", 8])
def test_a_batch_that_runs_whole_keeps_the_order_of_zeroing_and_hooks(make_trainer, size: Any, options: dict) -> None:
    plain, whole = LitOrdered(), LitOrdered()
    make_trainer(**options).fit(plain)
    make_trainer(callbacks=[MicroBatching(size)], **options).fit(whole)
    assert whole.calls == plain.calls
    assert "step with gradients" in plain.calls


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_batch_in_parts_zeroes_after_the_first_forward_of_the_try_that_counts(make_trainer, where: str) -> None:
    model = LitOrdered(heavy=where)
    with MemoryLimit(int(4.5 * MIB)) as limit:
        make_trainer(callbacks=[MicroBatching("auto")], max_steps=2).fit(model)
    assert limit.num_errors == 1
    first = ["step", *BEGINNING, "step with gradients"]
    assert model.calls == [*first, "step with gradients", *first[1:]]


def test_no_copy_of_gradients_is_alive_in_the_optimizer_step(fit) -> None:
    def live_bytes(size: Any) -> list[int]:
        limit, seen = MemoryLimit(), []

        class Reading(pl.Callback):
            def on_before_optimizer_step(self, *args: Any) -> None:
                seen.append(limit.live_bytes)

        fit([MicroBatching(size), Reading()], limit, accumulate_grad_batches=2)
        return seen

    assert all(ours <= theirs for ours, theirs in zip(live_bytes("auto"), live_bytes(8), strict=True))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_gradients_that_nobody_zeroes_survive_a_try_that_is_dropped(make_trainer, where: str) -> None:
    class Keeping(LitRegression):
        def optimizer_zero_grad(self, *args: Any) -> None:
            pass

    models = []
    for callback, limit in ((MicroBatching(2), None), (MicroBatching(regrow_after_n_batches=None), int(2.5 * MIB))):
        models.append(Keeping(heavy=where))
        with MemoryLimit(limit):
            make_trainer(callbacks=[callback], max_epochs=1).fit(models[-1])
    for ours, theirs in zip(models[0].gradients, models[1].gradients, strict=True):
        assert all(map(torch.equal, ours, theirs))


def test_what_it_settled_on_is_logged_and_kept_in_checkpoints(fit, tmp_path) -> None:
    logger = RecordingLogger()
    callback = MicroBatching("auto", regrow_after_n_batches=None)
    options = {
        "heavy": "forward",
        "logger": logger,
        "max_epochs": 1,
        "enable_checkpointing": True,
        "log_every_n_steps": 1,
    }
    fit([callback], MemoryLimit(int(2.5 * MIB)), **options)
    assert callback.micro_batch_size == 2
    assert [value["vram/micro_batch_size"] for value in logger.values if "vram/micro_batch_size" in value] == [2.0]
    (path,) = tmp_path.rglob("*.ckpt")
    fresh = MicroBatching("auto", regrow_after_n_batches=None)
    state = torch.load(path, weights_only=True)["callbacks"][fresh.state_key]
    fresh.load_state_dict(state)
    limit = MemoryLimit(int(2.5 * MIB))
    fit([fresh], limit, heavy="forward", max_epochs=1)
    assert limit.num_errors == 0


class RecordingLogger(pl.loggers.logger.DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.values: list[dict[str, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.values.append(metrics)

    @property
    def save_dir(self) -> None:
        return None


PICTURES = [torch.rand(3, 4 + number, 5) for number in range(8)]
TARGETS = [{"boxes": torch.rand(number % 4, 4), "labels": torch.zeros(number % 4)} for number in range(8)]
WITHOUT_SPLIT: dict[str, tuple[Any, Callable[[Any], Sequence[Any]]]] = {
    "pictures and targets of a detector": ((PICTURES, TARGETS), lambda batch: batch[1]),
    "pairs of a picture and its target": (
        list(zip(PICTURES, TARGETS, strict=True)),
        lambda batch: [target for _, target in batch],
    ),
    "tokens with lists of texts": (
        {"input_ids": torch.ones(8, 5), "text": list("abcdefgh"), "words": [["a", "b"]] * 8},
        lambda batch: batch["text"] if len(batch["text"]) == len(batch["words"]) == len(batch["input_ids"]) else [],
    ),
}


class LitSizes(pl.LightningModule):
    """Notes the sizes that run, and runs out of memory with more than four samples."""

    def __init__(self, read: Callable[[Any], Sequence[Any]]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.read = read
        self.samples: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        samples = self.read(batch)
        if len(samples) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.samples = [*self.samples, samples]
        return self.weight * 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("size", [4, "auto"])
@pytest.mark.parametrize("kind", WITHOUT_SPLIT)
def test_batches_of_detectors_and_texts_are_cut_without_a_function(make_trainer, kind: str, size: Any) -> None:
    batch, read = WITHOUT_SPLIT[kind]
    model = LitSizes(read)
    trainer = make_trainer(callbacks=[MicroBatching(size)], max_steps=1)
    trainer.fit(model, DataLoader([batch], batch_size=None, collate_fn=lambda one: one))
    assert [len(samples) for samples in model.samples] == [4, 4]
    assert [str(one) for samples in model.samples for one in samples] == [str(one) for one in read(batch)]
