"""``TokenTiling``: weights of the plain run, up to rounding, in a Trainer."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import Forking, ForkingOffload, LitManual, LitTiny
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_vram import (
    ActivationCheckpointing,
    ActivationOffload,
    ChunkedLoss,
    InPlaceFusion,
    LeanMixedPrecision,
    MicroBatching,
    TokenTiling,
)
from lightning_vram.callbacks.token_tiling import TokenTiling as Same

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
NUM_TOKENS, WIDTH = 24, 8


class Net(nn.Module):
    """Two blocks of attention and an MLP of its own, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)

    def samples(self, count: int) -> TensorDataset:
        tokens = torch.randint(16, (count, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
        return TensorDataset(tokens, tokens.roll(1, 1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        head = hidden[:, None]
        hidden = hidden + F.scaled_dot_product_attention(head, head, head, is_causal=True)[:, 0]
        return hidden + self.mlp(hidden)


class Lit(LitTiny):
    """Steps by SGD."""

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Manual(Lit, LitManual):
    """The same, in manual optimization."""

    training_step = LitManual.training_step

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        halves = list(self.net.parameters())
        return [torch.optim.SGD(half, lr=0.1) for half in (halves[::2], halves[1::2])]


class Sharded(Lit):
    """A network that is sharded in layers."""

    def configure_model(self) -> None:
        if not hasattr(self, "is_sharded"):
            self.is_sharded = True
            for layer in (self.net.blocks[0], self.net.blocks[1].mlp, self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def state_dict(self, **options: Any) -> Any:
        return {
            name: getattr(value, "full_tensor", lambda value=value: value)()
            for name, value in super().state_dict(**options).items()
        }


@pytest.fixture
def fit(make_trainer):
    def fit(make: Any = Lit, callbacks: Any = (), *, plugin: Any = None, is_tiled: bool, **options: Any) -> Any:
        pl.seed_everything(0, verbose=False)
        model = make(Net())
        tiling = [TokenTiling(tile=5)] if is_tiled else []
        plugins = [plugin()] if plugin is not None else []
        make_trainer(callbacks=[*callbacks, *tiling, Reads()], plugins=plugins, **options).fit(model)
        return [parameter.detach() for parameter in model.state_dict().values()]

    return fit


class Reads(pl.Callback):
    """Looks that what should run in tiles did."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for tiling in trainer.callbacks:
            if isinstance(tiling, TokenTiling):
                verdicts = tiling._handle.verdicts()
                assert {name for name, (is_alone, _) in verdicts.items() if is_alone} == {
                    "net.blocks.0.mlp",
                    "net.blocks.1.mlp",
                }


def assert_near(ones: list[Tensor], others: list[Tensor], tolerance: float) -> None:
    for one, other in zip(ones, others, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_it_is_exported() -> None:
    assert TokenTiling is Same


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({}, 1e-6),
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, 1e-6),
        ({"precision": "bf16-mixed"}, 2e-3),
        ({"plugin": partial(MixedPrecision, "16-mixed", "cpu")}, 2e-3),
        ({"plugin": partial(LeanMixedPrecision, "bf16", recast_in_backward=True)}, 2e-3),
        ({"make": Manual}, 1e-6),
        ({"callbacks": [ActivationCheckpointing(), ActivationOffload("64B")]}, 1e-6),
        ({"callbacks": [ActivationCheckpointing("**.mlp"), ChunkedLoss(chunk=5)]}, 1e-6),
        ({"callbacks": [InPlaceFusion(), MicroBatching(2)]}, 1e-6),
    ],
    ids=[
        "eager",
        "accumulation and clipping",
        "bf16",
        "fp16 with a scaler",
        "lean",
        "manual",
        "checkpointing and offload",
        "the same modules checkpointed, chunked loss",
        "fusion, micro-batching",
    ],
)
def test_training_is_that_of_whole_sequences(options, tolerance, fit):
    assert_near(fit(is_tiled=True, **options), fit(is_tiled=False, **options), tolerance)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("make", "strategy"),
    [(Lit, lambda: "ddp_fork"), (Sharded, Forking), (Lit, ForkingOffload)],
    ids=["ddp", "fsdp2", "fsdp_offload"],
)
def test_on_two_ranks(make, strategy, fit):
    options = {"devices": 2, "make": make, "max_epochs": 1, "enable_checkpointing": False}
    plain, found = (fit(strategy=strategy(), is_tiled=is_tiled, **options) for is_tiled in (False, True))
    assert_near(found, plain, 1e-6)


def test_under_fsdp_offload(fit):
    assert_near(fit(strategy=ForkingOffload(), is_tiled=True), fit(is_tiled=False), 1e-6)


def test_what_runs_in_tiles_is_told(make_trainer, caplog):
    for callback in (TokenTiling(tile=5), TokenTiling()):
        make_trainer(callbacks=[callback]).fit(Lit(Net()))
    told = [one.getMessage() for one in caplog.records if one.getMessage().startswith("TokenTiling")]
    assert told == [
        "TokenTiling runs 'net.blocks.0.mlp', 'net.blocks.1.mlp' in tiles; on a sample of tokens the results are "
        f"{'exact' if 'exact' in told[0] else 'lossless'}. 2 other modules that were checked are not tiled.",
        "TokenTiling has no effect: no module that treats each token independently got more tokens than one tile. "
        "Name layers, or use a smaller tile.",
    ]


def test_a_named_layer_that_mixes_tokens_is_refused(make_trainer):
    with pytest.raises(
        MisconfigurationException,
        match=r"^TokenTiling\(layers\): net\.blocks\.0 cannot be tiled: it may "
        r"mix distant tokens in _scaled_dot_product_flash_attention_for_cpu\. Leave it out, or use layers='auto'\.$",
    ):
        make_trainer(callbacks=[TokenTiling("net.blocks.*", tile=5)]).fit(Lit(Net()))


def test_bad_arguments_are_refused(make_trainer):
    with pytest.raises(ValueError, match=r"^TokenTiling\(tile\) must be at least 1, got 0\.$"):
        TokenTiling(tile=0)
    with pytest.raises(MisconfigurationException, match=r"^Two TokenTiling in one Trainer: pass all layers to one\.$"):
        make_trainer(callbacks=[TokenTiling(), TokenTiling()]).fit(Lit(Net()))
    with pytest.raises(MisconfigurationException, match=r"^TokenTiling: layers='none' matches no module or class of "):
        make_trainer(callbacks=[TokenTiling("none")]).fit(Lit(Net()))
