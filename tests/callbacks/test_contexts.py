"""Each feature in each context, as the table of ``lightning_vram/callbacks/README.md`` has it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.contexts import CONTEXTS, FEATURES, MOVED, NO_GPU, TRAINED, as_markdown, context_arguments
from support.helpers import BATCH_SIZE, VOCAB_SIZE, Forking
from support.offload_nets import leave_group
from support.pages import CONTEXTS_PAGE, PARTS
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessRaisedException
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_vram import StreamedCheckpointIO
from lightning_vram.estimation import running_trainer
from lightning_vram.private_names.fsdp2 import shards_integers

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # what a feature warns about is tested with the feature
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
WIDTH = 64
MOST = {"exact": 0.0, "no effect": 0.0, "lossless": 1e-6, "approximate": 0.1}  # difference of a weight
MOST_IN_FP16 = {**MOST, "lossless": 1e-3}
LEAST = 0.02  # what training moves some weight by, at least: an outcome is not that of a run that did nothing
_baselines: dict[tuple[str, str], dict[str, Tensor]] = {}  # by context, and what else the baseline has
CELLS = [
    (name, context) for name in FEATURES for context in TRAINED if FEATURES[name].outcome_in(context) != "strategy"
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.mlp(self.norm(hidden))


class Net(nn.Module):
    """What the features look for: repeated blocks with an MLP, a frozen one, a head of a language model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)
        self.blocks[0].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Lit(pl.LightningModule):
    """Under FSDP2 it leaves its weights in a file: the launcher cannot hand shards to the parent process."""

    is_saving = False

    def __init__(self, path: Path, *, is_manual: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.net, self.path = not is_manual, Net(), path

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, Forking) and not isinstance(self.net.head.weight, DTensor):
            for part in (*self.net.blocks, self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def state_dict(self, **options: Any) -> dict[str, Any]:
        is_empty = isinstance(self.net.head.weight, DTensor) and not self.is_saving
        return {} if is_empty else super().state_dict(**options)

    def on_train_end(self) -> None:
        if isinstance(self.trainer.strategy.checkpoint_io, StreamedCheckpointIO):
            self.is_saving = True
            self.trainer.save_checkpoint(self.path / "streamed.ckpt")
            self.is_saving = False
        if isinstance(self.trainer.strategy, Forking):
            torch.save(weights_of(self), self.path / f"weights{self.global_rank}.pt")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        tokens, targets = batch
        loss = F.cross_entropy(self.net(tokens).flatten(0, -2), targets.flatten())
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        return torch.optim.AdamW(weights, lr=3e-2, eps=1e-3, foreach=False)

    def train_dataloader(self) -> DataLoader:
        tokens = torch.randint(VOCAB_SIZE, (4 * BATCH_SIZE, 65), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=BATCH_SIZE)


@pytest.fixture(autouse=True)
def _alone():
    torch._dynamo.reset()
    yield
    leave_group()
    torch._dynamo.reset()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copy the floating-point weights; those that a feature keeps quantized are not among them."""
    whole = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in model.named_parameters()}
    return {name: value.detach().float().clone() for name, value in whole.items() if value.is_floating_point()}


def train(
    make_trainer: Callable[..., pl.Trainer], path: Path, feature: dict[str, Any], context: str
) -> dict[str, Tensor]:
    """Train for an epoch of four batches, and return the weights."""
    torch.manual_seed(0)
    model = Lit(path, is_manual=context == "manual optimization")
    module = torch.compile(model, backend="aot_eager") if context == "torch.compile" else model
    arguments = {"max_epochs": 1, "limit_val_batches": 0, **context_arguments(context), **feature}
    make_trainer(**arguments).fit(module)
    return torch.load(path / "weights0.pt") if context == "FSDP2" else weights_of(model)


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one.keys() & other.keys())


@pytest.mark.slow_except("ActivationOffload-CPU", "ChunkedLoss-CPU", "QuantizeFrozenWeights-fp16", "MetricOffload-DDP")
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "context"), CELLS)
def test_training_ends_as_the_table_has_it(name, context, make_trainer, tmp_path):
    if (name, context) == ("QuantizeFrozenWeights", "FSDP2") and not shards_integers:
        pytest.skip("FSDP2 shards integers as of torch 2.13")
    feature = FEATURES[name]
    outcome, *why = feature.other.get(context, (feature.outcome,))
    if outcome == "no":
        with pytest.raises((MisconfigurationException, RuntimeError, ProcessRaisedException)) as caught:
            train(make_trainer, tmp_path, feature.make(context), context)
        assert why[1] in str(caught.value)
        return
    torch.manual_seed(0)
    untrained = weights_of(Lit(tmp_path, is_manual=False))
    key = context, str(feature.baseline(context))
    if key not in _baselines:
        _baselines[key] = train(make_trainer, tmp_path, feature.baseline(context), context)
    baseline, found = _baselines[key], train(make_trainer, tmp_path, feature.make(context), context)
    assert largest_difference(found, untrained) > LEAST
    assert largest_difference(found, baseline) <= (MOST_IN_FP16 if context == "fp16" else MOST)[outcome]
    if outcome == "approximate":  # else the feature was not switched on
        assert largest_difference(found, baseline) > 0


@pytest.mark.distributed
@pytest.mark.parametrize("context", ["CPU", "FSDP2"])
def test_the_plugin_writes_files_and_no_folders(context, make_trainer, tmp_path):
    feature = FEATURES["StreamedCheckpointIO"]
    found, saved = train(make_trainer, tmp_path, feature.make(context), context), tmp_path / "streamed.ckpt"
    assert saved.is_dir() is (feature.outcome_in(context) == "no effect")
    if saved.is_file():
        weights = torch.load(saved, weights_only=False)["state_dict"]
        assert all(torch.equal(weights[name], value) for name, value in found.items())


def test_the_plugin_is_refused_where_the_strategy_brings_its_own(monkeypatch):
    (plugin,) = FEATURES["LeanMixedPrecision"].make("CPU")["plugins"]
    with pytest.raises(TypeError, match="FSDP strategy can only work with the `FSDPPrecision` plugin"):
        FSDPStrategy().precision_plugin = plugin
    model, trainer = Lit(Path(), is_manual=False), pl.Trainer(accelerator="cpu", devices=1, logger=False)
    model.trainer = trainer
    monkeypatch.setattr(type(trainer), "strategy", object.__new__(DeepSpeedStrategy))
    with pytest.raises(MisconfigurationException, match="LeanMixedPrecision does not work with DeepSpeedStrategy"):
        plugin.convert_module(model)


REFUSED = [name for name in FEATURES if FEATURES[name].other.get(NO_GPU) == MOVED[NO_GPU]]


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy])
def test_strategies_that_move_parameters_are_refused(name, kind, make_trainer, monkeypatch):
    trainer, model = make_trainer(), Lit(Path(), is_manual=False)
    model.trainer, strategy = trainer, object.__new__(kind)  # DeepSpeed need not be installed
    strategy._lightning_module = model
    monkeypatch.setattr(type(trainer), "strategy", strategy)
    (callback,) = FEATURES[name].make("CPU")["callbacks"]
    with pytest.raises(MisconfigurationException, match=FEATURES[name].other[NO_GPU][2]):
        callback.setup(trainer, model, "fit")


def test_the_table_has_every_feature_and_outcomes_that_are_explained():
    assert sorted(FEATURES) == sorted(PARTS)
    outcomes = {feature.outcome_in(context) for feature in FEATURES.values() for context in CONTEXTS}
    assert outcomes <= {"strategy", *MOST, "no", "untested"}
    assert [outcome for outcome in outcomes if f"*{outcome}*" not in CONTEXTS_PAGE.read_text()] == []


def test_the_page_has_the_table():
    assert as_markdown() in CONTEXTS_PAGE.read_text()


@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy])
def test_strategies_that_cannot_be_estimated_are_named(kind):
    with pytest.raises(ValueError, match=f"^{kind.__name__} is not supported$"):
        running_trainer._another(object.__new__(kind))
