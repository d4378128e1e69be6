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

from lightning_vram import ActivationCompression
from lightning_vram.techniques.activation_compression.stage import CompressionStage


def make_gpt():
    return LitTiny(TinyGPT())


def lossy(**arguments):
    return ActivationCompression(**{"lossy": "int8", "min_bytes": 64, **arguments})


def test_a_loss_stays_small_and_measuring_it_changes_nothing(fit):
    measuring = lossy(layers="net.blocks.0", gradient_cosine_every_n_batches=1)
    models = [fit(make_gpt), fit(make_gpt, lossy(layers="net.blocks.0")), fit(make_gpt, measuring)]
    assert_equal_weights(*models[1:])
    weights = [torch.cat([p.flatten() for p in model.parameters()]) for model in models[:2]]
    assert not torch.equal(*weights)
    assert torch.nn.functional.cosine_similarity(*weights, dim=0) > 0.99
    assert 0.95 < measuring.gradient_cosine < 1.0
    assert describe_module(models[2]) == describe_module(models[0])
    assert not {"training_step", "backward"} & vars(models[2].trainer.strategy).keys()


def test_logs_the_cosine_every_so_many_batches(fit, tmp_path):
    logger = CSVLogger(tmp_path)
    fit(make_gpt, lossy(gradient_cosine_every_n_batches=2), logger=logger, log_every_n_steps=1)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["vram/gradient_cosine"]]
    assert [row["step"] for row in rows] == ["0", "2"]
    assert all(0.9 < float(row["vram/gradient_cosine"]) < 1 for row in rows)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: LitManual(TinyGPT()), {}),
        pytest.param(make_gpt, {"strategy": "ddp_fork", "devices": 2}, marks=pytest.mark.distributed),
    ],
    ids=["manual optimization", "ddp"],
)
def test_measures_where_backward_is_called_otherwise(make, options, same_as_baseline):
    measuring = lossy(gradient_cosine_every_n_batches=1)
    same_as_baseline(make, measuring, baseline={"callbacks": [lossy()], **options}, **options)
    assert options or 0.9 < measuring.gradient_cosine < 1  # of the first backward of a batch; not from other processes


def test_all_steps_have_one_stage(fit, monkeypatch):
    stages = []
    enter = CompressionStage.__enter__
    monkeypatch.setattr(CompressionStage, "__enter__", lambda stage: stages.append(stage) or enter(stage))
    fit(make_gpt, ActivationCompression(min_bytes=64), max_epochs=2)
    assert len(stages) == 6
    assert len(set(stages)) == 1
    assert stages[0].report.kept_bytes < 0.85 * stages[0].report.saved_bytes


def test_refuses_a_pattern_that_matches_nothing(fit):
    with pytest.raises(MisconfigurationException, match=r"^ActivationCompression: layers='net\.blok' matches no"):
        fit(make_gpt, lossy(layers="net.blok"))


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


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"lossless": 1}, TypeError, r"lossless\) must be True or False, got 1"),
        ({"lossless": False}, ValueError, r"lossless=False, lossy=None\) does nothing"),
        ({"lossy": "int4"}, ValueError, r"lossy\) must be 'bf16', 'fp8', 'int8' or None, got 'int4'"),
        ({"layers": "net"}, ValueError, r"layers\) needs lossy='bf16', 'fp8' or 'int8'"),
        ({"lossy": "int8", "layers": []}, ValueError, r"layers\) must name at least one"),
        ({"lossy": "int8", "block_size": 0}, ValueError, r"block_size\) must be at least 1"),
        ({"min_bytes": "much"}, ValueError, r"min_bytes\) must be a number and one of"),
        ({"gradient_cosine_every_n_batches": 5}, ValueError, r"gradient_cosine_every_n_batches\) needs lossy="),
        (
            {"lossy": "int8", "gradient_cosine_every_n_batches": 0},
            ValueError,
            r"gradient_cosine_every_n_batches\) must be at least 1, got 0",
        ),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=rf"^ActivationCompression\({message}"):
        ActivationCompression(**arguments)
