"""``OptimizerInBackward``: which gradients are alive, and what a step takes, in bytes worked out by hand."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from support.helpers import Forking
from support.host_layers import Layers
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_vram import (
    ActivationCheckpointing,
    ActivationOffload,
    InPlaceFusion,
    OptimizerInBackward,
    estimate_memory,
    track_memory,
)
from lightning_vram.private_names.fsdp2 import local_shard

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
WIDTH, DEPTH, BATCH = 128, 6, 4
LAYER_BYTES = 4 * WIDTH * WIDTH
MAP_BYTES = 4 * BATCH * WIDTH


class LiveGradients(TorchDispatchMode):
    """Looks, before each operator, how many bytes of gradients parameters have."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.most_bytes = module, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gradients = [local_shard(one.grad) for one in self.module.parameters() if one.grad is not None]
        storages = {one.untyped_storage()._cdata: one.nbytes for one in gradients}
        self.most_bytes = max(self.most_bytes, sum(storages.values()))
        return func(*args, **(kwargs or {}))


class Looking(Layers):
    """Looks at its gradients from the second step on: DDP makes its buckets anew after the first."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.looking = LiveGradients(self)
            self.looking.__enter__()

    def on_train_end(self) -> None:
        self.looking.__exit__(None, None, None)
        rank, root = self.trainer.global_rank, self.trainer.default_root_dir
        torch.save(self.looking.most_bytes, f"{root}/{rank}.pt")

    def state_dict(self, **arguments: Any) -> dict[str, Any]:
        return {}  # the launcher cannot hand shards to the parent process


LARGEST_BYTES = 4 * 400 * 30  # of its layers


@pytest.mark.parametrize(
    ("others", "options"),
    [
        ([], {}),
        ([], {"gradient_clip_val": 0.1}),
        ([partial(ActivationCheckpointing, "net.*")], {"gradient_clip_val": 0.1}),
        ([InPlaceFusion], {"gradient_clip_val": 0.1}),
        ([partial(ActivationOffload, min_offload_bytes=0)], {"gradient_clip_val": 0.1}),
    ],
    ids=str,
)
def test_no_more_gradients_are_alive_than_the_largest(others, options, make_trainer):
    model = Looking(num_batches=3)
    callbacks = [OptimizerInBackward("two-pass"), *(other() for other in others)]
    make_trainer(callbacks=callbacks, max_epochs=1, **options).fit(model)
    assert 0 < model.looking.most_bytes <= 1.01 * LARGEST_BYTES


def test_none_is_kept_over_a_window_where_moments_take_it_in(make_trainer):
    model, options = Looking(num_batches=6), {"max_epochs": 1, "accumulate_grad_batches": 3}
    make_trainer(callbacks=[OptimizerInBackward(keep_gradients=False)], **options).fit(model)
    assert 0 < model.looking.most_bytes <= 1.01 * LARGEST_BYTES


@pytest.mark.distributed
def test_under_ddp_those_of_a_bucket_are_alive(make_trainer, tmp_path):
    strategy = DDPStrategy(start_method="fork", bucket_cap_mb=1 / 2**20)
    options = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False, "max_epochs": 1}
    make_trainer(callbacks=[OptimizerInBackward()], **options).fit(Looking(num_batches=4))
    for rank in range(2):
        assert 0 < torch.load(tmp_path / f"{rank}.pt") <= 1.01 * LARGEST_BYTES


class LookingSharded(Looking):
    def configure_model(self) -> None:
        for layer in (*self.net, self):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


@pytest.mark.distributed
def test_under_fsdp2_those_of_a_layer_are_alive_before_they_are_reduced(make_trainer, tmp_path):
    options = {"strategy": Forking(), "devices": 2, "max_epochs": 1}
    make_trainer(callbacks=[OptimizerInBackward()], **options).fit(LookingSharded(num_batches=4))
    for rank in range(2):
        assert 0 < torch.load(tmp_path / f"{rank}.pt") <= 1.01 * LARGEST_BYTES


class Wide(pl.LightningModule):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
        self.make = make

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> optim.Optimizer:
        return self.make(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(3 * BATCH, WIDTH), batch_size=BATCH)


class Tracked(pl.Callback):
    """Tracks from the beginning of one batch to the end of another."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == self.first:
            self.tracker = track_memory(module, optimizers=trainer.optimizers, inputs=batch).__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == self.last:
            self.tracker.__exit__(None, None, None)


KERNELS = {"one by one": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
# Beside one gradient: a square root and a quotient; with foreach, which works in place, the root. In a plain run the
# quotient of the parameter before is alive, too.
PEAKS = {"one by one": 3, "foreach": 2, "fused": 1}
PLAIN_PEAKS = {"one by one": DEPTH + 3, "foreach": 2 * DEPTH, "fused": DEPTH}


@pytest.mark.parametrize(("kernel", "max_norm"), [*((one, None) for one in KERNELS), ("foreach", "two-pass")])
def test_a_step_takes_one_gradient_and_what_its_step_takes(kernel, max_norm, make_trainer):
    peaks = []
    for ours in ([], [OptimizerInBackward(max_norm)]):
        tracked = Tracked(2, 2)
        model = Wide(partial(optim.AdamW, **KERNELS[kernel]))
        options = {} if max_norm is None else {"gradient_clip_val": 0.1}
        make_trainer(callbacks=[*ours, tracked], max_epochs=1, **options).fit(model)
        peaks.append(tracked.tracker.timeline.peak_bytes)
    held = 3 * DEPTH * LAYER_BYTES
    for peak, layers in zip(peaks, (PLAIN_PEAKS[kernel], PEAKS[kernel]), strict=True):
        assert 0 <= peak - held - layers * LAYER_BYTES <= (2 * DEPTH + 6) * MAP_BYTES


@pytest.mark.parametrize(("keep_gradients", "kept_bytes"), [(True, 4 * 6800), (False, 0)])
def test_an_estimate_of_a_window_is_exact(keep_gradients, kept_bytes, make_trainer):
    peaks = []
    for window in (1, 3):
        tracked, options = Tracked(3, 5), {"accumulate_grad_batches": window}
        callbacks = [OptimizerInBackward(keep_gradients=keep_gradients)]
        make_trainer(callbacks=[*callbacks, tracked], max_epochs=1, **options).fit(Layers(num_batches=6))
        options["callbacks"] = callbacks
        estimate = estimate_memory(Layers(), torch.zeros(8, 16), device="cpu", trainer=options, find_limits=False)
        assert estimate.timeline.peak_bytes == tracked.tracker.timeline.peak_bytes
        peaks.append(estimate.timeline.peak_bytes)
    assert peaks[1] - peaks[0] == kept_bytes  # of the first layer: others were stepped
