"""Where a step cannot be traced, a budget is kept as far as that is possible without a trace."""

import re
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from support.helpers import assert_equal_weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_vram import AutoVRAM
from lightning_vram.estimation.traced_fit import reason_of
from lightning_vram.private_names.dispatcher import UNKNOWN_VALUES, UnsupportedOperatorException

WIDTH = 32
SECOND_LINE = r"\nThe run continues without a plan: {}, the limit of {} on cpu is not enforced\.$"


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))


class Untraceable(pl.LightningModule):
    """Runs on real tensors only. Its weights take 12.4 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(3)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if type(batch) is not Tensor:
            raise RuntimeError("aten.secret.default: not today\nat all")
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0)), batch_size=4)


class Look(Callback):
    takes_no_memory = True

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.kinds = [type(one).__name__ for one in trainer.callbacks]


def fit(make_trainer, *callbacks, model=Untraceable, **arguments):
    """Fit a new model; returns it and what ``AutoVRAM`` said."""
    pl.seed_everything(0, verbose=False)
    module = model()
    trainer = make_trainer(callbacks=list(callbacks), max_epochs=1, **arguments)
    before = list(trainer.callbacks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module)
    assert trainer.callbacks == before
    return module, [str(one.message) for one in caught if "AutoVRAM" in str(one.message)]


def test_with_a_budget_repeated_layers_are_checkpointed_from_the_first_step(make_trainer, tmp_path):
    look = Look()
    packed, said = fit(make_trainer, AutoVRAM("20KiB"), look)
    (message,) = said
    first, second = message.splitlines()
    assert re.fullmatch(
        r"AutoVRAM cannot plan this run: RuntimeError: secret: not today \(test_fallback\.py:\d+\)\.", first
    )
    assert second == (
        "The run continues without a plan: repeated layers are checkpointed, the limit of 20.00 KiB on cpu is not "
        "enforced."
    )
    assert look.kinds == ["AutoVRAM", "Look", "ActivationCheckpointing"]
    assert_equal_weights(fit(make_trainer)[0], packed)
    assert not list(tmp_path.rglob("*.json"))  # what is no plan is not kept


def test_without_a_budget_and_with_room_to_spare_nothing_changes(make_trainer):
    look = Look()
    _, said = fit(make_trainer, AutoVRAM(), look)
    (message,) = said
    assert message.endswith("The run starts unchanged.")
    assert look.kinds == ["AutoVRAM", "Look"]


def test_a_module_without_repeated_layers_goes_on(make_trainer):
    class One(Untraceable):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(WIDTH, WIDTH)

    packed, said = fit(make_trainer, AutoVRAM("20KiB"), model=One)
    assert re.search(SECOND_LINE.format("no repeated layers to checkpoint were found", "20\\.00 KiB"), said[0])
    assert_equal_weights(fit(make_trainer, model=One)[0], packed)


def test_reasons_are_words_that_a_user_can_act_on():
    data_dependent, dynamic_shape, _ = UNKNOWN_VALUES
    values = "the step reads values in a way that cannot be recorded; .item(), .tolist() and .numpy() can be"
    add, own = torch.ops.aten.add.Tensor, torch.library.custom_op("auto_vram_test::mine", _double, mutates_args=())
    assert reason_of(data_dependent(add)) == values
    assert reason_of(dynamic_shape(add)) == values
    assert reason_of(RuntimeError("The tensor has elements, but its data is not allocated yet.")) == values
    assert reason_of(MemoryError()) == "planning ran out of host memory"
    assert reason_of(UnsupportedOperatorException(add)) == (
        "the step uses an operator that does not run on fake tensors (add)"
    )
    assert reason_of(UnsupportedOperatorException(own._opoverload)) == (
        "the operator auto_vram_test.mine.default has no fake kernel; torch.library.register_fake gives it one"
    )


def _double(x: Tensor) -> Tensor:
    return 2 * x
