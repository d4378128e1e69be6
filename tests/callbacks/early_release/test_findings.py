"""What a module keeps by mistake: told once, with the bytes; and nothing where there is no mistake."""

import pytest
import torch
from support.helpers import LitManual, LitTiny, TinyCNN, TinyGPT

from lightning_vram.callbacks.early_release import EarlyRelease

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # Lightning, on small data


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
    make_trainer(callbacks=[EarlyRelease()]).fit(model)
    num_bytes = sum(4 * parameter.numel() for parameter in model.parameters())
    assert told.warnings == [
        f"EarlyRelease: {num_bytes / 1024:.2f} KiB of gradients are still in memory when training_step "
        f"begins, although the optimizer has already stepped. In manual optimization, call "
        f"optimizer.zero_grad() right after optimizer.step()."
    ]


def test_manual_optimization_that_zeroes_at_once_hears_nothing(make_trainer, told):
    make_trainer(callbacks=[EarlyRelease()]).fit(ZeroesAtOnce(TinyCNN()))
    assert told.warnings == []


# --- what a module keeps by mistake ---


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


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_graph_that_an_evaluation_returns_is_told_once_with_its_bytes(stage, make_trainer, told):
    trainer = make_trainer(callbacks=[EarlyRelease()], inference_mode=False)
    getattr(trainer, stage)(ReturnsGraph(TinyGPT()))
    hook = {"fit": "validation_step", "validate": "validation_step"}.get(stage, f"{stage}_step")
    (told_of,) = told.warnings
    assert told_of.startswith(
        f"EarlyRelease: ReturnsGraph.{hook} returns a tensor with its autograd graph, which holds "
    )
    assert told_of.endswith(" KiB, from 'net.embed' on. Return tensor.detach(), or remove torch.enable_grad().")


@pytest.mark.parametrize("kind", [ReturnsDetached, LitTiny])
def test_an_evaluation_without_a_graph_hears_nothing(kind, make_trainer, told):
    trainer = make_trainer(callbacks=[EarlyRelease()], inference_mode=False)
    model = kind(TinyGPT())
    for run in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        run(model)
    assert told.warnings == []


class KeepsGraph(LitTiny):
    """Returns nothing, and keeps all."""

    def __init__(self):
        super().__init__(TinyGPT())
        self.kept = []

    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            self.kept.append({"logits": self.net(batch[0])})

    test_step = predict_step = validation_step


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_a_graph_that_an_attribute_keeps_is_told_once(stage, make_trainer, told):
    trainer = make_trainer(callbacks=[EarlyRelease()], inference_mode=False)
    getattr(trainer, stage)(KeepsGraph())
    (told_of,) = told.warnings
    assert told_of.startswith(
        "EarlyRelease: `self.kept` stores an autograd graph that no backward has used, which holds "
    )
    assert told_of.endswith(
        " KiB, from 'net.embed' on. Store tensor.detach(), or compute it under torch.no_grad(); "
        "module.eval() does not disable gradients."
    )


class EvaluatesItself(LitTiny):
    """At the end of the epoch, in evaluation mode, which builds graphs as ever."""

    def training_step(self, batch, batch_idx):
        self.rows = batch[0]
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        self.eval()
        self.result = self.net(self.rows)
        self.train()


def test_an_evaluation_of_the_users_own(make_trainer, told):
    make_trainer(callbacks=[EarlyRelease()], max_epochs=1).fit(EvaluatesItself(TinyCNN()))
    (told_of,) = told.warnings
    assert told_of.startswith(
        "EarlyRelease: `self.result` stores an autograd graph that no backward has used, which holds "
    )


def test_losses_whose_backward_has_run_are_no_graphs(make_trainer, told):
    class KeepsLosses(LitTiny):
        def training_step(self, batch, batch_idx):
            self.loss_now = super().training_step(batch, batch_idx)
            self.cycle = [self.loss_now]
            self.cycle.append(self.cycle)
            return self.loss_now

    make_trainer(callbacks=[EarlyRelease()]).fit(KeepsLosses(TinyCNN()))
    assert told.warnings == []


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
    make_trainer(callbacks=[EarlyRelease()]).fit(model)
    num_bytes = sum(4 * parameter.numel() for parameter in model.teacher.parameters())
    assert told.warnings == [
        f"EarlyRelease: {num_bytes / 1024:.2f} KiB of gradients are never freed: no optimizer has their "
        f"parameters, from 'teacher.0' on. Call requires_grad_(False) on frozen parameters, or run them under "
        f"torch.no_grad(), which also avoids storing their graph."
    ]


def test_a_frozen_teacher_is_fine(make_trainer, told):
    make_trainer(callbacks=[EarlyRelease()]).fit(Distilled(trains_teacher=False))
    assert told.warnings == []
