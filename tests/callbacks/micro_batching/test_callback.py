"""Splitting batches inside a step: equal to the whole batch, and after out-of-memory to the split from the start."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from support.helpers import assert_equal_weights
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
def run(fit: Callable[..., Any]) -> Callable[..., LitRegression]:
    """``fit`` where memory has a limit, with some options of the model."""

    def run(*callbacks: pl.Callback, limit: MemoryLimit | None = None, **options: Any) -> LitRegression:
        of_model = {key: options.pop(key) for key in ("dropout", "norm", "heavy") if key in options}
        with limit or MemoryLimit():
            return fit(partial(LitRegression, **of_model), *callbacks, **options)

    return run


def metrics_of(model: LitRegression) -> dict[str, float]:
    return {key: float(value) for key, value in model.trainer.callback_metrics.items()}


def assert_equal(one: LitRegression, other: LitRegression) -> None:
    for ours, theirs in zip(one.gradients, other.gradients, strict=True):
        assert all(map(torch.equal, ours, theirs))
    assert one.logged == other.logged
    assert metrics_of(one) == metrics_of(other)
    assert_equal_weights(one, other)


@pytest.mark.parametrize(
    ("size", "options"), [(3, {}), (1, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1})], ids=str
)
def test_micro_batches_give_gradients_logs_and_metrics_of_the_whole_batch(run, size: int, options: dict) -> None:
    split, whole = run(MicroBatching(size), **options), run(**options)
    torch.testing.assert_close(split.gradients, whole.gradients, rtol=0, atol=1e-12)
    for ours, theirs in zip(split.logged, whole.logged, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-6)  # metrics are float32
    assert metrics_of(split) == pytest.approx(metrics_of(whole), abs=1e-6)


@pytest.mark.parametrize(("where", "options"), [("forward", {}), ("backward", {"accumulate_grad_batches": 3})])
def test_out_of_memory_leaves_no_trace(run, where: str, options: dict) -> None:
    options = {"dropout": 0.5, "norm": True, "heavy": where, **options}
    expected = run(MicroBatching(2), **options)
    limit = MemoryLimit(int(2.5 * MIB))
    actual = run(MicroBatching("auto", regrow_after_n_batches=None), limit=limit, **options)
    assert limit.num_errors == 2  # eight, then four; the last batch, of four, begins with what is known
    assert limit.errors_in_backward == (2 if where == "backward" else 0)
    assert_equal(actual, expected)


class LimitFrom(pl.Callback):
    def __init__(self, limit: MemoryLimit, limits: dict[int, int | None]) -> None:
        self.limit = limit
        self.limits = limits

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.current_epoch == 0 and batch_idx in self.limits:
            self.limit.limit_bytes = self.limits[batch_idx]


def test_norms_count_batches_and_get_their_momentum_back(run) -> None:
    norm = run(MicroBatching(2), norm=True).net[1]
    assert norm.num_batches_tracked == 4
    assert norm.momentum == 0.1


def test_the_second_batch_of_a_window_may_run_out_twice(run) -> None:
    options = {"dropout": 0.5, "norm": True, "heavy": "backward", "accumulate_grad_batches": 2}
    scripted, limit = MicroBatching(1), MemoryLimit()
    scripted._choosers["training"] = Script([None, 2, 2, 2])
    callbacks = [MicroBatching("auto", regrow_after_n_batches=None), LimitFrom(limit, {1: int(2.5 * MIB)})]
    actual = run(*callbacks, limit=limit, **options)
    assert limit.num_errors == 2
    assert_equal(actual, run(scripted, **options))


def test_it_grows_again_when_there_is_room(run) -> None:
    limit = MemoryLimit()
    limits = LimitFrom(limit, {0: int(4.5 * MIB), 1: None})
    model = run(MicroBatching("auto", regrow_after_n_batches=2), limits, limit=limit, heavy="forward", max_epochs=2)
    assert model.sizes == [4, 4, 4, 4, 8, 4, 8, 8, 8, 4]


def test_one_sample_that_does_not_fit_raises_the_error_with_the_monitors_report(run) -> None:
    limit = MemoryLimit(MIB // 2)
    lift = LambdaCallback(on_exception=lambda *_: setattr(limit, "limit_bytes", None))  # the clean-up has memory again
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        run(lift, MicroBatching("auto"), VRAMMonitor(path=None), limit=limit, heavy="forward")
    assert limit.num_errors == 4  # eight, four, two and one
    notes = "\n".join(caught.value.__notes__)
    assert "one sample per micro-batch" in notes
    assert "VRAMMonitor, in the batch that ran out of memory: train epoch 0 batch 0: peak" in notes
    assert "parameters" in notes


def test_a_fixed_size_that_does_not_fit_raises_at_once(run) -> None:
    callback = MicroBatching(4)
    with pytest.raises(torch.OutOfMemoryError):
        run(callback, limit=MemoryLimit(int(2.5 * MIB)), heavy="forward")
    assert callback.micro_batch_size is None


class LitDeep(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = (layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.GELU()))
        self.net = nn.Sequential(nn.Linear(4, 64), *layers)
        self.error = torchmetrics.MeanSquaredError()  # would keep the graph of its last value

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        predicted = self.net(batch)
        self.error(predicted.mean(1), batch.mean(1))
        return predicted.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(128, 4), batch_size=64)


def test_activations_are_those_of_one_micro_batch(make_trainer) -> None:
    def peak(*callbacks: pl.Callback) -> int:
        model = LitDeep()
        with track_memory(model) as tracker:
            make_trainer(max_epochs=1, callbacks=list(callbacks)).fit(model)
        return tracker.timeline.peak_of(Category.ACTIVATIONS)

    assert peak(MicroBatching(64 // 4)) <= 0.30 * peak()


def test_checkpointing_scaler_clipping_and_accumulation_compose(run) -> None:
    def train(callback: MicroBatching, **more: Any) -> LitRegression:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "norm": True, "dropout": 0.5}
        options |= {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)], "heavy": "backward"}
        return run(ActivationCheckpointing([nn.Linear]), callback, **options, **more)

    limit = MemoryLimit(int(2.5 * MIB))
    actual = train(MicroBatching("auto", regrow_after_n_batches=None), limit=limit)
    assert limit.num_errors == 2
    assert_equal(actual, train(MicroBatching(2)))


def test_hooks_see_one_step(run) -> None:
    hooks = ["before_zero_grad", "before_backward", "after_backward", "before_optimizer_step", "train_batch_end"]
    calls: list[str] = []
    listening, hearing = (
        LambdaCallback(**{f"on_{hook}": lambda *_, hook=hook: calls.append(hook) for hook in hooks}) for _ in range(2)
    )
    run(MicroBatching(3), listening)
    assert calls == 4 * hooks
    calls.clear()
    hearing.hears_micro_batches = True
    run(MicroBatching(3), hearing, limit_train_batches=1)
    one, *others = [hooks[1:3]] * 3
    assert calls == [hooks[0], *one, *(hook for other in others for hook in other), hooks[2], *hooks[3:]]


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


@pytest.mark.parametrize("size", ["auto", 8])
def test_a_batch_that_runs_whole_keeps_the_order_of_zeroing_and_hooks(fit, size: Any) -> None:
    plain, whole = (fit(LitOrdered, *ours, accumulate_grad_batches=2) for ours in ([], [MicroBatching(size)]))
    assert whole.calls == plain.calls
    assert "step with gradients" in plain.calls


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_batch_in_parts_zeroes_after_the_first_forward_of_the_try_that_counts(fit, where: str) -> None:
    with MemoryLimit(int(4.5 * MIB)) as limit:
        model = fit(partial(LitOrdered, heavy=where), MicroBatching("auto"), max_steps=2)
    assert limit.num_errors == 1
    first = ["step", "before zero", "zero", "before backward", "step with gradients"]
    assert model.calls == [*first, "step with gradients", *first[1:]]


def test_no_copy_of_gradients_is_alive_in_the_optimizer_step(run) -> None:
    def live_bytes(size: Any) -> list[int]:
        limit, seen = MemoryLimit(), []
        reading = LambdaCallback(on_before_optimizer_step=lambda *_: seen.append(limit.live_bytes))
        run(MicroBatching(size), reading, limit=limit, accumulate_grad_batches=2)
        return seen

    assert all(ours <= theirs for ours, theirs in zip(live_bytes("auto"), live_bytes(8), strict=True))


def test_what_it_settled_on_is_logged_and_kept_in_checkpoints(run, tmp_path) -> None:
    logger, logged = CSVLogger(tmp_path), []
    logger.log_metrics = lambda metrics, step=None: logged.append(metrics.get("vram/micro_batch_size"))
    callback, fresh = (MicroBatching("auto", regrow_after_n_batches=None) for _ in range(2))
    limit = MemoryLimit(int(2.5 * MIB))
    model = run(callback, limit=limit, heavy="forward", logger=logger, log_every_n_steps=1)
    assert callback.micro_batch_size == 2
    assert [value for value in logged if value is not None] == [2.0]
    model.trainer.save_checkpoint(tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"][fresh.state_key]
    fresh.load_state_dict(state)
    limit = MemoryLimit(int(2.5 * MIB))
    run(fresh, limit=limit, heavy="forward")
    assert limit.num_errors == 0


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_gradients_that_nobody_zeroes_survive_a_try_that_is_dropped(fit, where: str) -> None:
    class Keeping(LitRegression):
        def optimizer_zero_grad(self, *args: Any) -> None:
            pass

    expected = fit(partial(Keeping, heavy=where), MicroBatching(2))
    with MemoryLimit(int(2.5 * MIB)) as limit:
        actual = fit(partial(Keeping, heavy=where), MicroBatching(regrow_after_n_batches=None))
    assert limit.num_errors == 2
    torch.testing.assert_close(actual.gradients, expected.gradients, rtol=0, atol=0)
