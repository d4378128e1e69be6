"""ActivationOffload: what travels, what stays, what it says and what it refuses."""

import copy
import gc
import re

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.devices import ACCELERATOR
from support.helpers import LitManual, LitTiny, TinyCNN, TinyGPT, assert_equal_weights, describe_module

from lightning_vram import ActivationCheckpointing, ActivationCompression, ActivationOffload, InPlaceFusion

pytestmark = [
    pytest.mark.filterwarnings("ignore:ActivationOffload offloads to host memory:UserWarning"),
    pytest.mark.filterwarnings("ignore:InPlaceFusion found nothing to save:UserWarning"),  # in checkpointed layers
]

SMALL = {"min_offload_bytes": 256}  # the models are tiny


def offload(**arguments):
    return ActivationOffload(**(SMALL | arguments))


def all_together():
    compression, fusion = ActivationCompression(min_bytes=64), InPlaceFusion(min_bytes=64)
    return [compression, fusion, offload(), ActivationCheckpointing(save="matmuls")]


def make_cnn():
    return LitTiny(TinyCNN())


def make_gpt():
    return LitTiny(TinyGPT())


@pytest.mark.parametrize("callbacks", [lambda: [offload()], all_together], ids=["alone", "all"])
@pytest.mark.parametrize("make", [make_gpt, lambda: LitManual(TinyGPT())], ids=["automatic", "manual"])
def test_training_is_unchanged(callbacks, make, same_as_baseline):
    same_as_baseline(make, *callbacks())


def test_training_is_unchanged_from_disk(same_as_baseline, tmp_path):
    folder = tmp_path / "spill"
    folder.mkdir()
    same_as_baseline(make_gpt, offload(disk_path=folder))
    assert not list(folder.iterdir())  # the file has no name


def test_bf16_for_the_trip_trains_nearly_the_same(fit):
    plain, saving = fit(make_cnn), fit(make_cnn, offload(compress="bf16"))
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (plain, saving)]
    assert not torch.equal(*weights)
    assert torch.nn.functional.cosine_similarity(*weights, dim=0) > 0.99


class Spy(Callback):
    def __init__(self, callback: ActivationOffload) -> None:
        self.callback = callback
        self.reports = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.reports.append(self.callback._offloading.report)


def test_the_batch_does_not_travel(fit):
    sent = []
    for keeps in (True, False):
        callback = offload(window_bytes=0)
        spy = Spy(callback)
        if not keeps:
            callback.on_train_batch_start = lambda *args: None
        fit(make_cnn, callback, spy)
        sent.append(spy.reports[-1].offloaded_bytes)
    images_bytes = 4 * 3 * 8 * 8 * 4  # what the first convolution saves
    assert sent[1] - sent[0] == images_bytes


@pytest.mark.parametrize(("most_bytes", "limit"), [(0, 0), ("20KiB", 20 * 1024)])
def test_no_more_travels_than_allowed(most_bytes, limit, fit):
    callback = offload(most_bytes=most_bytes)
    spy = Spy(callback)
    fit(make_gpt, callback, spy)
    assert all(limit * 0.5 <= report.offloaded_bytes <= limit for report in spy.reports)
    assert all(report.kept_bytes > 30_000 for report in spy.reports)


def test_it_says_what_travels_and_gives_host_memory_back(fit, monkeypatch):
    said, offloadings, callback = [], [], offload()
    monkeypatch.setattr("lightning_vram.callbacks.activation_offload.callback.rank_zero_info", said.append)
    watch = Callback()
    watch.on_train_end = lambda trainer, pl_module: offloadings.append(callback._offloading)
    fit(make_gpt, callback, watch)
    (sentence,) = said
    assert re.match(r"ActivationOffload offloads .* per step in .*1\.00 MiB of host memory", sentence)
    gc.collect()
    assert offloadings[0].report.host_bytes == 0
    assert callback._offloading is None


def test_warns_on_the_host(fit):
    with pytest.warns(UserWarning, match="ActivationOffload offloads to host memory, but the model is on the CPU"):
        fit(make_cnn, offload(), max_steps=1)


def test_a_host_that_is_too_small_is_an_error_before_any_weight_has_changed(make_trainer, monkeypatch):
    monkeypatch.setattr("lightning_vram.core.host.memory.available_host_bytes", lambda: 1 << 20)
    model = make_gpt()
    before, expected = describe_module(model), copy.deepcopy(model)
    with pytest.raises(MisconfigurationException, match=r"^ActivationOffload: .*host"):
        make_trainer(callbacks=[offload()]).fit(model)
    assert describe_module(model) == before
    assert_equal_weights(model, expected)


def test_a_folder_that_is_not_there_is_an_error(fit, tmp_path):
    with pytest.raises(MisconfigurationException, match=r"^ActivationOffload: disk_path must be .* got '.*nowhere'"):
        fit(make_gpt, offload(disk_path=tmp_path / "nowhere"))


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
@pytest.mark.parametrize("make", [make_cnn, make_gpt])
def test_training_is_unchanged_on_a_gpu(make, same_as_baseline):
    same_as_baseline(make, *all_together(), accelerator=ACCELERATOR, devices=1)
