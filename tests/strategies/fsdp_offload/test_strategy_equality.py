"""Fourteen architectures trained by ``fsdp_offload`` end with the weights of a plain run, on however many ranks."""

import os
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import MixedPrecision
from support.architectures import ARCHITECTURES, LitArchitecture
from support.checkpoint_nets import run_ranks
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
FEW = ("tiny_lm", "tied_llama", "mixtral", "conv_bn")
CASES = [(name, "clip_accumulate", "32-true") for name in ARCHITECTURES]
CASES += [(name, variant, "32-true") for name in FEW for variant in ("plain", "clip", "accumulate")]
LOW = [(name, "plain", precision) for name in ("tied_lm", "llama", "vit") for precision in ("bf16-mixed", "bf16-true")]
SOME = [("tiny_lm", "clip", "32-true"), ("tied_llama", "clip_accumulate", "32-true"), ("conv_bn", "plain", "32-true")]
ENCODER_DECODERS = ("t5", "whisper")
TOLERANCE = 1e-6
LOSS_TOLERANCE = 0.02  # relative; a loss in bfloat16 is rounded by up to 0.004 of it

Weights = dict[str, Tensor]


class LitCase(LitArchitecture):
    """Keeps the losses of its batches.

    ``eps`` is large: keys' biases have a gradient of zero but for rounding, which a small one would make whole steps.
    """

    def __init__(self, name: str, *, num_batches: int, num_ranks: int = 1, freezes_norms: bool = False) -> None:
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


def train(model: LitArchitecture, variant: str, strategy: Any = "auto", **options: Any) -> Weights:
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    defaults: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "limit_val_batches": 0, "max_epochs": 1}
    settings = defaults | dict.fromkeys(quiet, False) | VARIANTS[variant] | options
    trainer = pl.Trainer(strategy=strategy, **settings)
    trainer.fit(model)
    assert trainer.global_step == NUM_STEPS
    return {key: value.clone() for key, value in model.state_dict().items()}


def make_case(name: str, variant: str, **options: Any) -> LitCase:
    num_batches = NUM_STEPS * VARIANTS[variant].get("accumulate_grad_batches", 1)
    return LitCase(name, num_batches=num_batches, **options)


def make_strategy(**arguments: Any) -> FSDPOffloadStrategy:
    return FSDPOffloadStrategy(**{"min_params": 100, **arguments})


def precision_options(precision: str) -> dict[str, Any]:
    """Lightning's own; for a CPU its Trainer takes bf16 in place of fp16, but not its plugin."""
    return {"plugins": [MixedPrecision("16-mixed", "cpu")]} if precision == "16-mixed" else {"precision": precision}


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


@cache
def train_plainly(
    name: str, variant: str, precision: str = "32-true", *, freezes_norms: bool = False, is_split: bool = False
) -> tuple[Weights, list[float]]:
    """Weights and losses of a run without a strategy."""
    model = make_case(name, variant, freezes_norms=freezes_norms)
    if is_split:
        sum_within_layers(model)
    return train(model, variant, **precision_options(precision)), model.losses


def assert_equal(weights: Weights, expected: Weights) -> None:
    assert list(weights) == list(expected)
    assert [key for key in weights if not torch.equal(weights[key], expected[key])] == []


def max_difference(weights: Weights, expected: Weights) -> float:
    assert list(weights) == list(expected)
    return max(float((weights[key].double() - expected[key].double()).abs().max()) for key in weights)


@pytest.mark.quick_sample(6)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_of_one_process_are_those_of_a_plain_run_to_the_bit(name, precision, one_rank):
    variant = {"bf16-true": "plain", "16-mixed": "clip"}.get(precision, "clip_accumulate")
    expected, losses = train_plainly(name, variant, precision, is_split=name in ENCODER_DECODERS)
    model = make_case(name, variant)
    assert_equal(train(model, variant, make_strategy(), **precision_options(precision)), expected)
    assert model.losses == losses


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("tied_lm", {"offload": "none"}), ("mixtral", {"shard": "grad_op"}), ("conv_bn", {"narrow_transfers": False})],
)
def test_where_shards_are_kept_and_for_how_long_does_not_change_weights(name, arguments, one_rank):
    expected, _ = train_plainly(name, "plain", "bf16-mixed")
    assert_equal(train(make_case(name, "plain"), "plain", make_strategy(**arguments), precision="bf16-mixed"), expected)


# --- several processes ---

Row = tuple[str, str, str]  # architecture, variant, precision


