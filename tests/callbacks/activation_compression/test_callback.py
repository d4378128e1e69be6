"""ActivationCompression: when it applies, what it logs, what it refuses."""

import csv
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import LitManual, LitTiny, TinyCNN, TinyGPT, assert_equal_weights, describe_module

from lightning_vram import ActivationCheckpointing, ActivationCompression, InPlaceFusion
from lightning_vram.techniques.activation_compression.stage import CompressionStage

COMPANIES = {
    "alone": lambda: [ActivationCompression(min_bytes=64)],
    "checkpointed layers": lambda: [ActivationCheckpointing(save="matmuls"), ActivationCompression(min_bytes=64)],
    "fusion": lambda: [InPlaceFusion(min_bytes=64), ActivationCompression(min_bytes=64)],
}


def fit(make_trainer, callbacks, make_model=lambda: LitTiny(TinyGPT()), **arguments):
    torch.manual_seed(0)
    model = make_model()
    make_trainer(callbacks=callbacks, **arguments).fit(model)
    return model


@pytest.mark.parametrize("company", COMPANIES)
def test_training_is_unchanged(company, make_case, make_trainer):
    plain, saving = make_case(), None
    make_trainer().fit(plain)
    saving = make_case()
    make_trainer(callbacks=COMPANIES[company]()).fit(saving)
    assert_equal_weights(saving, plain)


@pytest.mark.parametrize(
    "arguments",
    [{"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, {"precision": "bf16-mixed"}],
    ids=["accumulation and clipping", "autocast"],
)
def test_training_is_unchanged_with(arguments, make_trainer):
    plain = fit(make_trainer, [], **arguments)
    assert_equal_weights(fit(make_trainer, COMPANIES["alone"](), **arguments), plain)


def test_training_is_unchanged_with_manual_optimization(make_trainer):
    models = [fit(make_trainer, callbacks, lambda: LitManual(TinyGPT())) for callbacks in ([], COMPANIES["alone"]())]
    assert_equal_weights(*models)


@pytest.mark.parametrize("lossy", ["bf16", "fp8", "int8"])
def test_a_loss_stays_in_the_chosen_layers_and_small(lossy, make_trainer):
    callback = ActivationCompression(
        lossy=lossy, layers="net.blocks.0", min_bytes=64, gradient_cosine_every_n_batches=1
    )
    plain, saving = fit(make_trainer, []), fit(make_trainer, [callback])
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in (plain, saving)]
    assert not torch.equal(*weights)
    assert torch.nn.functional.cosine_similarity(*weights, dim=0) > 0.99
    assert 0.95 < callback.gradient_cosine < 1.0


def test_measuring_the_gradient_changes_nothing(make_trainer):
    models = [
        fit(make_trainer, [ActivationCompression(lossy="int8", min_bytes=64, gradient_cosine_every_n_batches=every)])
        for every in (None, 1)
    ]
    assert_equal_weights(*models)


def test_logs_the_cosine_every_so_many_batches(make_trainer, tmp_path):
    logger = CSVLogger(tmp_path)
    callback = ActivationCompression(lossy="int8", min_bytes=64, gradient_cosine_every_n_batches=2)
    fit(make_trainer, [callback], logger=logger, max_epochs=1, log_every_n_steps=1)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["vram/gradient_cosine"]]
    assert [row["step"] for row in rows] == ["0", "2"]
    assert all(0.9 < float(row["vram/gradient_cosine"]) < 1 for row in rows)


def test_the_first_backward_of_a_batch_is_measured_in_manual_optimization(make_trainer):
    callback = ActivationCompression(lossy="bf16", min_bytes=64, gradient_cosine_every_n_batches=1)
    fit(make_trainer, [callback], lambda: LitManual(TinyGPT()))
    assert 0.99 < callback.gradient_cosine < 1


@pytest.mark.distributed
def test_measures_under_ddp(make_trainer):
    callback = ActivationCompression(lossy="int8", min_bytes=64, gradient_cosine_every_n_batches=1)
    fit(make_trainer, [callback], strategy="ddp_fork", devices=2, max_epochs=1)


def test_all_steps_have_one_stage(make_trainer, monkeypatch):
    stages = []
    enter = CompressionStage.__enter__
    monkeypatch.setattr(CompressionStage, "__enter__", lambda stage: stages.append(stage) or enter(stage))
    fit(make_trainer, COMPANIES["alone"]())
    assert len(stages) == 6
    assert len(set(stages)) == 1
    assert stages[0].report.kept_bytes < 0.85 * stages[0].report.saved_bytes


def test_undo(make_trainer):
    model = LitTiny(TinyGPT())
    before = describe_module(model)
    trainer = make_trainer(
        callbacks=[ActivationCompression(lossy="int8", layers="net.blocks.*", gradient_cosine_every_n_batches=1)]
    )
    trainer.fit(model)
    assert describe_module(model) == before
    assert not {"training_step", "backward"} & vars(trainer.strategy).keys()


