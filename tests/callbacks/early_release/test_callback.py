"""EarlyRelease: when gradients go, who still sees them, what it refuses and tells of, and that it undoes itself."""

import gc

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import LitTiny, TinyCNN, fail_in
from torch import nn
from torch.utils.data import DataLoader

from lightning_vram import track_memory
from lightning_vram.callbacks.early_release import EarlyRelease

PLACE = "lightning_vram.callbacks.early_release.callback"
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # what it warns of is asked for by name
WIDTH, BATCH = 64, 256
LAYER_BYTES = WIDTH * WIDTH * 4
MAP_BYTES = BATCH * WIDTH * 4
NUM_BATCHES = 4


class Told:
    """What the callback has said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.warnings: list[str] = []
        self.infos: list[str] = []
        monkeypatch.setattr(f"{PLACE}.rank_zero_warn", lambda text, **_: self.warnings.append(text))
        monkeypatch.setattr(f"{PLACE}.rank_zero_info", self.infos.append)


@pytest.fixture
def told(monkeypatch):
    return Told(monkeypatch)


class Wide(pl.LightningModule):
    """Two layers whose maps are larger than their weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(NUM_BATCHES * BATCH, WIDTH), batch_size=BATCH)


class ForwardPeaks(pl.Callback):
    """Tracks each batch from its start to its backward."""

    def __init__(self) -> None:
        self.bytes: list[int] = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.tracker = track_memory(module, optimizers=trainer.optimizers, inputs=batch).__enter__()

    def on_before_backward(self, trainer, module, loss):
        self.tracker.__exit__(None, None, None)
        self.bytes.append(self.tracker.timeline.peak_bytes)


def forward_peaks(fit, *callbacks: pl.Callback, **arguments: object) -> list[int]:
    fit(Wide, *callbacks, peaks := ForwardPeaks(), **arguments)
    return peaks.bytes


def test_the_forward_peak_is_lower_by_the_bytes_of_the_gradients(fit, told):
    plain, early = forward_peaks(fit), forward_peaks(fit, EarlyRelease())
    weights, batch, maps, squares, mean = 2 * LAYER_BYTES, MAP_BYTES, 2 * MAP_BYTES, MAP_BYTES, 4
    gradients = 2 * LAYER_BYTES
    assert early == NUM_BATCHES * [weights + batch + maps + squares + mean]
    assert plain == [early[0], *(NUM_BATCHES - 1) * [early[0] + gradients]]  # in the first batch there are none
    assert told.infos == ["EarlyRelease frees 32.00 KiB of gradients before each forward."]
    assert told.warnings == []


def test_within_a_window_nothing_is_freed(fit):
    plain = forward_peaks(fit, accumulate_grad_batches=2)
    early = forward_peaks(fit, EarlyRelease(), accumulate_grad_batches=2)
    assert [one - other for one, other in zip(plain, early, strict=True)] == [0, 0, 2 * LAYER_BYTES, 0]


class Listening(LitTiny):
    """Notes what its hooks see of gradients, and in which order they come."""

    def __init__(self, net: TinyCNN) -> None:
        super().__init__(net)
        self.heard: list[tuple[str, float]] = []

    def hear(self, hook: str) -> None:
        gradient = next(self.parameters()).grad
        self.heard.append((hook, -1.0 if gradient is None else gradient.norm().item()))

    def on_train_batch_start(self, batch, batch_idx):
        self.hear("on_train_batch_start")

    def training_step(self, batch, batch_idx):
        self.heard.append(("training_step", 0))  # what it sees is what differs
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss):
        self.hear("on_before_backward")

    def on_before_optimizer_step(self, optimizer):
        self.hear("on_before_optimizer_step")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.hear("on_train_batch_end")


def test_every_hook_sees_the_same_gradients(same_as_baseline):
    early, plain = same_as_baseline(
        lambda: Listening(TinyCNN()), EarlyRelease(), max_epochs=2, accumulate_grad_batches=2
    )
    assert early.heard == plain.heard


class Teaches(Listening):
    def on_before_zero_grad(self, optimizer):
        self.hear("on_before_zero_grad")


class Zeroes(Listening):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        self.hear("optimizer_zero_grad")
        super().optimizer_zero_grad(epoch, batch_idx, optimizer)