class SumOverRanks(torch.autograd.Function):
    """Each rank's loss depends on all that is summed."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        total = local.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return SumOverRanks.forward(ctx, gradient)


def norm_over_ranks(norm: nn.SyncBatchNorm, images: Tensor) -> Tensor:
    """What ``SyncBatchNorm`` computes: PyTorch's own refuses a CPU in a process group."""
    num_ranks = dist.get_world_size()
    moments = torch.stack([images.mean((0, 2, 3)), images.square().mean((0, 2, 3))]).double()
    mean, square = (SumOverRanks.apply(moments) / num_ranks).unbind()
    variance = square - mean.square()
    num_values = num_ranks * images[:, 0].numel()
    with torch.no_grad():
        norm.running_mean.lerp_(mean.float(), norm.momentum)
        norm.running_var.lerp_((variance * num_values / (num_values - 1)).float(), norm.momentum)
        norm.num_batches_tracked.add_(1)
    scale = norm.weight * (variance + norm.eps).rsqrt().float()
    return (images - mean.float()[:, None, None]) * scale[:, None, None] + norm.bias[:, None, None]


def train_rows(folder: Path, rows: list[Row], *, syncs_norms: bool = False, **arguments: Any) -> None:
    """All in one process per rank: to start one takes longer than to train."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    os.environ["LOCAL_RANK"] = str(rank)  # tells Lightning that processes have been made
    results: dict[Row, tuple[Weights, list[float]]] = {}
    for row in rows:
        name, variant, precision = row
        try:
            model = make_case(name, variant, num_ranks=num_ranks, freezes_norms=not syncs_norms)
            options = {"devices": num_ranks, "sync_batchnorm": syncs_norms, **precision_options(precision)}
            weights = train(model, variant, make_strategy(**arguments), **options)
        except Exception as error:
            error.add_note(f"in {row}")
            raise
        results[row] = weights if rank == 0 else {}, model.losses
    torch.save(results, folder / f"{rank}.pt")


def load_rows(folder: Path, num_ranks: int) -> dict[Row, tuple[Weights, list[float]]]:
    """The weights and, batch for batch, the mean of the losses of all ranks."""
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(num_ranks)]
    return {
        row: (weights, torch.tensor([rank[row][1] for rank in ranks]).double().mean(dim=0).tolist())
        for row, (weights, _) in ranks[0].items()
    }


def check_weights(results: dict[Row, tuple[Weights, list[float]]], *, freezes_norms: bool) -> None:
    differences = {}
    for row, (weights, losses) in results.items():
        expected, expected_losses = train_plainly(*row, freezes_norms=freezes_norms)
        assert losses == pytest.approx(expected_losses, abs=10 * TOLERANCE), row
        differences[row] = max_difference(weights, expected)
    assert {row: difference for row, difference in differences.items() if difference > TOLERANCE} == {}


@pytest.mark.parametrize(
    ("num_ranks", "min_params", "rows"),
    [
        pytest.param(2, 1000, SOME, id="some on 2"),
        pytest.param(2, 1000, CASES, id="all on 2", marks=pytest.mark.slow),
        pytest.param(4, 5000, CASES, id="all on 4", marks=pytest.mark.slow),
    ],
)
def test_weights_of_several_ranks_are_those_of_a_plain_run(num_ranks, min_params, rows, tmp_path):
    run_ranks(num_ranks, partial(train_rows, rows=rows, min_params=min_params), tmp_path)
    results = load_rows(tmp_path, num_ranks)
    assert list(results) == rows
    check_weights(results, freezes_norms=True)  # they would look at the samples of their rank only


@pytest.mark.slow
def test_synchronized_batch_norms_see_the_whole_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(nn.SyncBatchNorm, "forward", norm_over_ranks)
    rows = [(name, "clip_accumulate", "32-true") for name in ("conv_bn", "resnet")]
    run_ranks(2, partial(train_rows, rows=rows, syncs_norms=True), tmp_path)
    check_weights(load_rows(tmp_path, 2), freezes_norms=False)


@pytest.mark.slow
def test_losses_of_two_ranks_in_low_precision_are_near_those_of_a_plain_run(tmp_path):
    run_ranks(2, partial(train_rows, rows=LOW), tmp_path)
    for row, (_, losses) in load_rows(tmp_path, 2).items():
        _, expected = train_plainly(*row, freezes_norms=True)
        assert losses == pytest.approx(expected, rel=LOSS_TOLERANCE), row
