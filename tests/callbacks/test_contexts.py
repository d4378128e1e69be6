"""Each feature in each context, as the table of ``lightning_vram/callbacks/README.md`` has it."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.contexts import CONTEXTS, FEATURES, NO_GPU, TRAINED, as_markdown, context_arguments
from support.helpers import BATCH_SIZE, VOCAB_SIZE
from support.offload_nets import leave_group
from support.pages import CONTEXTS_PAGE, PARTS
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # what a feature warns about is tested with the feature
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
WIDTH = 64
MOST = {"exact": 0.0, "no effect": 0.0, "lossless": 1e-6, "approximate": 0.1}  # difference of a weight
MOST_IN_FP16 = {**MOST, "lossless": 1e-3}
MOVED = 0.02  # what training moves some weight by, at least: an outcome is not that of a run that did nothing
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
    def __init__(self, *, is_manual: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.net = not is_manual, Net()

    def configure_model(self) -> None:
        if type(self.trainer.strategy) is ModelParallelStrategy and not isinstance(self.net.head.weight, DTensor):
            for part in (*self.net.blocks, self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

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
        tokens = torch.randint(VOCAB_SIZE, (4 * BATCH_SIZE, 13), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=BATCH_SIZE)


@pytest.fixture(autouse=True)
def _alone():
    torch._dynamo.reset()
    yield
    leave_group()
    torch._dynamo.reset()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Copy the floating-point weights; those that a feature keeps quantized are not among them."""
    whole = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in model.state_dict().items()}
    return {name: value.detach().float().clone() for name, value in whole.items() if value.is_floating_point()}


def train(make_trainer: Callable[..., pl.Trainer], feature: dict[str, Any], context: str) -> dict[str, Tensor]:
    """Train for an epoch of four batches, and return the weights."""
    torch.manual_seed(0)
    model = Lit(is_manual=context == "manual optimization")
    module = torch.compile(model, backend="aot_eager") if context == "torch.compile" else model
    arguments = {"max_epochs": 1, "limit_val_batches": 0, **context_arguments(context), **feature}
    make_trainer(**arguments).fit(module)
    return weights_of(model)


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one.keys() & other.keys())


@pytest.mark.quick_sample(24)
@pytest.mark.distributed
@pytest.mark.parametrize(("name", "context"), CELLS)
def test_training_ends_as_the_table_has_it(name, context, make_trainer):
    feature = FEATURES[name]
    outcome, *why = feature.other.get(context, (feature.outcome,))
    if outcome == "no":
        with pytest.raises((MisconfigurationException, RuntimeError)) as caught:
            train(make_trainer, feature.make(context), context)
        assert why[1] in str(caught.value)
        return
    untrained = weights_of(Lit(is_manual=False)) if torch.manual_seed(0) else {}
    baseline = train(make_trainer, feature.baseline(context), context)
    found = train(make_trainer, feature.make(context), context)
    assert largest_difference(found, untrained) > MOVED
    assert largest_difference(found, baseline) <= (MOST_IN_FP16 if context == "fp16" else MOST)[outcome]
    if outcome == "approximate":  # else the feature was not switched on
        assert largest_difference(found, baseline) > 0


@pytest.mark.parametrize("name", [name for name in FEATURES if FEATURES[name].outcome_in(NO_GPU) == "no"])
@pytest.mark.parametrize("kind", [FSDPStrategy, DeepSpeedStrategy])
def test_strategies_that_move_parameters_are_refused(name, kind, make_trainer, monkeypatch):
    trainer, model = make_trainer(), Lit(is_manual=False)
    model.trainer, strategy = trainer, object.__new__(kind)  # DeepSpeed need not be installed
    strategy._lightning_module = model
    monkeypatch.setattr(type(trainer), "strategy", strategy)
    (callback,) = FEATURES[name].make("CPU")["callbacks"]
    with pytest.raises(MisconfigurationException, match=FEATURES[name].other[NO_GPU][2]):
        callback.setup(trainer, model, "fit")


def test_the_table_has_every_feature_and_outcomes_that_are_explained():
    assert sorted(FEATURES) == sorted(PARTS)
    outcomes = {feature.outcome_in(context) for feature in FEATURES.values() for context in CONTEXTS}
    explained = CONTEXTS_PAGE.read_text().partition("\n- **")[2]
    assert outcomes <= {"strategy", *MOST, "no", "untested"}
    assert [outcome for outcome in outcomes if f"*{outcome}*" not in CONTEXTS_PAGE.read_text()] == []
    assert explained


def test_the_page_has_the_table():
    assert as_markdown() in CONTEXTS_PAGE.read_text()
