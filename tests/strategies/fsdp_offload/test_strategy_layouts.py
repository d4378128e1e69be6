"""Parameters that are not contiguous, which FSDP2 refuses: trained to the same bits, and as they were afterwards."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support.helpers import ForkingOffload, assert_equal_weights
from support.offload_nets import adamw, leave_group
from torch import Tensor, nn
from torch.utils.data import DataLoader

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]


class Strided(pl.LightningModule):
    """A network in ``channels_last``, and parameters that are stored transposed and cut out of a larger tensor."""

    def __init__(self, dims: int = 2, *, has_cut: bool = True, has_norm: bool = True) -> None:
        super().__init__()
        conv, norm = (nn.Conv2d, nn.BatchNorm2d) if dims == 2 else (nn.Conv3d, nn.BatchNorm3d)
        middle = norm(8) if has_norm else nn.Identity()
        self.net = nn.Sequential(conv(3, 8, 3, padding=1), middle, nn.ReLU(), conv(8, 8, 3, groups=4), conv(8, 4, 1))
        self.net.to(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
        self.turned = nn.Parameter(torch.randn(6, 4).t())
        if has_cut:
            self.cut = nn.Parameter(torch.randn(6, 4)[:, 1])
        self.dims = dims
        self.strides: list[Any] = []

    def forward(self, images: Tensor) -> Tensor:
        made = self.net(images)
        self.strides.append(made.stride())
        return made.flatten(2).mean(-1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        images = batch.chunk(self.trainer.world_size)[self.trainer.global_rank]
        others = [one for one in (self.turned, getattr(self, "cut", None)) if one is not None]
        return self(images).square().mean() + sum((one * one).mean() for one in others)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if not hasattr(self, "cut"):
            return adamw(self.parameters(), 1e-2)
        return torch.optim.AdamW(self.parameters(), 1e-2, foreach=True)  # torch's fused kernel wants dense ones

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(1)
        return DataLoader(torch.randn(16, 3, *[6] * self.dims, generator=generator), batch_size=4)


def strides(module: nn.Module) -> list[Any]:
    """Return those of each parameter, in dimensions that have any."""
    pairs = (zip(one.stride(), one.shape, strict=True) for one in module.parameters())
    return [[stride for stride, size in each if size > 1] for each in pairs]


@pytest.mark.parametrize(("dims", "precision"), [(2, "32-true"), (3, "bf16-mixed")])
def test_weights_layouts_and_what_layers_compute_in_are_those_of_a_plain_run(dims, precision, fit):
    make = partial(Strided, dims)
    options = {"precision": precision, "devices": 1}
    plain, ours = (fit(make, strategy=strategy, **options) for strategy in ("auto", "fsdp_offload"))
    if precision == "32-true":
        assert_equal_weights(plain, ours)
    assert strides(plain) == strides(ours) == strides(make())
    assert ours.strides == plain.strides
    assert not any(part._forward_pre_hooks for part in ours.modules())
    ours.trainer.fit(ours)  # once more
    assert strides(ours) == strides(plain)


def dense() -> Strided:
    return Strided(has_cut=False)


@pytest.mark.parametrize(("first", "second"), [("auto", "fsdp_offload"), ("fsdp_offload", "auto")])
def test_a_checkpoint_goes_on_with_the_strategy_and_without(first, second, fit, tmp_path):
    begun, whole = fit(dense, strategy=first, devices=1), fit(dense, max_epochs=2)
    begun.trainer.save_checkpoint(tmp_path / "first.ckpt")
    leave_group()
    resumed = fit(dense, strategy=second, devices=1, ckpt_path=tmp_path / "first.ckpt", max_epochs=2)
    assert_equal_weights(whole, resumed)
    assert strides(resumed) == strides(whole)


def test_the_optimizer_goes_on_after_the_run(fit):
    # the fused kernel goes over memory as it lies: states have to lie as parameters do
    plain, ours = (fit(dense, strategy=strategy, devices=1) for strategy in ("auto", "fsdp_offload"))
    for model in (plain, ours):
        (optimizer,) = model.trainer.optimizers
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    assert_equal_weights(plain, ours)


class Noting(Strided):
    def teardown(self, stage: str) -> None:
        torch.save([p.detach() for p in self.parameters()], f"{self.trainer.default_root_dir}/{self.global_rank}.pt")


def test_two_ranks_leave_them_as_they_were(fit, tmp_path):
    make = partial(Noting, has_cut=False, has_norm=False)
    plain = fit(make)
    fit(make, strategy=ForkingOffload(), devices=2, use_distributed_sampler=False)
    for rank in range(2):
        ours = torch.load(tmp_path / f"{rank}.pt")
        assert strides(nn.ParameterList(ours)) == strides(plain)
        for one, other in zip(ours, plain.parameters(), strict=True):
            torch.testing.assert_close(one, other.detach(), rtol=0, atol=1e-6)


def test_states_on_a_disk_lie_as_their_parameters_do(fit, tmp_path):
    ours = fit(dense, strategy=ForkingOffload(nvme_path=tmp_path), devices=1)
    assert_equal_weights(ours, fit(dense))
