"""Two ranks stop at the same batch, whoever got the signal, and go on as if nothing had been."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.ports import find_free_port
from support.requeue_runs import JOB_ID, FakeSlurm, Noting, Send, fit

from lightning_vram.callbacks.slurm_requeue.callback import JobStopped, SlurmRequeue
from lightning_vram.callbacks.slurm_requeue.job import RequeueFolder
from lightning_vram.core.processes import leave_group
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:FSDPOffloadStrategy steps optimizers on the host, and SLURM gave this task one"),
]
TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(autouse=True)
def two_tasks(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"):
        monkeypatch.setenv(name, "2")


class Shared(Noting):
    def __init__(self) -> None:
        super().__init__(num_batches=6)

    def val_dataloader(self) -> Any:
        return self.make_loader(4)

    test_dataloader = val_dataloader


class Uneven(Shared):
    """The second rank validates four batches."""

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.val_losses.append(self.net(batch[0] + torch.rand(1)).mean().item())

    def on_validation_epoch_end(self) -> None:
        pass

    def val_dataloader(self) -> Any:
        return self.make_loader(4 + 4 * self.trainer.global_rank)


def make_strategy(name: str) -> Any:
    if name == "ddp":
        return "ddp"
    return FSDPOffloadStrategy(min_params=1, state_dict_type=name, timeout=60)


def be_task(rank: int, port: int) -> None:
    variables = {"SLURM_PROCID": rank, "SLURM_LOCALID": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in variables.items()})


def run_rank(rank: int, port: int, folder: str, name: str, plan: dict[str, Any]) -> None:
    """One task of the job, which ends."""
    be_task(rank, port)
    plan = {"strategy": "ddp", "make": Shared, "signals": {}, "arguments": {}, "tests": False} | plan
    number, at = plan["signals"].get(rank, (USR1, None))
    run = fit(
        plan["make"],
        Path(folder),
        Send(at, number),
        SlurmRequeue(),
        devices=2,
        strategy=make_strategy(plan["strategy"]),
        plugins=[SLURMEnvironment(auto_requeue=True)],
        ends_process=not plan["tests"],
        **plan["arguments"],
    )
    if plan["tests"]:
        try:
            run.trainer.test(run.module)
        except JobStopped as stopped:
            run.code = stopped.code
    result = {
        "code": run.code,
        "seen": run.module.seen,
        "val": run.module.val_losses,
        "weights": {} if run.code is not None else full_weights(run.module),
        "drawn": torch.rand(3).tolist(),
    }
    torch.save(result, f"{folder}/{name}-{rank}.pt")
    leave_group()


def full_weights(module: Noting) -> dict[str, torch.Tensor]:
    weights = {
        key: getattr(value, "full_tensor", lambda value=value: value)() for key, value in module.state_dict().items()
    }
    return {key: value.detach().clone() for key, value in weights.items()}


@pytest.fixture
def start(slurm: FakeSlurm, tmp_path: Path) -> Any:
    def start(name: str, restart_count: int = 0, **plan: Any) -> list[dict[str, Any]]:
        slurm.start(restart_count)
        mp.start_processes(run_rank, (find_free_port(), str(tmp_path), name, plan), nprocs=2, start_method="fork")
        return [torch.load(tmp_path / f"{name}-{rank}.pt") for rank in range(2)]

    return start


def assert_all_went_on(expected: list[dict], stopped: list[dict], resumed: list[dict]) -> None:
    for whole, first, second in zip(expected, stopped, resumed, strict=True):
        assert first["seen"] + second["seen"] == whole["seen"]
        assert first["val"] + second["val"] == whole["val"]
        assert all(torch.equal(second["weights"][key], value) for key, value in whole["weights"].items())


@pytest.mark.slow_except("sharded-signals2")
@pytest.mark.parametrize(
    ("strategy", "signals"),
    [("ddp", {0: (USR1, 3), 1: (TERM, 4)}), ("full", {1: (TERM, 0)}), ("sharded", {1: (USR1, 3)})],
)
def test_all_ranks_stop_together_and_go_on(strategy, signals, slurm, start, tmp_path):
    expected = start("expected", strategy=strategy)
    assert not (tmp_path / "slurm_requeue").exists()
    stopped = start("stopped", strategy=strategy, signals=signals)
    assert [rank["code"] for rank in stopped] == [0, 0]
    assert len({len(rank["seen"]) for rank in stopped}) == 1
    assert slurm.asked[-1] == f"requeue {JOB_ID}"
    assert (tmp_path / "slurm_requeue" / JOB_ID / "step-0" / "fit.ckpt").is_dir() == (strategy == "sharded")
    resumed = start("resumed", 1, strategy=strategy)
    assert [rank["code"] for rank in resumed] == [None, None]
    assert_all_went_on(expected, stopped, resumed)
    assert not (tmp_path / "slurm_requeue").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders. During `trainer.test")
def test_ranks_that_are_stopped_in_their_test_do_not_train_again(slurm, start):
    strategy = "sharded"
    expected = start("expected", strategy=strategy, tests=True)
    (num_batches,) = {len(rank["seen"]) + len(rank["val"]) * 2 for rank in expected}
    stopped = start("stopped", strategy=strategy, tests=True, signals={1: (USR1, num_batches)})
    assert [rank["code"] for rank in stopped] == [0, 0]
    assert [rank["seen"] for rank in stopped] == [rank["seen"] for rank in expected]
    resumed = start("resumed", 1, strategy=strategy, tests=True)
    assert [rank["seen"] for rank in resumed] == [[], []]
    for whole, second in zip(expected, resumed, strict=True):
        assert second["drawn"] == whole["drawn"]
        assert all(torch.equal(second["weights"][key], value) for key, value in whole["weights"].items())


@pytest.mark.slow
def test_ranks_may_validate_different_numbers_of_batches(slurm, start):
    expected = start("expected", make=Uneven)
    assert [len(rank["val"]) for rank in expected] == [4, 8]
    # in a validation batch that the other rank does not have
    stopped = start("stopped", make=Uneven, signals={1: (USR1, 6)})
    assert [rank["code"] for rank in stopped] == [0, 0]
    assert len({len(rank["seen"]) for rank in stopped}) == 1
    resumed = start("resumed", 1, make=Uneven)
    for whole, first, second in zip(expected, stopped, resumed, strict=True):
        assert first["seen"] + second["seen"] == whole["seen"]
        assert second["val"] == whole["val"][-len(second["val"]) :]
        assert all(torch.equal(second["weights"][key], value) for key, value in whole["weights"].items())


def look_in_vain(rank: int, port: int, folder: str) -> None:
    be_task(rank, port)
    if rank == 1:
        RequeueFolder.is_open = property(lambda self: False)  # another disk
    path = Path(folder) / "slurm_requeue" / JOB_ID / "step-0"
    with pytest.raises(MisconfigurationException) as caught:
        fit(Noting, Path(folder), SlurmRequeue(), devices=2, strategy="ddp")
    assert str(caught.value) == (
        f"SlurmRequeue cannot use '{path}': rank 1 does not see what rank 0 has made there. Give a folder that all "
        "nodes share: SlurmRequeue(dirpath=...), or the trainer's default_root_dir."
    )
    (Path(folder) / f"refused-{rank}").touch()
    dist.destroy_process_group()


def test_a_folder_that_one_rank_does_not_see_is_refused_by_all(slurm, tmp_path):
    mp.start_processes(look_in_vain, (find_free_port(), str(tmp_path)), nprocs=2, start_method="fork")
    assert len(list(tmp_path.glob("refused-*"))) == 2
