"""Fourteen architectures trained by ``fsdp_offload`` end with the weights of a plain run, on however many ranks."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from support.architectures import ARCHITECTURES, LitArchitecture
from support.checkpoint_nets import run_ranks
from support.helpers import assert_equal_weights
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning"),  # torch, transformers, Lightning
]

NUM_STEPS = 5
BATCH_SIZE = 4  # over all ranks
MAX_NORM = 0.1  # below the norm of most gradients
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"gradient_clip_val": MAX_NORM},
    "accumulate": {"accumulate_grad_batches": 2},
    "clip_accumulate": {"gradient_clip_val": MAX_NORM, "accumulate_grad_batches": 2},
}
Row = tuple[str, str, str]  # architecture, variant, precision
FEW = ("tiny_lm", "tied_llama", "mixtral", "conv_bn")
ROWS: list[Row] = [(name, "clip_accumulate", "32-true") for name in ARCHITECTURES]
ROWS += [(name, variant, "32-true") for name in FEW for variant in ("plain", "clip", "accumulate")]
ROWS += [(name, "plain", precision) for name in ("tied_lm", "vit") for precision in ("bf16-mixed", "bf16-true")]
SOME = [("tiny_lm", "clip", "32-true"), ("tied_llama", "clip_accumulate", "32-true"), ("conv_bn", "plain", "32-true")]
TOLERANCE = 1e-6
LOSS_TOLERANCE = 0.02  # relative; a loss in bfloat16 is rounded by up to 0.004 of it


class LitCase(LitArchitecture):
    """Keeps the losses of its batches.

    ``eps`` is large: keys' biases have a gradient of zero but for rounding, which a small one would make whole steps.
    """

    def __init__(self, name: str, variant: str, *, num_ranks: int = 1, freezes_norms: bool = False) -> None:
        num_batches = NUM_STEPS * VARIANTS[variant].get("accumulate_grad_batches", 1)
        super().__init__(name, batch_size=BATCH_SIZE // num_ranks, num_samples=BATCH_SIZE * num_batches)
        self.losses: list[float] = []
        self.freezes_norms = freezes_norms

    def on_train_epoch_start(self) -> None:
        for part in self.modules() if self.freezes_norms else ():
            if isinstance(part, nn.BatchNorm2d):
                part.eval()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4, fused=True)
        optimizer._step_supports_amp_scaling = False  # else Lightning refuses to clip in mixed precision
        return optimizer


def sum_within_layers(model: nn.Module) -> None:
    """Have a gradient to which several decoder layers contribute summed as FSDP2 does: first what one layer gives.

    The encoder's output is read by keys and values of each decoder layer. FSDP2 passes what a layer is given through a
    node of the graph, to know when the layer's backward is over, and there all that comes from the layer is summed.
    """

    def pass_on(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.view_as(tensor), (args, kwargs))

    for part in model.modules():
        if type(part).__name__ in ("T5Block", "WhisperDecoderLayer"):
            part.register_forward_pre_hook(pass_on, with_kwargs=True)


@pytest.fixture
def train(fit: Any) -> Any:
    """Train plainly, or by the strategy with ``arguments``."""

    def train(row: Row, arguments: dict[str, Any] | None = None, devices: int = 1, **case_options: Any) -> LitCase:
        name, variant, precision = row

        def make() -> LitCase:
            model = LitCase(name, variant, num_ranks=devices, **case_options)
            if arguments is None and not case_options:
                sum_within_layers(model)
            return model

        strategy = "auto" if arguments is None else FSDPOffloadStrategy(**{"min_params": 100, **arguments})
        options = {"devices": devices, "use_distributed_sampler": False, "deterministic": False, **VARIANTS[variant]}
        # for a CPU the Trainer takes bf16 in place of fp16, but not its plugin
        fp16 = {"plugins": [MixedPrecision("16-mixed", "cpu")]}
        options |= fp16 if precision == "16-mixed" else {"precision": precision}
        model = fit(make, strategy=strategy, **options)
        assert model.trainer.global_step == NUM_STEPS
        return model

    return train


@pytest.mark.quick_sample(5)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_of_one_process_are_those_of_a_plain_run_to_the_bit(name, precision, train):
    row = name, {"bf16-true": "plain", "16-mixed": "clip"}.get(precision, "clip_accumulate"), precision
    plain, ours = train(row), train(row, {})
    assert_equal_weights(ours, plain)
    assert ours.losses == plain.losses


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("tied_lm", {"offload": "none"}), ("mixtral", {"shard": "grad_op"}), ("conv_bn", {"narrow_transfers": False})],
)
def test_where_shards_are_kept_and_for_how_long_does_not_change_weights(name, arguments, train):
    row = name, "plain", "bf16-mixed"
    assert_equal_weights(train(row, arguments), train(row))


def train_rows(folder: Path, train: Any, rows: list[Row], num_ranks: int, min_params: int) -> None:
    """All in one process per rank: to start one takes longer than to train."""
    rank, results = dist.get_rank(), {}
    os.environ["LOCAL_RANK"] = str(rank)  # tells Lightning that processes have been made
    for row in rows:
        # norms would look at the samples of their rank only
        model = train(row, {"min_params": min_params}, num_ranks, freezes_norms=True)
        results[row] = {key: value.clone() for key, value in model.state_dict().items()}, model.losses
    torch.save(results, folder / f"{rank}.pt")


@pytest.mark.parametrize(
    ("num_ranks", "min_params", "rows"),
    [
        pytest.param(2, 1000, SOME, id="some on 2"),
        pytest.param(2, 1000, ROWS, id="all on 2", marks=pytest.mark.slow),
        pytest.param(4, 5000, ROWS, id="all on 4", marks=pytest.mark.slow),
    ],
)
def test_weights_of_several_ranks_are_those_of_a_plain_run(num_ranks, min_params, rows, train, tmp_path):
    work = partial(train_rows, train=train, rows=rows, num_ranks=num_ranks, min_params=min_params)
    run_ranks(num_ranks, work, tmp_path)
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(num_ranks)]
    for row in rows:
        plain = train(row, freezes_norms=True)
        losses = torch.tensor([rank[row][1] for rank in ranks]).double().mean(dim=0).tolist()
        if row[2] == "32-true":
            assert losses == pytest.approx(plain.losses, abs=10 * TOLERANCE), row
            torch.testing.assert_close(ranks[0][row][0], dict(plain.state_dict()), rtol=0, atol=TOLERANCE)
        else:
            assert losses == pytest.approx(plain.losses, rel=LOSS_TOLERANCE), row
