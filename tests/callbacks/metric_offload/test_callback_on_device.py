"""What metrics collect lies on the host, and stays there, while the model is on a device."""

import pytest
import torch
from support.devices import ACCELERATOR, DEVICE, device_module
from support.metric_models import METRICS, Detections, LitMetrics, assert_equal_values
from torchmetrics import Metric
from torchmetrics.classification import BinaryAUROC

from lightning_vram.callbacks.metric_offload import MetricOffload

pytestmark = [
    pytest.mark.device,
    pytest.mark.filterwarnings("ignore:MetricOffload. a step calls metrics that store lists"),
    pytest.mark.filterwarnings("ignore:No (nega|posi)tive samples in targets"),  # of one batch, in a bootstrap
]
NUM_BATCHES = 200
# The plain run computes on the device. CUDA adds up the 20 items of a sum in another order than the host does, which
# moves it by up to 19 roundings of 2**-24; divided by another sum, by as many again.
ROUNDING = 38 * 2.0**-24 if DEVICE == "cuda" else 0.0


@pytest.fixture
def make_device_trainer(make_trainer):
    return lambda **overrides: make_trainer(**{"accelerator": ACCELERATOR, "devices": 1, "max_epochs": 1} | overrides)


def run(make_device_trainer, callbacks, make_metric, use):
    torch.manual_seed(0)
    model = LitMetrics(make_metric, use)
    trainer = make_device_trainer(callbacks=callbacks)
    trainer.fit(model)
    return [model.values, dict(trainer.callback_metrics)]


def items_of(model):
    """The items of all list states of all metrics."""
    metrics = [module for module in model.modules() if isinstance(module, Metric)]
    states = [state for metric in metrics for state in metric.metric_state.values() if isinstance(state, list)]
    return [leaf for state in states for leaf in torch.utils._pytree.tree_leaves(state)]


@pytest.mark.parametrize(
    ("name", "use"), [("collection", "update"), ("detections", "log"), ("other states", "forward")]
)
def test_values_are_those_of_the_plain_run_and_lists_are_on_the_host(make_device_trainer, name, use):
    class Looks(MetricOffload):
        num_items = 0

        def on_validation_batch_end(self, trainer, pl_module, *args):
            super().on_validation_batch_end(trainer, pl_module, *args)
            items = items_of(pl_module)
            assert {item.device.type for item in items} == {"cpu"}
            Looks.num_items += len(items)

    plain, ours = (run(make_device_trainer, callbacks, METRICS[name], use) for callbacks in ([], [Looks()]))
    assert_equal_values(ours, plain, ROUNDING)
    assert Looks.num_items > 0
    assert use == "log" or {value.device.type for value in torch.utils._pytree.tree_leaves(ours[0])} == {
        DEVICE
    }  # as in a plain run


@pytest.mark.parametrize("make_metric", [BinaryAUROC, Detections], ids=["auroc", "as mean average precision"])
@pytest.mark.parametrize("use", ["update", "log"])
def test_device_bytes_stay_constant_over_200_batches(make_device_trainer, make_metric, use):
    class Reads(LitMetrics):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            allocated.append(device_module().memory_allocated())

    grown = {}
    for callbacks in ([], [MetricOffload()]):
        allocated = []
        torch.manual_seed(0)
        make_device_trainer(callbacks=callbacks).validate(Reads(make_metric, use, NUM_BATCHES), verbose=False)
        assert len(allocated) == NUM_BATCHES
        grown[bool(callbacks)] = max(allocated[1:]) - allocated[1]
    assert grown[True] == 0
    assert grown[False] > 0  # else this shows nothing


def test_states_are_back_where_the_metric_is(make_device_trainer):
    class Stays(LitMetrics):
        def on_validation_epoch_end(self):
            pass  # the user computes later

    torch.manual_seed(0)
    model = Stays(BinaryAUROC)
    make_device_trainer(callbacks=[MetricOffload()]).validate(model, verbose=False)
    assert model.metric.device.type == "cpu"  # Lightning leaves the module on the host
    value = model.metric.compute()
    model.metric.to(DEVICE)
    assert {item.device.type for item in items_of(model)} == {DEVICE}
    model.metric._computed = None
    assert_equal_values(model.metric.compute(), value, ROUNDING)


def test_outputs_collected_by_hand_are_named_once(make_device_trainer, recwarn):
    class Collects(LitMetrics):
        def validation_step(self, batch, batch_idx):
            self.outputs.setdefault(0, []).append(torch.ones(256, device=self.device))
            self.by_hand.append(torch.ones(256, device=self.device))
            self.on_host.append(torch.ones(256))

        def on_validation_epoch_end(self):
            pass

    model = Collects(BinaryAUROC)
    model.by_hand, model.on_host, model.outputs = [], [], {}
    make_device_trainer(callbacks=[MetricOffload()]).validate(model, verbose=False)
    (message,) = (str(one.message) for one in recwarn if "collects tensors" in str(one.message))
    assert message == (
        f"MetricOffload: the module collects tensors on {DEVICE}:0 in `self.by_hand` (3.00 KiB, 1.00 KiB more "
        "with each batch), `self.outputs` (3.00 KiB, 1.00 KiB more with each batch). Move them to the CPU, as in "
        "`self.by_hand.append(output.detach().cpu())`, or let a metric collect them."
    )
