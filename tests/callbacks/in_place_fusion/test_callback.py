"""InPlaceFusion in real fits: what it saves, what it leaves equal, what it refuses, and that it leaves no trace."""

import copy
import itertools
import logging
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import LitManual, LitTiny, TinyCNN, TinyGPT, assert_equal_weights, describe_module
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_vram import ActivationCheckpointing, InPlaceFusion, VRAMMonitor
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
        torch.manual_seed(0)
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


def fit(model: pl.LightningModule, make_trainer, *callbacks: pl.Callback, **arguments: Any) -> pl.LightningModule:
    torch.manual_seed(1)
    make_trainer(callbacks=list(callbacks), **arguments).fit(model)
    return model


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


def test_it_tells_once_what_it_keeps(make_trainer, messages):
    """Per stage of 4 x 8 x 8 x 8 maps of 8 KiB: plain keeps norm input, norm output and activation; the last one's
    activation is read by mean alone. Ours keeps norm inputs, the images (3 KiB) and the features (128 bytes)."""
    fit(LitStack(), make_trainer, InPlaceFusion(min_bytes=256))
    (message,) = messages()
    assert message.startswith("InPlaceFusion saves 27.")
    assert message.endswith("5 tensors are recomputed.")


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.SiLU, nn.LeakyReLU])
@pytest.mark.parametrize("mode", ["auto", "general"])
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.filterwarnings("ignore:InPlaceFusion found nothing")
def test_every_mode_leaves_weights_equal_to_the_bit(make_trainer, mode, inplace, activation):
    plain = fit(LitStack(activation), make_trainer)
    ours = fit(LitStack(activation), make_trainer, InPlaceFusion(mode=mode, inplace=inplace))
    assert_equal_weights(ours, plain)


def test_activations_are_in_place_during_the_fit_and_not_after_it(make_trainer, messages):
    model, seen = LitStack(nn.LeakyReLU), []

    class Look(LitStack):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            seen.append(self.net.body[0][2].inplace)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            assert not self.net.body[0][2].inplace

    model = Look(nn.LeakyReLU)
    fit(model, make_trainer, InPlaceFusion(inplace=True))
    assert seen == [False, True, True, True, True, True]
    assert not model.net.body[0][2].inplace
    assert "InPlaceFusion runs 3 activations in place." in messages()


def test_frozen_norms_are_folded_in_fine_tuning(make_trainer, messages):
    plain = fit(LitStack(frozen=True), make_trainer)
    model = LitStack(frozen=True)
    before = describe_module(model)
    fit(model, make_trainer, InPlaceFusion(fold_frozen_bn=True))
    assert "InPlaceFusion folds 3 frozen batch norms into their convolutions." in messages()
    assert describe_module(model) == before
    for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


def test_folding_norms_in_training_mode_is_refused(make_trainer):
    with pytest.raises(MisconfigurationException) as raised:
        fit(LitStack(), make_trainer, InPlaceFusion(fold_frozen_bn=True))
    assert str(raised.value) == (
        "InPlaceFusion: fold_frozen_bn=True, but none of 3 batch norms behind a convolution is in evaluation mode. "
        "Call .eval() on them before the fit or in on_train_epoch_start, or leave out fold_frozen_bn."
    )


def test_inverting_relu_is_refused(make_trainer):
    model = LitStack(nn.ReLU)
    with pytest.raises(MisconfigurationException) as raised:
        fit(model, make_trainer, InPlaceFusion(abn="invert"))
    assert str(raised.value) == (
        "InPlaceFusion: abn='invert' found no batch norm in training mode (SyncBatchNorm does not count) whose only "
        "reader is a LeakyReLU or ELU that reads nothing else. ReLU cannot be inverted: it drops negative values. "
        "Leave out abn: recomputation saves the same and needs no inverse."
    )
    assert type(model.net.body[0][1]) is nn.BatchNorm2d


