"""InPlaceFusion in real fits: what it saves, what it leaves equal, what it refuses, and that it leaves no trace."""

import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import LitTiny, TinyGPT, describe_module
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_vram import ActivationCheckpointing, InPlaceFusion
from lightning_vram.techniques.in_place_fusion import Fusion

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:lightning")


class Stack(nn.Module):
    """Convolution, batch norm and activation, three times."""

    def __init__(self, activation: type[nn.Module] = nn.SiLU) -> None:
        super().__init__()
        widths = (3, 8, 8, 8)
        stages = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), activation())
            for a, b in itertools.pairwise(widths)
        ]
        self.body, self.head = nn.Sequential(*stages), nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).mean((2, 3)))


class LitStack(pl.LightningModule):
    def __init__(self, activation: type[nn.Module] = nn.SiLU, *, frozen: bool = False) -> None:
        super().__init__()
        self.net, self.frozen = Stack(activation), frozen
        for parameter in self.net.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, 0.7, 0.2)
        self.train()

    def train(self, mode: bool = True) -> "LitStack":
        super().train(mode)
        if self.frozen:
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()
        return self

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.05)

    def train_dataloader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(1)
        return DataLoader(torch.randn(12, 3, 8, 8, generator=generator), batch_size=4)

    val_dataloader = train_dataloader


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records if "InPlaceFusion" in record.getMessage()]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "modules"}, "InPlaceFusion(mode) must be 'auto' or 'general', got 'modules'."),
        ({"abn": "inplace"}, "InPlaceFusion(abn) must be 'invert' or None, got 'inplace'."),
        ({"dropout": 1}, "InPlaceFusion(dropout) must be 'mask' or 'replay', got 1 of type int."),
        ({"inplace": 1}, "InPlaceFusion(inplace) must be True or False, got 1 of type int."),
        ({"fold_frozen_bn": "yes"}, "InPlaceFusion(fold_frozen_bn) must be True or False, got 'yes' of type str."),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises((TypeError, ValueError)) as raised:
        InPlaceFusion(**arguments)
    assert str(raised.value) == message


@pytest.mark.parametrize("min_bytes", [-1, "1 apple", True])
def test_wrong_sizes_are_refused(min_bytes):
    with pytest.raises((TypeError, ValueError), match=r"InPlaceFusion\(min_bytes\)"):
        InPlaceFusion(min_bytes=min_bytes)


def test_it_tells_once_what_it_keeps(fit, messages):
    """Per stage of 4 x 8 x 8 x 8 maps of 8 KiB: plain keeps norm input, norm output and activation; the last one's
    activation is read by mean alone. Ours keeps norm inputs, the images (3 KiB) and the features (128 bytes)."""
    fit(LitStack, InPlaceFusion(min_bytes=256))
    (message,) = messages()
    assert message.startswith("InPlaceFusion saves 27.")
    assert message.endswith("5 tensors are recomputed.")


class Skipping(LitStack):
    """Its first step has no loss."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        return super().training_step(batch, batch_idx) if batch_idx else None


class Changing(LitStack):
    """Takes another path in each step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        stage = self.net.body[0]
        y = stage[1](stage[0](batch))
        z = stage[2](y) if batch_idx != 1 else y
        return (z + y if batch_idx == 2 else z).square().mean()


@pytest.mark.parametrize(
    ("make", "arguments", "options"),
    [
        (partial(LitStack, nn.LeakyReLU), {"mode": "general", "inplace": True}, {}),
        (LitStack, {}, {"precision": "64-true"}),
        (lambda: LitTiny(TinyGPT()), {"dropout": "replay"}, {}),  # the generator is put back: masks of later steps
        (LitStack, {}, {"precision": "bf16-true"}),
        (Skipping, {}, {}),
        (Changing, {}, {}),
    ],
)
def test_weights_are_equal_to_the_bit(make, arguments, options, messages, same_as_baseline):
    same_as_baseline(make, InPlaceFusion(min_bytes=256, **arguments), **options)
    assert len([message for message in messages() if "saves" in message]) == 1


def test_anomaly_detection_and_checkpointed_layers_leave_weights_equal_to_the_bit(same_as_baseline):
    callbacks = [ActivationCheckpointing(every_n_layers=2), InPlaceFusion(min_bytes=0)]
    same_as_baseline(lambda: LitTiny(TinyGPT()), *callbacks, detect_anomaly=True, limit_train_batches=2)


def test_activations_are_in_place_during_the_fit_and_not_after_it(fit, messages):
    seen = []

    class Look(LitStack):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            seen.append(self.net.body[0][2].inplace)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            assert not self.net.body[0][2].inplace

    model = fit(partial(Look, nn.LeakyReLU), InPlaceFusion(inplace=True), limit_val_batches=1)
    assert seen == [False, True, True]
    assert not model.net.body[0][2].inplace
    assert "InPlaceFusion runs 3 activations in place." in messages()


