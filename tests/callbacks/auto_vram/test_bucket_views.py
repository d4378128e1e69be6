"""DDP's gradients as views of its buckets: offered, planned, switched on for a fit, and exact on two ranks."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from support.helpers import ForkingOffload
from torch import nn
from torch.utils.data import DataLoader

from lightning_vram import AutoVRAM, EarlyRelease, MicroBatching, OptimizerInBackward, estimate_memory
from lightning_vram.callbacks.auto_vram.decision import AppliedPlan, Decision, load_plan, save_plan
from lightning_vram.estimation.running_trainer import _OtherDDP, read_trainer_arguments
from lightning_vram.estimation.step_time import StepTime
from lightning_vram.memory.units import MIB
from lightning_vram.planner import search
from lightning_vram.planner.scheme import Exactness, Found, Measured, Scheme
from lightning_vram.planner.search import DDP, bucket_views
from lightning_vram.private_names.lightning import ddp_arguments


class Wide(pl.LightningModule):
    """Of 22 MiB on each of two ranks, weights, gradients and buckets are 4 MiB each, moments 8."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    def training_step(self, batch):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        return DataLoader(torch.randn(32, 512, generator=torch.Generator().manual_seed(0)), batch_size=4)


def forked(**arguments):
    return DDPStrategy(start_method="fork", **arguments)


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_they_are_switched_on_where_that_is_enough(same_as_baseline):
    class Look(pl.Callback):
        takes_no_memory = True

        def on_train_start(self, trainer, pl_module):
            assert trainer.model.gradient_as_bucket_view
            assert [type(one) for one in trainer.callbacks] == [AutoVRAM, Look, EarlyRelease]

    options = {"devices": 2, "baseline": {"strategy": forked()}}
    same_as_baseline(Wide, AutoVRAM("18.5MiB", cache=False), Look(), strategy=forked(), **options)


@pytest.mark.parametrize("more", [(), (MicroBatching(2),)], ids=["whole", "micro-batches"])
def test_they_save_where_backwards_synchronize_and_gradients_are_freed_early(more):
    def peak(*callbacks, accumulated=1, is_view=True):
        strategy = DDPStrategy(gradient_as_bucket_view=is_view)
        own = {"strategy": strategy, "accumulate_grad_batches": accumulated, "callbacks": [*callbacks, *more]}
        rows = torch.ones(4, 512)
        return estimate_memory(Wide(), rows, device="cpu", devices=2, trainer=own, find_limits=False).peak_bytes

    weights = sum(one.nbytes for one in Wide().parameters())
    plain, least = peak(is_view=False), peak(EarlyRelease())
    assert peak(accumulated=2, is_view=False) - peak(accumulated=2) < 0.3 * weights  # one of four layers
    if more:  # of several backwards in a step, only the last one synchronizes
        assert 0 <= plain - least < 0.3 * weights
    else:
        assert plain - least > 0.95 * weights
        assert peak() - least > 0.4 * weights  # buckets are made anew


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_optimizers_in_the_backward_use_them(same_as_baseline):
    strategy = forked(gradient_as_bucket_view=True)
    same_as_baseline(Wide, OptimizerInBackward(), strategy=strategy, devices=2, baseline={"strategy": forked()})


def with_hook():
    strategy = DDPStrategy()
    strategy._ddp_comm_hook = lambda state, bucket: None
    return strategy


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "expected"),
    [
        (None, 1, None),
        ("ddp", 2, {}),
        ("ddp", 3, {}),
        ("ddp_find_unused_parameters_true", 2, {"find_unused_parameters": True}),
        (DDPStrategy(bucket_cap_mb=1), 8, {"bucket_cap_mb": 1}),
        (DDPStrategy(gradient_as_bucket_view=False, find_unused_parameters=True), 2, {"find_unused_parameters": True}),
        (DDPStrategy(gradient_as_bucket_view=True), 2, None),
        (DDPStrategy(static_graph=True), 2, None),
        (_OtherDDP(), 2, None),
        (DDPStrategy(process_group=object()), 2, None),
        (with_hook(), 2, None),
        (DDPStrategy(start_method="spawn"), 2, None),
        (SingleDeviceStrategy("cpu"), 1, None),
        (ForkingOffload(), 2, None),
        ("fsdp_offload", 2, None),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_they_are_offered_to_ddp_that_has_not_chosen(strategy, num_ranks, expected):
    parts = bucket_views({"strategy": strategy}, num_ranks)
    if expected is None:
        assert parts == []
        return
    (part,) = parts
    assert part.init_args == expected | {"gradient_as_bucket_view": True}
    assert part.exactness == (Exactness.LOSSLESS if num_ranks == 3 else Exactness.EXACT)
    assert type(part.make()) is DDPStrategy


def decision_with_views():
    (views,) = bucket_views({"strategy": "ddp"}, 2)
    tried = (Measured(Scheme((views,)), MIB, 0, StepTime(1.0)), Measured(Scheme(), 2 * MIB, 0, StepTime(1.0)))
    return Decision("", found=Found(tried[0], tried[1], tried), budget_bytes=MIB)


@pytest.mark.parametrize("given", [{"find_unused_parameters": True}, {"gradient_as_bucket_view": False}], ids=str)
def test_the_strategy_has_them_for_one_fit(make_trainer, given):
    trainer = make_trainer(strategy=DDPStrategy(**given), devices=2)
    plan = AppliedPlan(trainer, decision_with_views())
    assert ddp_arguments(trainer.strategy) == given | {"gradient_as_bucket_view": True}
    plan.end()
    assert ddp_arguments(trainer.strategy) == given


@pytest.mark.parametrize(
    ("strategy", "offered"), [(forked(bucket_cap_mb=1), True), (with_hook(), False)], ids=["own launcher", "hook"]
)
def test_a_running_trainer_offers_them(make_trainer, strategy, offered):
    trainer = make_trainer(strategy=strategy, devices=2)
    assert bool(bucket_views(read_trainer_arguments(trainer), 2)) is offered


def test_in_a_notebook_lightning_chooses_how_processes_start(monkeypatch):
    monkeypatch.setattr(search, "_IS_INTERACTIVE", True)
    assert bucket_views({}, 2) == []
    assert bucket_views({"strategy": "ddp"}, 2)


def test_a_plan_with_them_is_read_back(tmp_path):
    found = decision_with_views().found
    save_plan(tmp_path / "plan.json", found, MIB)
    assert load_plan(tmp_path / "plan.json", MIB) == found
    assert found.best.scheme.parts[0].class_path == DDP