@pytest.mark.parametrize("activation", [nn.LeakyReLU, nn.ELU])
def test_inverted_activations_train_to_the_same_weights_up_to_rounding(make_trainer, messages, activation):
    plain = fit(LitStack(activation), make_trainer)
    model = LitStack(activation)
    before = describe_module(model)
    fit(model, make_trainer, InPlaceFusion(abn="invert"))
    assert "InPlaceFusion inverts 3 activations behind batch norms." in messages()
    assert describe_module(model) == before
    for a, b in zip(plain.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class Residual(nn.Module):
    """One activation for the inside of a block and for its sum, as networks of torchvision have it."""

    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.stem, self.act = nn.Conv2d(3, 8, 1), activation()
        self.conv1, self.norm1 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.norm2(self.conv2(self.act(self.norm1(self.conv1(x)))))
        return self.head(self.act(x + y).mean((2, 3)))


def test_an_activation_that_is_used_twice_is_left_to_recomputation(make_trainer, messages):
    runs = []
    for callbacks in ([], [InPlaceFusion(abn="invert")]):
        model = LitStack(nn.LeakyReLU)
        model.net.head = nn.Sequential(Residual(nn.LeakyReLU), nn.Linear(4, 4))
        model.net.forward = lambda x, net=model.net: net.head(x) + net.body(x).mean()
        runs.append(fit(model, make_trainer, *callbacks))
    assert "InPlaceFusion inverts 3 activations behind batch norms." in messages()
    for a, b in zip(runs[0].state_dict().values(), runs[1].state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_model_in_which_nothing_can_be_saved_gets_one_warning(make_trainer):
    class Linear(LitStack):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))

    model = Linear()
    with pytest.warns(UserWarning, match="^InPlaceFusion found nothing to save in a training step") as warned:
        fit(model, make_trainer, InPlaceFusion())
    assert sum("InPlaceFusion" in str(warning.message) for warning in warned) == 1


@pytest.mark.parametrize("monitor_first", [True, False])
def test_the_monitor_may_stand_before_or_behind_it(make_trainer, monitor_first):
    pair = [VRAMMonitor(), InPlaceFusion()]
    ours = fit(LitStack(), make_trainer, *(pair if monitor_first else pair[::-1]))
    assert_equal_weights(ours, fit(LitStack(), make_trainer))


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_other_precisions_leave_weights_equal_to_the_bit(make_trainer, precision):
    plain = fit(LitStack(), make_trainer, precision=precision)
    assert_equal_weights(fit(LitStack(), make_trainer, InPlaceFusion(), precision=precision), plain)


def test_anomaly_detection_and_checkpointed_layers_leave_weights_equal_to_the_bit(make_trainer):
    plain = fit(LitTiny(TinyGPT()), make_trainer)
    callbacks = [ActivationCheckpointing(every_n_layers=2), InPlaceFusion(min_bytes=0)]
    del plain
    runs = []
    for chosen in ([], callbacks):
        torch.manual_seed(0)
        runs.append(fit(LitTiny(TinyGPT()), make_trainer, *chosen, detect_anomaly=True))
    assert_equal_weights(*runs)


