"""ActivationOffload: what travels, what stays, what it says and what it refuses."""

import gc
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.devices import ACCELERATOR
from support.helpers import CASES, LitManual, LitTiny, TinyCNN, TinyGPT, assert_equal_weights, describe_module

from lightning_vram import ActivationCheckpointing, ActivationCompression, ActivationOffload, InPlaceFusion

pytestmark = [
    pytest.mark.filterwarnings("ignore:ActivationOffload offloads to host memory:UserWarning"),
    pytest.mark.filterwarnings("ignore:InPlaceFusion found nothing to save:UserWarning"),  # in checkpointed layers
]

SMALL = {"min_offload_bytes": 256}  # the models are tiny


def fit_both(make_model, make_trainer, make_callbacks, **arguments):
    fitted = []
    for callbacks in ([], make_callbacks()):
        torch.manual_seed(0)
        model = make_model()
        make_trainer(callbacks=callbacks, **arguments).fit(model)
        fitted.append(model)
    return fitted


def offload(**arguments):
    return ActivationOffload(**(SMALL | arguments))


COMPANIES = {
    "alone": lambda: [offload()],
    "no window": lambda: [offload(window_bytes=0)],
    "a limit": lambda: [offload(most_bytes="20KiB")],
    "checkpointed layers": lambda: [ActivationCheckpointing(), offload()],
    "kept products": lambda: [offload(), ActivationCheckpointing(save="matmuls")],
    "a budget": lambda: [offload(), ActivationCheckpointing(budget="1MiB")],
    "fusion": lambda: [offload(), InPlaceFusion(min_bytes=64)],
    "compression": lambda: [offload(), ActivationCompression(min_bytes=64)],
    "all": lambda: [
        ActivationCompression(min_bytes=64),
        InPlaceFusion(min_bytes=64),
        offload(),
        ActivationCheckpointing(save="matmuls"),
    ],
}


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("company", COMPANIES)
def test_training_is_unchanged(company, make_case, make_trainer):
    plain, saving = make_case(), None
    make_trainer().fit(plain)
    saving = make_case()
    make_trainer(callbacks=COMPANIES[company]()).fit(saving)
    assert_equal_weights(saving, plain)