@pytest.mark.parametrize(("kind", "hook"), [(Teaches, "on_before_zero_grad"), (Zeroes, "optimizer_zero_grad")])
def test_own_hooks_of_zeroing_come_where_they_did(same_as_baseline, told, kind, hook):
    early, plain = same_as_baseline(lambda: kind(TinyCNN()), EarlyRelease())
    assert early.heard == plain.heard
    assert told.warnings == [
        f"EarlyRelease does not free gradients: {kind.__name__}.{hook} would run before training_step, which "
        f"may read what it changes. Use on_train_batch_end instead."
    ]


class ZeroesToZero(LitTiny):
    def configure_optimizers(self):
        class Optimizer(torch.optim.SGD):
            def zero_grad(self, set_to_none=True):
                super().zero_grad(set_to_none=False)

        return Optimizer(self.parameters(), lr=0.1)


def test_an_optimizer_that_keeps_its_gradients_is_told_once_and_zeroes_where_it_did(same_as_baseline, told):
    _, plain = same_as_baseline(lambda: ZeroesToZero(TinyCNN()), EarlyRelease())
    num_bytes = sum(4 * parameter.numel() for parameter in plain.parameters())
    assert told.infos == []
    assert told.warnings == [
        (f"EarlyRelease does not free gradients: zero_grad of your optimizer keeps {num_bytes / 1024:.2f} KiB of them.")
    ]


# --- garbage ---


class Collections(pl.Callback):
    """After which steps garbage was collected, and where the collector runs by itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[int] = []
        self.automatic: set[str] = set()
        self.trainer: pl.Trainer | None = None
        monkeypatch.setattr(gc, "collect", lambda *_: self.steps.append(self.trainer.global_step))

    def setup(self, trainer, module, stage):
        self.trainer = trainer

    def on_train_batch_start(self, trainer, *_):
        self._note("training")

    def on_validation_batch_start(self, trainer, *_):
        self._note("validation")

    def _note(self, where: str) -> None:
        if gc.isenabled():
            self.automatic.add(where)


@pytest.mark.parametrize(
    ("every_n_steps", "accumulate_grad_batches", "steps", "automatic"),
    [
        (2, 1, [0, 2, 4, 6], {"validation"}),
        (2, 3, [0, 2], {"validation"}),
        (None, 1, [], {"training", "validation"}),
    ],
)
def test_garbage_is_collected_after_every_nth_step_alone(
    every_n_steps, accumulate_grad_batches, steps, automatic, make_trainer, monkeypatch
):
    collections = Collections(monkeypatch)
    callbacks = [EarlyRelease(collect_every_n_steps=every_n_steps), collections]
    make_trainer(callbacks=callbacks, accumulate_grad_batches=accumulate_grad_batches).fit(LitTiny(TinyCNN()))
    assert collections.steps == steps
    assert collections.automatic == automatic
    assert gc.isenabled()


@pytest.mark.parametrize("hook", ["training_step", "on_validation_end"])
def test_a_fit_that_fails_leaves_nothing_behind(hook, make_trainer):
    trainer = make_trainer(callbacks=[EarlyRelease(collect_every_n_steps=1)])
    fail_in(LitTiny(TinyCNN()), hook, trainer)
    assert gc.isenabled()
    assert "_make_zero_grad_fn" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)


def test_a_collector_that_was_off_stays_off(fit):
    gc.disable()
    try:
        fit(lambda: LitTiny(TinyCNN()), EarlyRelease(collect_every_n_steps=1))
        assert not gc.isenabled()
    finally:
        gc.enable()


# --- refusals ---


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (0, ValueError, r"^EarlyRelease\(collect_every_n_steps\) must be at least 1, got 0\.$"),
        (True, TypeError, r"^EarlyRelease\(collect_every_n_steps\) must be "),
    ],
)
def test_a_rhythm_that_is_none_is_refused(value, error, message):
    with pytest.raises(error, match=message):
        EarlyRelease(collect_every_n_steps=value)


def test_two_are_refused(fit):
    message = r"^EarlyRelease can be used once, got several\. Remove all but one\.$"
    with pytest.raises(MisconfigurationException, match=message):
        fit(lambda: LitTiny(TinyCNN()), EarlyRelease(), EarlyRelease())
