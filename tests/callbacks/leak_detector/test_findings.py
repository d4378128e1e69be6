"""What a module keeps by mistake without growth: reported once; and nothing where there is no mistake."""

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from support.helpers import LitManual, LitTiny, TinyCNN, TinyGPT

from lightning_vram.callbacks.leak_detector import LeakDetector, callback

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning, on small data


@pytest.fixture
def told(monkeypatch):
    warnings = []
    monkeypatch.setattr(callback, "rank_zero_warn", lambda text, **_: warnings.append(text))
    return warnings


class ZeroesLate(LitManual):
    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()


class ZeroesAtOnce(LitManual):
    def training_step(self, batch, batch_idx):
        for optimizer in self.optimizers():
            self.manual_backward(self.loss(batch))
            optimizer.step()
            optimizer.zero_grad()


def test_manual_optimization_is_told_where_it_zeroes_late(make_trainer, told):
    model = ZeroesLate(TinyCNN())
    make_trainer(callbacks=[LeakDetector()]).fit(model)
    num_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    assert told == [
        f"LeakDetector: {num_bytes / 1024:.2f} KiB of gradients are still in memory when training_step "
        f"begins, although the optimizer has already stepped. In manual optimization, call "
        f"optimizer.zero_grad() right after optimizer.step()."
    ]


class ReturnsGraph(LitTiny):
    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            return self.net(batch[0])

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return {"logits": self.validation_step(batch, batch_idx)}


class ReturnsDetached(ReturnsGraph):
    def validation_step(self, batch, batch_idx):
        return super().validation_step(batch, batch_idx).detach()

    test_step = validation_step


@pytest.mark.parametrize("stage", ["fit", "test", "predict"])
def test_a_graph_that_an_evaluation_returns_is_told_once(stage, make_trainer, told):
    trainer = make_trainer(callbacks=[LeakDetector()], inference_mode=False)
    getattr(trainer, stage)(ReturnsGraph(TinyGPT()))
    hook = "validation_step" if stage == "fit" else f"{stage}_step"
    assert told == [
        f"LeakDetector: ReturnsGraph.{hook} returns a tensor with its autograd graph, which holds activations. "
        "Return tensor.detach(), or remove torch.enable_grad()."
    ]


class Distilled(LitTiny):
    """Learns from a teacher that runs in evaluation mode, but not without gradients."""

    def __init__(self, *, trains_teacher: bool) -> None:
        super().__init__(TinyCNN())
        self.teacher = TinyCNN().eval()
        self.teacher.requires_grad_(trains_teacher)

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + (self.net(batch[0]) - self.teacher(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def test_gradients_that_no_optimizer_has_are_told_once(make_trainer, told):
    model = Distilled(trains_teacher=True)
    make_trainer(callbacks=[LeakDetector()]).fit(model)
    num_bytes = sum(4 * parameter.numel() for parameter in model.teacher.parameters())
    assert told == [
        f"LeakDetector: {num_bytes / 1024:.2f} KiB of gradients are never freed: no optimizer has their "
        f"parameters, from 'teacher.0' on. Call requires_grad_(False) on frozen parameters, or run them under "
        f"torch.no_grad(), which also avoids storing their graph."
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ZeroesAtOnce(TinyCNN()),
        lambda: Distilled(trains_teacher=False),
        lambda: ReturnsDetached(TinyGPT()),
        lambda: LitTiny(TinyGPT()),
    ],
)
def test_where_there_is_no_mistake_nothing_is_told(make, make_trainer, told):
    model, trainer = make(), make_trainer(callbacks=[LeakDetector()], inference_mode=False)
    for run in (trainer.fit, trainer.test, trainer.predict):
        run(model)
    assert told == []


def test_strategies_that_manage_gradients_are_left_alone(make_trainer, told, monkeypatch):
    monkeypatch.setattr(SingleDeviceStrategy, "handles_gradient_accumulation", True)  # as DeepSpeed has it
    make_trainer(callbacks=[LeakDetector()]).fit(Distilled(trains_teacher=True))
    assert told == []
