"""Averages of weights under ``fsdp_offload`` on an accelerator: none of them is there, and the results are the same."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, WeightAveraging
from support.devices import ACCELERATOR, device_module
from support.helpers import assert_equal_weights
from support.offload_nets import MODES, FusedCNN, Odd, Split, leave_group

from lightning_vram.optimizers import averages
from lightning_vram.private_names.lightning import average_of
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy

pytestmark = [pytest.mark.device, pytest.mark.distributed]
AVERAGES: dict[str, Any] = {
    "EMA": partial(EMAWeightAveraging, decay=0.9),
    # On a device a plain run takes the mean by another formula.
    "mean": partial(WeightAveraging, device="cpu", use_buffers=False),
}


@pytest.fixture(autouse=True)
def _alone():
    yield
    leave_group()


class Summed:
    """Has the gradients of a plain step on the device, and an optimizer that rounds alike everywhere."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.125, foreach=False)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.loss(batch).item())

    def on_train_batch_end(self, *unused: Any) -> None:
        self.seen.append(device_module().memory_allocated())


class Net(Summed, Split):
    pass


class Images(Summed, FusedCNN):
    pass


class Mixed(Summed, Odd):
    pass


@pytest.fixture
def fit(make_trainer, monkeypatch):
    monkeypatch.setattr(averages, "PART_ELEMENTS", 512)

    def fit(make: Any, average: Any = None, options: Any = None, **arguments: Any) -> Any:
        torch.manual_seed(0)
        model, callbacks = make(), [] if average is None else [average()]
        strategy = "auto" if options is None else FSDPOffloadStrategy(**{"min_params": 100, **options})
        given = {"accelerator": ACCELERATOR, "devices": 1, "max_epochs": 2, "limit_val_batches": 1, **arguments}
        torch.manual_seed(1)
        make_trainer(strategy=strategy, callbacks=callbacks, **given).fit(model)
        vars(model)["average"] = average_of(callbacks[0]) if callbacks else None
        leave_group()
        return model

    return fit


@pytest.mark.quick_sample(4)
@pytest.mark.parametrize("average", AVERAGES.values(), ids=AVERAGES)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("make", [Net, Images, Mixed])
def test_averages_are_those_of_a_plain_run(make, mode, average, fit):
    ours, plain = fit(make, average, mode), fit(make, average)
    assert_equal_weights(ours.average, plain.average.cpu())
    assert {p.device.type for p in (*ours.average.parameters(), *ours.average.buffers())} == {"cpu"}


@pytest.mark.parametrize("options", [{"offload": "optimizer"}, {"master": "split"}])
def test_where_weights_are_kept_changes_no_bit(options, fit):
    given = {"precision": "bf16-mixed"}
    ours, others = fit(Net, AVERAGES["EMA"], options, **given), fit(Net, AVERAGES["EMA"], {}, **given)
    assert_equal_weights(ours.average, others.average)
    assert_equal_weights(ours, others)


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_an_average_takes_nothing_of_the_device(mode, fit):
    with_it, without = (fit(Net, average, mode, limit_val_batches=0) for average in (AVERAGES["EMA"], None))
    assert with_it.seen == without.seen
