"""ActivationCheckpointing of compiled layers: the compiler recomputes them, and a byte budget is refused."""

import re

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import assert_equal_weights
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_vram import ActivationCheckpointing
from lightning_vram.techniques.activation_checkpointing import apply_activation_checkpointing

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.2)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.dropout(self.down(F.gelu(self.up(value))))


class Lit(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        generator = torch.Generator().manual_seed(1)
        return torch.utils.data.DataLoader(
            [torch.randn(32, 16, generator=generator) for _ in range(3)], batch_size=None
        )


def fit(make_trainer, compiled: str, *callbacks: pl.Callback) -> Lit:
    torch.compiler.reset()
    model = Lit()
    if compiled in ("blocks", "blocks.0"):
        model.get_submodule(compiled).compile(backend="aot_eager")
    torch.manual_seed(2)
    trainer = make_trainer(callbacks=list(callbacks), max_epochs=1)
    trainer.fit(torch.compile(model, backend="aot_eager") if compiled == "model" else model)
    return model


@pytest.mark.parametrize("compiled", ["model", "blocks"])
def test_compiled_layers_are_recomputed_exactly(compiled, make_trainer):
    plain = fit(make_trainer, compiled)
    saving = fit(make_trainer, compiled, ActivationCheckpointing("blocks.*"))
    assert_equal_weights(saving, plain)


@pytest.mark.parametrize("compiled", ["model", "blocks"])
def test_compiled_layers_save_their_inputs_only(compiled):
    def saved_bytes(*, is_checkpointed: bool) -> int:
        torch.compiler.reset()
        blocks = Lit().blocks
        if is_checkpointed:
            apply_activation_checkpointing(blocks, layers="*")
        run = torch.compile(blocks, backend="aot_eager") if compiled == "model" else blocks
        if compiled == "blocks":
            for block in blocks:
                block.compile(backend="aot_eager")
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda one: sizes.append(one.nbytes) or one, lambda one: one):
            run(torch.randn(512, 16)).sum()
        return sum(sizes)

    assert saved_bytes(is_checkpointed=True) < 0.5 * saved_bytes(is_checkpointed=False)


@pytest.mark.parametrize(
    ("compiled", "names"),
    [
        ("model", "'blocks.0', 'blocks.1', 'blocks.2', 'blocks.3'"),
        ("blocks", "'blocks.0', 'blocks.1', 'blocks.2', 'blocks.3'"),
        ("blocks.0", "'blocks.0'"),
    ],
)
def test_a_budget_for_compiled_layers_is_refused(compiled, names, make_trainer):
    message = (
        f"ActivationCheckpointing(budget='1MiB') does not work with compiled layers ({names}): the compiler chooses "
        "what to save. Leave out budget to recompute all of them, or do not compile them."
    )
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        fit(make_trainer, compiled, ActivationCheckpointing("blocks.*", budget="1MiB"))


def test_layers_outside_of_compiled_code_share_a_budget(make_trainer):
    plain = fit(make_trainer, "blocks.0")
    callback = ActivationCheckpointing(["blocks.1", "blocks.2", "blocks.3"], budget="36KiB")
    saving = fit(make_trainer, "blocks.0", callback)
    assert_equal_weights(saving, plain)
    assert "blocks.1" in callback.layer_table