@pytest.mark.parametrize("company", ["alone", "all"])
@pytest.mark.parametrize(
    "arguments",
    [{"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}],
    ids=["accumulation and clipping", "autocast"],
)
def test_training_is_unchanged_with(company, arguments, make_trainer):
    fitted = fit_both(lambda: LitTiny(TinyGPT()), make_trainer, COMPANIES[company], **arguments)
    assert_equal_weights(*fitted)


def test_training_is_unchanged_with_manual_optimization(make_trainer):
    assert_equal_weights(*fit_both(lambda: LitManual(TinyGPT()), make_trainer, COMPANIES["all"]))


@pytest.mark.distributed
def test_training_is_unchanged_on_two_ranks(make_trainer):
    arguments = {"strategy": "ddp_fork", "devices": 2, "max_epochs": 1}
    assert_equal_weights(*fit_both(lambda: LitTiny(TinyGPT()), make_trainer, COMPANIES["all"], **arguments))


@pytest.mark.parametrize("case", CASES)
def test_training_is_unchanged_from_disk(case, make_trainer, tmp_path):
    folder = tmp_path / "spill"
    folder.mkdir()
    assert_equal_weights(*fit_both(CASES[case], make_trainer, lambda: [offload(disk_path=folder)]))
    assert not list(Path(folder).iterdir())  # the file has no name


def test_bf16_for_the_trip_trains_nearly_the_same(make_trainer):
    plain, saving = fit_both(lambda: LitTiny(TinyCNN()), make_trainer, lambda: [offload(compress="bf16")])
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (plain, saving)]
    assert not torch.equal(*weights)
    assert torch.nn.functional.cosine_similarity(*weights, dim=0) > 0.99


class Spy(Callback):
    def __init__(self, callback: ActivationOffload) -> None:
        self.callback = callback
        self.reports = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.reports.append(self.callback._offloading.report)


def test_host_memory_does_not_grow_over_two_hundred_steps(make_trainer):
    callback = offload()
    spy = Spy(callback)
    make_trainer(callbacks=[callback, spy], max_epochs=67, limit_val_batches=0).fit(LitTiny(TinyGPT()))
    assert len(spy.reports) == 201
    assert {report.host_bytes for report in spy.reports} == {spy.reports[0].host_bytes}
    assert {report.offloaded_bytes for report in spy.reports[1:]} == {spy.reports[1].offloaded_bytes}
    assert spy.reports[1].offloaded_bytes > 50_000


def test_the_batch_does_not_travel(make_trainer):
    """The images of the batch are what the first convolution saves."""
    sent = []
    for keeps in (True, False):
        callback = offload(window_bytes=0)
        spy = Spy(callback)
        if not keeps:
            callback.on_train_batch_start = lambda *args: None
        make_trainer(callbacks=[callback, spy], max_epochs=1, limit_val_batches=0).fit(LitTiny(TinyCNN()))
        sent.append(spy.reports[-1].offloaded_bytes)
    images_bytes = 4 * 3 * 8 * 8 * 4
    assert sent[1] - sent[0] == images_bytes


@pytest.mark.parametrize(("most_bytes", "limit"), [(0, 0), (20_000, 20_000), ("20KiB", 20 * 1024)])
def test_no_more_travels_than_allowed(most_bytes, limit, make_trainer):
    callback = offload(most_bytes=most_bytes)
    spy = Spy(callback)
    make_trainer(callbacks=[callback, spy], max_epochs=1, limit_val_batches=0).fit(LitTiny(TinyGPT()))
    assert all(limit * 0.5 <= report.offloaded_bytes <= limit for report in spy.reports)
    assert all(report.kept_bytes > 30_000 for report in spy.reports)


def test_host_memory_is_given_back_after_the_fit(make_trainer):
    callback, offloadings = offload(), []

    class Keep(Callback):
        def on_train_end(self, trainer, pl_module):
            offloadings.append(callback._offloading)

    make_trainer(callbacks=[callback, Keep()]).fit(LitTiny(TinyGPT()))
    gc.collect()
    assert offloadings[0].report.host_bytes == 0
    assert callback._offloading is None


def test_says_what_travels(make_trainer, monkeypatch):
    said = []
    monkeypatch.setattr("lightning_vram.callbacks.activation_offload.callback.rank_zero_info", said.append)
    make_trainer(callbacks=[offload()]).fit(LitTiny(TinyGPT()))
    (sentence,) = said
    assert sentence.startswith("ActivationOffload offloads ")
    assert " per step in " in sentence
    assert "1.00 MiB of host memory" in sentence


def test_warns_on_the_host(make_trainer):
    with pytest.warns(UserWarning, match="ActivationOffload offloads to host memory, but the model is on the CPU"):
        make_trainer(callbacks=[offload()], max_steps=1).fit(LitTiny(TinyCNN()))


def test_a_host_that_is_too_small_is_an_error_before_any_weight_has_changed(make_trainer, monkeypatch):
    monkeypatch.setattr("lightning_vram.core.host.memory.available_host_bytes", lambda: 1 << 20)
    model = LitTiny(TinyGPT())
    before, weights = describe_module(model), {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(MisconfigurationException, match=r"^ActivationOffload: .*host"):
        make_trainer(callbacks=[offload()]).fit(model)
    assert describe_module(model) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


def test_a_folder_that_is_not_there_is_an_error(make_trainer, tmp_path):
    with pytest.raises(MisconfigurationException, match=r"^ActivationOffload: disk_path must be .* got '.*nowhere'"):
        make_trainer(callbacks=[offload(disk_path=tmp_path / "nowhere")]).fit(LitTiny(TinyGPT()))


def test_strategies_that_move_parameters_are_refused(make_trainer, monkeypatch):
    trainer = make_trainer(callbacks=[offload()])
    monkeypatch.setattr(type(trainer), "strategy", FSDPStrategy())
    with pytest.raises(MisconfigurationException, match=r"ActivationOffload does not work with FSDPStrategy: .*FSDP2"):
        trainer.callbacks[-1].setup(trainer, LitTiny(TinyGPT()), "fit")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"min_offload_bytes": "a lot"}, ValueError, r"^ActivationOffload\(min_offload_bytes\) must be a number and"),
        ({"min_offload_bytes": 1.5}, TypeError, r"^ActivationOffload\(min_offload_bytes\) must be bytes as an int"),
        ({"window_bytes": "some"}, ValueError, r"^ActivationOffload\(window_bytes\) must be a number and one of"),
        ({"window_bytes": -1}, ValueError, r"^ActivationOffload\(window_bytes\) must not be negative, got -1"),
        ({"most_bytes": 1.5}, TypeError, r"^ActivationOffload\(most_bytes\) must be bytes as an int or text such as"),
        ({"most_bytes": "all"}, ValueError, r"^ActivationOffload\(most_bytes\) must be a number and one of"),
        ({"compress": "fp4"}, ValueError, r"^ActivationOffload\(compress\) must be 'none' or 'bf16', got 'fp4'"),
        ({"disk_path": 3}, TypeError, r"^ActivationOffload\(disk_path\) must be a folder or None, got 3 of type int"),
        ({"pin_memory": 1}, TypeError, r"^ActivationOffload\(pin_memory\) must be True or False, got 1 of type int"),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        ActivationOffload(**arguments)


@pytest.mark.device
@pytest.mark.parametrize("company", COMPANIES)
@pytest.mark.parametrize("net", [TinyCNN, TinyGPT])
def test_training_is_unchanged_on_a_gpu(net, company, make_trainer):
    arguments = {"accelerator": ACCELERATOR, "devices": 1}
    fitted = fit_both(lambda: LitTiny(net()), make_trainer, COMPANIES[company], **arguments)
    assert_equal_weights(*(model.cpu() for model in fitted))