@pytest.mark.parametrize(
    ("make", "option", "message"),
    [
        (
            partial(LitStack, frozen=True),
            {"fold_frozen_bn": True},
            "InPlaceFusion folds 3 frozen batch norms into their convolutions.",
        ),
        (partial(LitStack, nn.LeakyReLU), {"abn": "invert"}, "InPlaceFusion inverts 3 activations behind batch norms."),
        (partial(LitStack, nn.ELU), {"abn": "invert"}, "InPlaceFusion inverts 3 activations behind batch norms."),
    ],
)
def test_folding_and_inverting_train_to_the_same_weights_up_to_rounding(
    make, option, message, messages, same_as_baseline
):
    ours, plain = same_as_baseline(make, InPlaceFusion(**option), tolerance=2e-5)
    assert message in messages()
    assert describe_module(ours) == describe_module(plain)


def test_folding_norms_in_training_mode_is_refused(fit):
    with pytest.raises(MisconfigurationException) as raised:
        fit(LitStack, InPlaceFusion(fold_frozen_bn=True))
    assert str(raised.value) == (
        "InPlaceFusion: fold_frozen_bn=True, but none of 3 batch norms behind a convolution is in evaluation mode. "
        "Call .eval() on them before the fit or in on_train_epoch_start, or leave out fold_frozen_bn."
    )


def test_inverting_relu_is_refused(make_trainer):
    model = LitStack(nn.ReLU)
    with pytest.raises(MisconfigurationException) as raised:
        make_trainer(callbacks=[InPlaceFusion(abn="invert")]).fit(model)
    assert str(raised.value) == (
        "InPlaceFusion: abn='invert' found no batch norm in training mode (SyncBatchNorm does not count) whose only "
        "reader is a LeakyReLU or ELU that reads nothing else. ReLU cannot be inverted: it drops negative values. "
        "Leave out abn: recomputation saves the same and needs no inverse."
    )
    assert type(model.net.body[0][1]) is nn.BatchNorm2d


def test_a_model_in_which_nothing_can_be_saved_gets_one_warning(fit):
    class Linear(LitStack):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))

    with pytest.warns(UserWarning, match="^InPlaceFusion found nothing to save in a training step") as warned:
        fit(Linear, InPlaceFusion())
    assert sum("InPlaceFusion" in str(warning.message) for warning in warned) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_part_is_left_to_the_compiler_with_a_note(fit, messages):
    def make() -> LitStack:
        torch._dynamo.reset()
        model = LitStack()
        model.net.compile(backend="eager")
        return model

    fit(make, InPlaceFusion(), limit_train_batches=1)
    assert messages()[0] == "InPlaceFusion lets the compiler recompute 3 norms and activations."


def test_strategies_that_move_parameters_are_refused(make_trainer):
    callback, trainer = InPlaceFusion(), make_trainer()
    trainer.strategy.__class__ = type("Sharded", (pl.strategies.FSDPStrategy,), {"__init__": object.__init__})
    with pytest.raises(
        MisconfigurationException, match=r"^InPlaceFusion does not work with Sharded: it frees and moves"
    ):
        callback.setup(trainer, LitStack(), "fit")


@pytest.mark.parametrize("options", [{"abn": "invert"}, {"fold_frozen_bn": True}], ids=str)
def test_a_path_that_changes_is_refused_where_it_would_be_wrong(fit, options):
    class ChangingLate(LitStack):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            stage = self.net.body[0]
            y = stage[0](batch)
            if batch_idx == 2:
                return (y if self.frozen else stage[1](y)).square().mean()
            return stage[2](stage[1](y)).square().mean()

    make = partial(ChangingLate, nn.LeakyReLU, frozen="fold_frozen_bn" in options)
    with pytest.raises(MisconfigurationException, match="went elsewhere than in the first step"):
        fit(make, InPlaceFusion(**options))


class Watched(InPlaceFusion):
    num_dropped = 0

    def on_train_batch_end(self, *args: Any) -> None:
        assert isinstance(self._fusion, Fusion)
        self.num_dropped = self._fusion._recomputation.report.num_dropped


def test_layers_that_thaw_later_are_recomputed_from_then_on(same_as_baseline):
    class Thawing(LitStack):
        def on_train_epoch_start(self) -> None:
            self.net.body.requires_grad_(self.current_epoch > 0)

    with pytest.warns(UserWarning, match="InPlaceFusion found nothing"):
        same_as_baseline(Thawing, fusion := Watched(min_bytes=512), max_epochs=2)
    assert fusion.num_dropped > 0