class LitAdversarial(LitStack):
    """Both losses first, then both optimizers: the second backward runs on weights the first step has moved."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Dropout(0.2), nn.Linear(32, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        features = self.net(batch)
        loss = self.other(features).square().mean()
        critic = (self.other(features.detach()) - 1).square().mean()
        second.zero_grad()
        self.manual_backward(critic, inputs=list(self.other.parameters()))
        gradient = torch.autograd.grad(self.net(batch * 2).sum(), self.net.head.weight, create_graph=True)[0]
        first.zero_grad()
        self.manual_backward(loss + gradient.square().mean(), inputs=list(self.net.parameters()))
        first.step()
        second.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(part.parameters(), 0.01) for part in (self.net, self.other)]


def test_two_optimizers_and_a_gradient_penalty_by_hand_leave_weights_equal_to_the_bit(make_trainer):
    runs = []
    for callbacks in ([], [InPlaceFusion(min_bytes=0)]):
        torch.manual_seed(0)
        runs.append(fit(LitAdversarial(), make_trainer, *callbacks))
    assert_equal_weights(*runs)


def test_what_custom_functions_hide_is_left_alone(make_trainer):
    class Hide(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.hidden = x.sin()
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2 + 0 * ctx.hidden

    class Hiding(LitStack):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return Hide.apply(self.net(batch)).square().mean()

    ours = fit(Hiding(), make_trainer, InPlaceFusion(min_bytes=0))
    assert_equal_weights(ours, fit(Hiding(), make_trainer))


def test_a_step_that_fails_leaves_nothing_behind(make_trainer):
    class Failing(LitStack):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1:
                raise KeyError("stop")
            return loss

    model = Failing()
    before = describe_module(model)
    trainer = make_trainer(callbacks=[InPlaceFusion(inplace=True)])
    with pytest.raises(KeyError):
        trainer.fit(model)
    assert describe_module(model) == before
    assert "training_step" not in vars(trainer.strategy)
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_part_is_left_to_the_compiler_with_a_note(make_trainer, messages):
    runs = []
    for callbacks in ([], [InPlaceFusion()]):
        torch._dynamo.reset()
        model = LitStack()
        model.net.compile(backend="aot_eager")
        runs.append(fit(model, make_trainer, *callbacks))
    assert_equal_weights(*runs)
    assert messages()[0] == "InPlaceFusion lets the compiler recompute 3 norms and activations."


def test_strategies_that_move_parameters_are_refused(make_trainer):
    callback, trainer = InPlaceFusion(), make_trainer()
    trainer.strategy.__class__ = type("Sharded", (pl.strategies.FSDPStrategy,), {"__init__": object.__init__})
    with pytest.raises(
        MisconfigurationException, match=r"^InPlaceFusion does not work with Sharded: it frees and moves"
    ):
        callback.setup(trainer, LitStack(), "fit")


@pytest.mark.parametrize("options", [{"abn": "invert"}, {"fold_frozen_bn": True}], ids=str)
def test_checkpoints_of_the_users_own_find_the_modules_as_the_forward_did(make_trainer, options):
    class Checkpointing(LitStack):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return checkpoint(self.net, batch, use_reentrant=False).square().mean()

    frozen = "fold_frozen_bn" in options
    plain = fit(Checkpointing(nn.LeakyReLU, frozen=frozen), make_trainer)
    ours = fit(Checkpointing(nn.LeakyReLU, frozen=frozen), make_trainer, InPlaceFusion(**options))
    for a, b in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_path_that_changes_leaves_weights_equal_to_the_bit(make_trainer):
    class Changing(LitStack):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            stage = self.net.body[0]
            y = stage[1](stage[0](batch))
            z = stage[2](y) if batch_idx != 1 else y
            return (z + y if batch_idx == 2 else z).square().mean()

    plain = fit(Changing(), make_trainer)
    assert_equal_weights(fit(Changing(), make_trainer, InPlaceFusion(min_bytes=0)), plain)


@pytest.mark.parametrize("options", [{"abn": "invert"}, {"fold_frozen_bn": True}], ids=str)
def test_a_path_that_changes_is_refused_where_it_would_be_wrong(make_trainer, options):
    class Changing(LitStack):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            stage = self.net.body[0]
            y = stage[0](batch)
            if batch_idx == 2:
                return (y if self.frozen else stage[1](y)).square().mean()
            return stage[2](stage[1](y)).square().mean()

    with pytest.raises(MisconfigurationException, match="went elsewhere than in the first step"):
        fit(Changing(nn.LeakyReLU, frozen="fold_frozen_bn" in options), make_trainer, InPlaceFusion(**options))


def test_a_first_step_without_a_loss_and_layers_that_thaw_do_not_switch_it_off(make_trainer, messages):
    class Skipping(LitStack):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
            return super().training_step(batch, batch_idx) if batch_idx else None

    plain = fit(Skipping(), make_trainer)
    assert_equal_weights(fit(Skipping(), make_trainer, InPlaceFusion(min_bytes=256)), plain)
    assert len(messages()) == 1


class Watched(InPlaceFusion):
    num_dropped = 0

    def on_train_batch_end(self, *args: Any) -> None:
        assert isinstance(self._fusion, Fusion)
        self.num_dropped = self._fusion._recomputation.report.num_dropped


def test_layers_that_thaw_later_are_recomputed_from_then_on(make_trainer):
    class Thawing(LitStack):
        def on_train_epoch_start(self) -> None:
            self.net.body.requires_grad_(self.current_epoch > 0)

    plain = fit(Thawing(), make_trainer)
    with pytest.warns(UserWarning, match="InPlaceFusion found nothing"):
        ours = fit(Thawing(), make_trainer, fusion := Watched(min_bytes=512))
    assert_equal_weights(ours, plain)
    assert fusion.num_dropped > 0


def test_inverted_activations_may_be_in_place_already(make_trainer, messages):
    class Inplace(LitStack):
        def __init__(self) -> None:
            super().__init__(nn.LeakyReLU)
            for stage in self.net.body:
                stage[2].inplace = True

    fit(model := Inplace(), make_trainer, InPlaceFusion(abn="invert"))
    assert "InPlaceFusion inverts 3 activations behind batch norms." in messages()
    assert model.net.body[0][2].inplace


def test_norms_that_cannot_be_inverted_are_left_as_they_are(make_trainer, messages):
    class Small(LitStack):
        def __init__(self) -> None:
            super().__init__(nn.LeakyReLU)
            nn.init.zeros_(self.net.body[1][1].weight.requires_grad_(False))

    fit(model := Small(), make_trainer, InPlaceFusion(abn="invert"))
    assert messages()[-1] == "InPlaceFusion inverts 3 activations behind batch norms."
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_a_second_fit_of_the_same_callback_starts_anew(make_trainer):
    callback, plain = InPlaceFusion(inplace=True), LitStack()
    ours = copy.deepcopy(plain)
    for _ in range(2):
        fit(plain, make_trainer)
        fit(ours, make_trainer, callback)
    assert_equal_weights(ours, plain)


def test_manual_optimization_of_the_helpers(make_trainer):
    runs = []
    for callbacks in ([], [InPlaceFusion(min_bytes=0, dropout="replay")]):
        torch.manual_seed(0)
        runs.append(fit(LitManual(TinyCNN()), make_trainer, *callbacks))
    assert_equal_weights(*runs)
