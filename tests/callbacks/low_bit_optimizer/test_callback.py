"""``LowBitOptimizer``: bytes of states, resumed to the bit, the user's own optimizers, undone after the fit."""

import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from pytorch_optimizer import Lion
from support.helpers import Forking, ForkingOffload, assert_equal_weights
from support.host_layers import ADAMW, Layers, Loaded
from support.offload_nets import leave_group
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from lightning_vram import LowBitOptimizer, OptimizerInBackward
from lightning_vram.core.tensors.codecs import LowBitTensor
from lightning_vram.private_names.fsdp2 import local_shard

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
LARGE, SMALL = 16 * 400 + 400 * 30, 400 + 30 + 30 * 4 + 4  # weights of Layers: those of parameters of 4096 and more
SIZES = [16 * 400, 400 * 30]


class Looking(Layers):
    """Looks at its states after each step, and leaves a file: ranks train in processes of their own."""

    def on_train_batch_end(self, *unused: Any) -> None:
        if hasattr(self.trainer.strategy, "_finish_steps"):
            self.trainer.strategy._finish_steps()
        states = [(p, s) for optimizer in self.trainer.optimizers for p, s in optimizer.state.items()]
        local = [(p, local_shard(value)) for p, s in states for value in s.values() if isinstance(value, Tensor)]
        self.sizes = sorted({p.numel() for p, value in local if isinstance(value, LowBitTensor)})
        self.host_bytes.append(sum(value.nbytes for _, value in local if value.dim()))

    def on_train_end(self) -> None:
        torch.save(self.sizes, f"{self.trainer.default_root_dir}/{self.trainer.global_rank}.pt")


@pytest.mark.parametrize("bits", [8, 4])  # other optimizers: optimizer_table.txt
def test_states_take_few_bytes_and_training_is_close(bits, fit):
    make = partial(Looking, num_batches=20)
    low, plain = fit(make, LowBitOptimizer(bits)), fit(make)
    num_blocks = 16 * 400 // 128 + math.ceil(400 * 30 / 128)
    assert low.host_bytes == [2 * (num_blocks * {8: 132, 4: 68}[bits] + 4 * SMALL)] * 20
    assert plain.host_bytes == [2 * 4 * (LARGE + SMALL)] * 20
    assert low.sizes == SIZES
    ours, theirs = (torch.cat([p.detach().flatten() for p in one.parameters()]) for one in (low, plain))
    assert not torch.equal(ours, theirs)
    assert (ours - theirs).norm() < {8: 0.02, 4: 0.15}[bits] * theirs.norm()


class Thawed(Looking):
    """Its first layer is thawed in the second epoch, and added to the optimizer."""

    def __init__(self) -> None:
        super().__init__(num_batches=4)
        self.backbone = self.net[0]


@pytest.mark.parametrize("others", [[], [OptimizerInBackward()]], ids=["alone", "in the backward"])
def test_what_is_thawed_in_the_midst_is_in_low_bits(others, make_trainer):
    model = Thawed()
    make_trainer(callbacks=[LowBitOptimizer(), BackboneFinetuning(1), *others], max_epochs=2).fit(model)
    assert model.sizes == SIZES


@pytest.mark.parametrize(
    ("bits", "optimizer", "options"),
    [(8, ADAMW, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}), (4, partial(Lion, lr=1e-3), {})],
    ids=["8 bits, windows", "4 bits, Lion"],
)
def test_a_resumed_run_ends_at_the_same_bits(bits, optimizer, options, fit, tmp_path):
    train = partial(fit, partial(Layers, optimizer, num_batches=6), LowBitOptimizer(bits), **options)
    train().trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert_equal_weights(train(ckpt_path=tmp_path / "last.ckpt", max_epochs=2), train(max_epochs=2))


@pytest.mark.parametrize(("first", "second"), [(8, None), (None, 4), (4, 8)])
def test_checkpoints_are_plain_and_load_with_and_without(first, second, fit, tmp_path):
    def ours(bits: int | None) -> list[LowBitOptimizer]:
        return [] if bits is None else [LowBitOptimizer(bits)]

    make = partial(Loaded, num_batches=4)
    fit(make, *ours(first)).trainer.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)["optimizer_states"][0]["state"].values()
    loaded = fit(make, *ours(second), ckpt_path=tmp_path / "last.ckpt", max_epochs=2)
    for moment, state in zip(loaded.moments, saved, strict=True):
        assert type(state["exp_avg"]) is Tensor
        is_low = second is not None and moment.numel() >= 4096
        assert isinstance(moment, LowBitTensor) == is_low
        if is_low:
            assert (moment - state["exp_avg"]).norm() < {8: 0.01, 4: 0.2}[second] * moment.norm()
        else:
            assert torch.equal(moment, state["exp_avg"])


@pytest.mark.distributed
@pytest.mark.parametrize(("bits", "offload"), [(8, {}), (4, {"device_bytes": 0.5})])
def test_under_fsdp_offload_moments_are_in_low_bits_wherever_they_are(bits, offload, fit):
    make, callback = partial(Looking, num_batches=4), LowBitOptimizer(bits)
    model = fit(make, callback, strategy=ForkingOffload(**offload), precision="bf16-mixed")
    assert model.sizes == SIZES
    if not offload:
        assert model.host_bytes == fit(make, callback).host_bytes
    leave_group()


class Sharded(Looking):
    """For FSDP2: of each parameter a rank has the half, which has less than 4096 numbers."""

    def state_dict(self, **arguments: Any) -> Any:
        return {}  # the launcher cannot hand shards to the parent process

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


@pytest.mark.distributed
def test_ranks_choose_the_parameters_that_one_process_does(fit, tmp_path):
    options = {"devices": 2, "use_distributed_sampler": False, "strategy": Forking()}
    fit(partial(Sharded, num_batches=6), LowBitOptimizer(), **options)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first == second == SIZES


def test_the_share_of_lost_updates_is_logged_and_results_are_the_same(fit):
    make, options = partial(Layers, num_batches=6), {"log_every_n_steps": 2}
    fitted = [
        fit(make, LowBitOptimizer(4, check_updates=checks), OptimizerInBackward(), **options)
        for checks in (False, True)
    ]
    assert_equal_weights(*fitted)
    shares = [one.trainer.callback_metrics.get("vram/lost_updates") for one in fitted]
    assert shares[0] is None
    assert 0 < shares[1] < 1


# --- what is refused ---


def test_where_lost_updates_cannot_be_counted_is_refused(make_trainer):
    message = "LowBitOptimizer(check_updates=True) needs our own kernels, got library='auto': use library='own'."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        LowBitOptimizer(library="auto", check_updates=True)
    message = (
        "LowBitOptimizer(check_updates=True) does not work with ForkingOffload, whose steps may end after the batch: "
        "use check_updates=False."
    )
    trainer = make_trainer(callbacks=[LowBitOptimizer(check_updates=True)], strategy=ForkingOffload())
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        trainer.fit(Layers(num_batches=1))


@pytest.mark.parametrize("bits", [2, "8"])
def test_other_bits_are_refused(bits: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(f'LowBitOptimizer(bits) must be 8 or 4, got {bits!r}.')}$"):
        LowBitOptimizer(bits=bits)
