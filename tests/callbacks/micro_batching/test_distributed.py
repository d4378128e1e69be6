"""Splitting on two ranks: together, whoever runs out of memory, with the result of the split from the start."""

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from support.helpers import Forking
from support.memory_limit import MemoryLimit
from support.micro_batching_models import LitRegression, full
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.utils.data import DataLoader

from lightning_vram.callbacks.micro_batching.callback import MicroBatching
from lightning_vram.memory.units import MIB
from lightning_vram.techniques.sharding import can_recover

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),
]
LIMIT_BYTES = int(2.5 * MIB)  # two samples fit at once


class ShardedRegression(LitRegression):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net:
            if next(layer.parameters(), None) is not None:
                fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def state_dict(self, **arguments: Any) -> dict[str, Any]:
        return {}  # the launcher cannot hand shards to the parent process


class Watch(pl.Callback):
    """Sets the limit of some ranks, and writes what a rank has at the end."""

    def __init__(self, path: Path, limit: MemoryLimit, limits: dict[int, int]) -> None:
        self.path, self.limit, self.limits = path, limit, limits

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.limit.limit_bytes = self.limits.get(trainer.global_rank)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        result = {
            "gradients": pl_module.gradients,
            "logged": pl_module.logged,
            "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
            "weights": [full(p) for p in pl_module.parameters()],
            "buffers": list(pl_module.buffers()),
            "num_errors": self.limit.num_errors,
            "in_backward": self.limit.errors_in_backward,
        }
        torch.save(result, self.path / f"{trainer.global_rank}.pt")