def test_refuses_a_pattern_that_matches_nothing(make_trainer):
    with pytest.raises(MisconfigurationException, match=r"^ActivationCompression: layers='net\.blok' matches no"):
        fit(make_trainer, [ActivationCompression(lossy="int8", layers="net.blok")])


def test_refuses_strategies(make_trainer, monkeypatch):
    trainer = make_trainer()
    monkeypatch.setattr(type(trainer), "strategy", FSDPStrategy())
    with pytest.raises(MisconfigurationException, match="ActivationCompression does not work with FSDPStrategy"):
        ActivationCompression().setup(trainer, LitTiny(TinyCNN()), "fit")
    monkeypatch.setattr(type(trainer), "strategy", ModelParallelStrategy())
    callback = ActivationCompression(lossy="int8", gradient_cosine_every_n_batches=1)
    with pytest.raises(MisconfigurationException, match=r"gradient_cosine_every_n_batches.* does not work with Mod"):
        callback.setup(trainer, LitTiny(TinyCNN()), "fit")


def test_refuses_to_measure_where_ddp_counts_backwards(make_trainer, monkeypatch):
    trainer = make_trainer()
    monkeypatch.setattr(type(trainer), "strategy", DDPStrategy(static_graph=True))
    message = (
        "ActivationCompression(gradient_cosine_every_n_batches) does not work with DDPStrategy(static_graph=True): "
        "DDP learns the graph from the first backward and would no longer average gradients. Leave static_graph out, "
        "or measure in a separate run."
    )
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        ActivationCompression(lossy="int8", gradient_cosine_every_n_batches=1).setup(trainer, LitTiny(TinyCNN()), "fit")
    monkeypatch.undo()
    ActivationCompression(lossy="int8").setup(trainer, LitTiny(TinyCNN()), "fit")


class LitFrozen(LitTiny):
    """Nothing to train but what is no parameter of its own."""

    def __init__(self):
        super().__init__(TinyGPT())
        self.requires_grad_(False)
        self.offset = [torch.zeros((), requires_grad=True)]

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) + self.offset[0]

    def configure_optimizers(self):
        return torch.optim.SGD(self.offset, 0.1)


def test_measures_nothing_where_no_parameter_requires_a_gradient(make_trainer):
    callback = ActivationCompression(lossy="int8", min_bytes=64, gradient_cosine_every_n_batches=1)
    fit(make_trainer, [callback], LitFrozen)
    assert callback.gradient_cosine is None


def test_the_loss_is_scaled_as_for_the_backward(make_trainer, monkeypatch):
    class Scaler:
        def scale(self, loss):
            return loss * 1024

    losses = []
    monkeypatch.setattr(
        "lightning_vram.callbacks.activation_compression.callback.gradient_cosine",
        lambda stage, loss, parameters: losses.append(loss.item()) or 1.0,
    )
    callback = ActivationCompression(lossy="int8", min_bytes=64, gradient_cosine_every_n_batches=1)
    trainer = make_trainer(callbacks=[callback], max_steps=1)
    fitted = LitTiny(TinyGPT())
    backward = type(trainer.precision_plugin).backward
    plain = []
    monkeypatch.setattr(
        type(trainer.precision_plugin),
        "backward",
        lambda plugin, loss, *args, **kwargs: plain.append(loss.item()) or backward(plugin, loss, *args, **kwargs),
    )
    trainer.precision_plugin.scaler = Scaler()
    trainer.fit(fitted)
    assert losses == [pytest.approx(plain[0] * 1024)]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lossless": 1}, TypeError, r"^ActivationCompression\(lossless\) must be True or False, got 1"),
        ({"lossless": False}, ValueError, r"^ActivationCompression\(lossless=False, lossy=None\) does nothing"),
        (
            {"lossy": "int4"},
            ValueError,
            r"^ActivationCompression\(lossy\) must be 'bf16', 'fp8', 'int8' or None, got 'int4'",
        ),
        ({"layers": "net"}, ValueError, r"^ActivationCompression\(layers\) needs lossy='bf16', 'fp8' or 'int8'"),
        ({"lossy": "int8", "layers": []}, ValueError, r"^ActivationCompression\(layers\) must name at least one"),
        ({"lossy": "int8", "block_size": 0}, ValueError, r"^ActivationCompression\(block_size\) must be at least 1"),
        ({"min_bytes": "much"}, ValueError, r"^ActivationCompression\(min_bytes\) must be a number and one of"),
        (
            {"gradient_cosine_every_n_batches": 5},
            ValueError,
            r"^ActivationCompression\(gradient_cosine_every_n_batches\) needs lossy=",
        ),
        (
            {"lossy": "int8", "gradient_cosine_every_n_batches": 0},
            ValueError,
            r"^ActivationCompression\(gradient_cosine_every_n_batches\) must be at least 1, got 0",
        ),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        ActivationCompression(**arguments)
