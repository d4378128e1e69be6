"""``TokenTiling``: weights of the plain run, up to rounding, in a Trainer."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from callbacks.chunked_loss.language_models import IN_16_BITS, MODES, STRATEGIES, Lit, Manual, Sharded
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from lightning_vram import ActivationCheckpointing, ChunkedLoss, TokenTiling

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


class ShardedInside(Sharded):
    def layers(self) -> list[nn.Module]:
        return [self.net.blocks[0], self.net.blocks[1].mlp]


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


def compare(same_as_baseline: Any, kind: Any, *callbacks: pl.Callback, **options: Any) -> None:
    same_as_baseline(lambda: kind(Net()), *callbacks, TokenTiling(tile=5), Reads(), **options)


TILED_MODES = MODES | {"chunked loss": lambda: {"callbacks": [ActivationCheckpointing("**.mlp"), ChunkedLoss(chunk=5)]}}


@pytest.mark.parametrize("mode", TILED_MODES)
def test_training_is_that_of_whole_sequences(mode, same_as_baseline):
    baseline, options = TILED_MODES[mode](), TILED_MODES[mode]()
    callbacks, tolerance = options.pop("callbacks", []), 2e-3 if mode in IN_16_BITS else 1e-6
    compare(same_as_baseline, Lit, *callbacks, tolerance=tolerance, baseline=baseline, **options)


def test_training_by_hand_is_that_of_whole_sequences(same_as_baseline):
    compare(same_as_baseline, Manual, tolerance=1e-6)


@pytest.mark.distributed
@pytest.mark.quick_sample(1)
@pytest.mark.parametrize("name", STRATEGIES)
def test_on_two_ranks(name, same_as_baseline):
    kind, strategy = STRATEGIES[name]
    options = {"devices": 2, "strategy": strategy(), "baseline": {"strategy": strategy()}, "tolerance": 1e-6}
    compare(same_as_baseline, ShardedInside if kind is Sharded else kind, **options)


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