@pytest.fixture
def fit(make_trainer: Callable[..., pl.Trainer], tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    def run(
        callbacks: list[pl.Callback], limits: dict[int, int] | None = None, *, is_sharded: bool = False, **options: Any
    ) -> list[dict[str, Any]]:
        model_options = {key: options.pop(key) for key in ("dropout", "norm", "heavy") if key in options}
        default = ShardedRegression if is_sharded else LitRegression
        model = options.pop("model_class", default)(**model_options)
        strategy = Forking() if is_sharded else "ddp_fork"
        with MemoryLimit() as limit:
            callbacks = [*callbacks, Watch(tmp_path, limit, limits or {})]
            make_trainer(callbacks=callbacks, devices=2, **{"strategy": strategy, "max_epochs": 1, **options}).fit(
                model
            )
        return [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]

    return run


def assert_close(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one["gradients"], other["gradients"], rtol=0, atol=1e-12)
        assert one["metrics"] == pytest.approx(other["metrics"], abs=1e-6)


def assert_equal(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        for kind in ("weights", "buffers"):
            assert all(map(torch.equal, one[kind], other[kind])), kind
        assert one["logged"] == other["logged"]
        assert one["metrics"] == other["metrics"]


@pytest.mark.slow_except("ddp")
@pytest.mark.parametrize("is_sharded", [False, True], ids=["ddp", "fsdp2"])
def test_micro_batches_give_gradients_and_metrics_of_the_whole_batch(fit, is_sharded: bool) -> None:
    options = {"is_sharded": is_sharded, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    assert_close(fit([MicroBatching(3)], **options), fit([], **options))


def test_out_of_memory_on_one_rank_under_ddp_leaves_no_trace(fit) -> None:
    options = {"dropout": 0.5, "norm": True, "heavy": "backward", "accumulate_grad_batches": 2}
    expected = fit([MicroBatching(2)], **options)
    actual = fit([MicroBatching("auto", regrow_after_n_batches=None)], {1: LIMIT_BYTES}, **options)
    assert [result["num_errors"] for result in actual] == [result["in_backward"] for result in actual] != [0, 0]
    assert actual[0]["num_errors"] == 0
    assert_equal(actual, expected)


@pytest.mark.skipif(not can_recover(), reason="needs torch 2.13")
@pytest.mark.slow_except("forward")
@pytest.mark.parametrize("where", ["forward", "backward"])  # one in a forward makes FSDP2 drop earlier gradients
def test_out_of_memory_on_all_ranks_under_fsdp2_leaves_no_trace(fit, where) -> None:
    options = {"dropout": 0.5, "norm": True, "heavy": where, "accumulate_grad_batches": 2, "is_sharded": True}
    expected = fit([MicroBatching(2)], **options)
    callback = MicroBatching("auto", regrow_after_n_batches=None)
    actual = fit([callback], {0: LIMIT_BYTES, 1: LIMIT_BYTES}, **options)
    assert all(result["num_errors"] > 0 for result in actual)
    assert_equal(actual, expected)


@pytest.mark.slow
@pytest.mark.skipif(not can_recover(), reason="needs torch 2.13")
def test_out_of_memory_on_one_rank_under_fsdp2_is_an_error_and_no_hang(fit, monkeypatch) -> None:
    monkeypatch.setattr("lightning_vram.callbacks.micro_batching.runner._SILENCE_SECONDS", 2.0)

    with pytest.raises(ProcessRaisedException, match="Process 1 terminated") as caught:
        fit([MicroBatching("auto")], {1: LIMIT_BYTES}, heavy="forward", is_sharded=True)
    assert "torch.OutOfMemoryError: CUDA out of memory" in str(caught.value)
    assert "other ranks wait for it in a collective (FSDP2 modules)" in str(caught.value)


class Uncut(LitRegression):
    def train_dataloader(self) -> DataLoader:
        batches = list(super().train_dataloader())
        if self.trainer.global_rank == 0:
            batches = [{**batch, "table": torch.ones(3)} for batch in batches]
        return DataLoader(batches, batch_size=None)


def test_a_rank_whose_batches_cannot_be_cut_keeps_step_with_one_that_runs_out_of_memory(fit) -> None:
    options = {"model_class": Uncut, "heavy": "forward", "use_distributed_sampler": False}
    expected = fit([], **options)
    actual = fit([MicroBatching("auto")], {1: LIMIT_BYTES}, **options)
    assert [result["num_errors"] for result in actual] == [0, 2]
    assert_close(actual, expected)


class Uneven(ShardedRegression):
    """Rank 0 has seven samples in its last batch, rank 1 has one."""

    def train_dataloader(self) -> DataLoader:
        samples = list(super().train_dataloader().dataset)
        return DataLoader(samples[:15] if self.trainer.global_rank == 0 else samples[15:24], batch_size=8)


@pytest.mark.slow
def test_ranks_with_fewer_samples_under_fsdp2_keep_step_with_parts_that_count_for_nothing(fit) -> None:
    options = {"model_class": Uneven, "is_sharded": True, "use_distributed_sampler": False}
    expected = fit([], **options)
    assert_close(fit([MicroBatching(2)], **options), expected)


class UnevenEvaluation(LitRegression):
    """Rank 0 has one batch more to validate, and to predict."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val", (self.net(batch["x"]) - batch["y"]).square().mean(), sync_dist=True)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(batch["x"])

    def val_dataloader(self) -> DataLoader:
        samples = list(super().train_dataloader().dataset)
        return DataLoader(samples[: 12 if self.trainer.global_rank == 0 else 8], batch_size=4)

    predict_dataloader = val_dataloader


@pytest.mark.slow
def test_in_evaluation_under_ddp_ranks_decide_for_themselves(fit, make_trainer) -> None:
    options = {"model_class": UnevenEvaluation, "heavy": "forward", "limit_val_batches": None}
    options["use_distributed_sampler"] = False
    expected = fit([MicroBatching(2)], **options)
    actual = fit([MicroBatching(2, eval="auto")], {0: LIMIT_BYTES}, **options)
    assert_close(actual, expected)
    trainer = make_trainer(
        callbacks=[MicroBatching(eval="auto")], strategy="ddp_fork", devices=2, use_distributed_sampler=False
    )
    trainer.predict(UnevenEvaluation(), return_predictions=False)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_after_the_timeout_of_the_strategy(make_trainer) -> None:
    has_ended = multiprocessing.get_context("fork").Event()

    class Hanging(LitRegression):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
            if self.global_rank == 0 and batch_idx == 1:
                assert has_ended.wait(30), "the other rank still waits"
            return super().training_step(batch, batch_idx)

        def on_exception(self, exception: BaseException) -> None:
            has_ended.set()

    strategy = DDPStrategy(start_method="fork", timeout=timedelta(seconds=2))
    with pytest.raises(ProcessRaisedException, match=r"Rank 1 waited .* another rank did not answer within 2 s"):
        make_trainer(callbacks=[MicroBatching()], strategy=strategy, devices=2).fit(Hanging())
