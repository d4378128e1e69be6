"""Numbers that code reads of sharded gradients, weights and states are those of the whole tensors on every rank."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from support.helpers import ForkingOffload
from support.offload_nets import leave_group
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

pytestmark = pytest.mark.distributed
READ = torch.ops.aten._local_scalar_dense.default


class Reads(pl.LightningModule):
    """A layer whose rows two ranks share."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(12, 10)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randn(8, 12, generator=torch.Generator().manual_seed(1)), batch_size=2)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [parameter.grad for parameter in self.parameters()]
        whole = [gradient.full_tensor() for gradient in gradients]
        for read in READS.values():
            assert read(gradients) == pytest.approx(read(whole), rel=1e-5)
        assert f"{gradients[0].norm():.3f}" == f"{whole[0].norm().item():.3f}"
        weight = self.net.weight.detach()
        assert float(weight.pow(2).sum()) == pytest.approx(float(weight.full_tensor().pow(2).sum()))
        norms = grad_norm(self, 2)
        self.log_dict(norms)
        self.log("sum", value=gradients[0].sum())
        values = [norms["grad_2.0_norm_total"], nn.utils.get_total_norm(whole)]
        assert float(values[0]) == pytest.approx(float(values[1]), rel=1e-5)
        assert isinstance(self.trainer.callback_metrics.get("sum", torch.zeros(())), torch.Tensor)
        assert not any(isinstance(value, DTensor) for value in self.trainer.callback_metrics.values())


READS = {
    "float": lambda ones: float(sum(one.pow(2).sum() for one in ones)),
    "item": lambda ones: ones[0].norm().item(),
    "bool": lambda ones: bool((ones[0] > ones[0].mean()).any()),
    "int": lambda ones: int((ones[0] > 0).sum()),
    "max": lambda ones: max(one.abs().max().item() for one in ones),
    "cpu": lambda ones: ones[1].sum().cpu().item(),
    "tensor": lambda ones: torch.tensor([one.norm() for one in ones]).sum().item(),
    "finite": lambda ones: torch.isfinite(ones[0]).all().item(),
    "index": lambda ones: ones[0][7, 3].item(),
}


class ReadsOnOneRank(Reads):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_rank == 0:
            float(self.net.weight.grad.norm())
        float(self.net.bias.grad.norm())


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("offload", ["params", "none"])
def test_a_number_is_that_of_the_whole_tensor(devices, offload, make_trainer):
    make_trainer(strategy=ForkingOffload(offload=offload), devices=devices, max_epochs=1).fit(Reads())
    assert READ not in DTensor._op_dispatcher._custom_op_handlers
    assert "__float__" not in vars(DTensor)
    leave_group()


def test_a_number_that_one_rank_reads_is_an_error_that_says_where(make_trainer):
    trainer = make_trainer(strategy=ForkingOffload(timeout=20), devices=2, max_epochs=1)
    with pytest.raises(
        Exception, match=r"Only some ranks read a value of a sharded tensor in .*test_numbers.py:\d+, but each rank"
    ):
        trainer.fit(ReadsOnOneRank())
