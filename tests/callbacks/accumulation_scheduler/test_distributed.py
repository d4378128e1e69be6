"""AccumulationScheduler on two ranks: the mean is over the batches of both, and nothing is sent within a window."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy
from support.accumulation_models import Ragged, Scalar, mean_gradient, ragged_batches
from support.helpers import Forking
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_vram.callbacks.accumulation_scheduler.callback import AccumulationScheduler

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
]

NUM_BATCHES = 5
WINDOWS = ((0, 3), (3, 5))


class Split(Ragged):
    """Every other batch is for the other rank."""

    def train_dataloader(self):
        return DataLoader(self.batches[self.trainer.global_rank :: 2], batch_size=None)

    def on_train_end(self):
        """Compare with the big batch: weights move as the plain model's do."""
        (plain,) = self.plain
        optimizer = plain.configure_optimizers()
        assert len(self.gradients) == len(WINDOWS)
        for gradient, (start, end) in zip(self.gradients, WINDOWS, strict=True):
            expected = mean_gradient(plain, self.batches[2 * start : 2 * end])
            if self.trainer.gradient_clip_val:
                assert expected.norm() > self.trainer.gradient_clip_val
                torch.nn.utils.clip_grad_norm_(plain.parameters(), self.trainer.gradient_clip_val)
            assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)
            optimizer.step()
        for own, other in zip(self.parameters(), plain.parameters(), strict=True):
            own = own.full_tensor() if hasattr(own, "full_tensor") else own
            assert torch.allclose(own, other, rtol=0, atol=1e-12)
        self.is_checked = True


class Sharded(Split):
    def state_dict(self, **arguments):
        return {}  # the launcher cannot hand shards to the parent process

    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


def run(make_trainer, tmp_path, model, callback, **arguments):
    model.plain = [copy.deepcopy(model)]  # in a list: it is no part of the model
    # asserts in the process of each rank count for nothing unless they were reached
    tell = LambdaCallback(
        on_fit_end=lambda trainer, module: (tmp_path / f"rank{trainer.global_rank}").write_text(str(module.is_checked))
    )
    make_trainer(callbacks=[callback, tell], devices=2, max_epochs=1, **arguments).fit(model)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["True", "True"]


@pytest.mark.parametrize(("is_sharded", "clipping"), [(False, None), (True, 0.05)])
def test_gradients_are_those_of_the_big_batch(make_trainer, tmp_path, is_sharded, clipping):
    make, strategy = (Sharded, Forking()) if is_sharded else (Split, "ddp_fork")
    model = make(ragged_batches(2 * NUM_BATCHES), "tokens")
    arguments = {"strategy": strategy, "use_distributed_sampler": False, "gradient_clip_val": clipping}
    run(make_trainer, tmp_path, model, AccumulationScheduler({0: 3}, weight="tokens"), **arguments)


class Counting(Scalar):
    is_checked = False

    def on_train_start(self):
        self.num_reductions = []

        def hook(state, bucket):
            self.num_reductions.append(self.trainer.fit_loop.batch_idx)
            future = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
            return future.then(lambda done: done.value()[0])

        self.trainer.strategy.model.register_comm_hook(None, hook)

    def on_train_end(self):
        assert self.num_reductions == [1, 3, 6, 7]
        self.is_checked = True


def test_nothing_is_reduced_within_a_window(make_trainer, tmp_path):
    callback = AccumulationScheduler(by_step={0: 2, 2: 3})
    run(make_trainer, tmp_path, Counting(range(16)), callback, strategy=DDPStrategy(start_method="fork"))


class Target(Scalar):
    def on_train_end(self):
        assert len(self.gradients) == 3
        self.is_checked = True


def test_a_target_counts_the_samples_of_both_ranks(make_trainer, tmp_path):
    """Twelve samples each, two at a time, by two micro-batches."""
    callback = AccumulationScheduler(target_batch_size=8)
    run(make_trainer, tmp_path, Target(range(24), batch_size=2), callback, strategy="ddp_fork")
