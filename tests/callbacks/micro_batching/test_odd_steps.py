"""Steps that are not textbook: masks without tokens, layers that thaw, losses that are sums, tuners, own outputs."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.memory_limit import MemoryLimit
from support.micro_batching_models import HeavyLayer, LitRegression
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_vram import MicroBatching
from lightning_vram.memory.units import MIB

LIMIT_BYTES = int(2.5 * MIB)  # two samples


class LitOdd(pl.LightningModule):
    """Masked rows; says what its gradients were."""

    def __init__(self, heavy: str = "nowhere") -> None:
        super().__init__()
        pl.seed_everything(0, verbose=False)
        self.first, self.last = nn.Linear(4, 6).double(), nn.Linear(6, 1).double()
        self.heavy = HeavyLayer(heavy)
        self.gradients: list[list[Tensor | None]] = []
        self.losses: list[float] = []

    def error(self, batch: dict[str, Tensor]) -> Tensor:
        return self.last(self.heavy(self.first(batch["x"]).tanh())).square().squeeze(-1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        loss = (self.error(batch) * batch["mask"]).sum() / batch["mask"].sum()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append([None if p.grad is None else p.grad.clone() for p in self.watched()])

    def watched(self) -> list[nn.Parameter]:
        return list(self.parameters())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        mask = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64).repeat(2)
        return DataLoader([{"x": row, "mask": one} for row, one in zip(x, mask, strict=True)], batch_size=8)


@pytest.fixture
def fit(make_trainer):
    def run(model: pl.LightningModule, *callbacks: pl.Callback, limit: int | None = None, **options: Any) -> Any:
        torch.manual_seed(0)
        with MemoryLimit(limit) as memory:
            trainer = make_trainer(callbacks=list(callbacks), max_epochs=1, **options)
            trainer.fit(model)
        model.num_errors = memory.num_errors
        model.metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
        return model

    return run


def assert_close(one: LitOdd, other: LitOdd) -> None:
    assert len(one.gradients) == len(other.gradients) > 0
    for ours, theirs in zip(one.gradients, other.gradients, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=0, atol=1e-12)
    assert one.losses == pytest.approx(other.losses, abs=1e-12)
    assert one.metrics == pytest.approx(other.metrics, abs=1e-6)


def mask_weight(batch: dict[str, Tensor]) -> Tensor:
    return batch["mask"].sum()


def test_a_part_without_tokens_counts_for_nothing_even_where_its_loss_is_no_number(fit) -> None:
    split = fit(LitOdd(), MicroBatching(2, weight=mask_weight), accumulate_grad_batches=2)
    assert_close(split, fit(LitOdd(), accumulate_grad_batches=2))


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_so_it_does_under_ddp_where_the_reducer_would_work_in_its_backward(fit) -> None:
    def weights(*callbacks: pl.Callback) -> list[Tensor]:
        model = fit(Shuffled(), *callbacks, strategy="ddp_fork", devices=2, use_distributed_sampler=False)
        return [p.detach() for p in model.parameters()]

    class Shuffled(LitOdd):
        def train_dataloader(self) -> DataLoader:
            samples = list(super().train_dataloader().dataset)
            order = [2, 3, 4, 6, 7, 5, 0, 1]  # nothing counts in the last parts
            return DataLoader([samples[8 * self.trainer.global_rank + place] for place in order], batch_size=8)

    for one, other in zip(weights(MicroBatching(2, weight=mask_weight)), weights(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


class LitSum(LitOdd):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.error(batch).sum()


def test_losses_that_are_sums_add_up(fit) -> None:
    assert_close(fit(LitSum(), MicroBatching(3, weight="sum")), fit(LitSum()))


class LitThawing(LitOdd):
    """Layers take turns at being frozen, which the step itself decides."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.first.requires_grad_(batch_idx % 2 == 0)
        return self.error(batch).mean()


class LitPrompt(LitOdd):
    """A parameter that only the optimizer knows."""

    def __init__(self, heavy: str = "nowhere") -> None:
        super().__init__(heavy)
        self.hidden = [nn.Parameter(torch.ones(4, dtype=torch.float64))]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.error({"x": batch["x"] * self.hidden[0]}).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.watched(), lr=0.1)

    def watched(self) -> list[nn.Parameter]:
        return [*self.parameters(), *self.hidden]


@pytest.mark.parametrize("kind", [LitThawing, LitPrompt])
def test_every_gradient_comes_back_after_a_backward_that_broke_off(fit, kind) -> None:
    options = {"accumulate_grad_batches": 2}
    actual = fit(kind("backward"), MicroBatching(regrow_after_n_batches=None), limit=LIMIT_BYTES, **options)
    assert actual.num_errors > 0
    expected = fit(kind("backward"), MicroBatching(2), **options)
    for ours, theirs in zip(actual.gradients, expected.gradients, strict=True):
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


class LitCounting(LitRegression):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
        outputs = super().training_step(batch, batch_idx)
        return {**outputs, "correct": int((outputs["predicted"] > 0).sum())}


def test_outputs_that_cannot_be_combined_come_as_lists_and_do_not_end_the_fit(fit) -> None:
    class Keep(pl.Callback):
        seen: list[Any] = []  # noqa: RUF012

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
            self.seen.append(outputs)

    with pytest.warns(UserWarning, match=r"receives outputs\['correct'\] as a list.*combine_outputs"):
        fit(LitCounting(heavy="forward"), MicroBatching(), Keep(), limit=LIMIT_BYTES)
    assert all(len(outputs["predicted"]) in (8, 4) for outputs in Keep.seen)
    assert any(isinstance(outputs["correct"], list) for outputs in Keep.seen)


def test_batches_to_predict_may_lack_labels_and_shared_keys(make_trainer) -> None:
    class Predicting(LitOdd):
        def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.error(batch)

        predict_dataloader = LitOdd.train_dataloader

    trainer = make_trainer(callbacks=[MicroBatching(eval=3, weight="tokens", shared_keys=["table"])])
    (first, _) = trainer.predict(Predicting())
    assert first.shape == (8,)
