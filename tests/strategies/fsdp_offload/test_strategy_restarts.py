"""A rank is killed; torchrun starts all again, and the run ends as if nothing had happened."""

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.offload_nets import Split
from support.ports import find_free_port

from lightning_vram.core.ranks import LostPeerError
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy

# Each epoch is one batch: in the midst of an epoch Lightning begins with its first batch again.
OPTIONS = {"max_epochs": 6, "limit_train_batches": 1, "limit_val_batches": 0, "use_distributed_sampler": False}


class LoseRankOne(pl.Callback):
    """It dies before the fourth step, or does not come until it is told to."""

    def __init__(self, how: str, may_end: Any = None) -> None:
        self.how = how
        self.may_end = may_end

    def on_train_batch_start(self, trainer: pl.Trainer, *unused: object) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 3:
            if self.how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            self.may_end.wait()
            os._exit(0)


def run_under_torchrun(folder: Path, kind: str) -> None:
    """Fit, from the last checkpoint if there is one, and let rank 0 write down how it went."""
    attempt, last = os.environ["TORCHELASTIC_RESTART_COUNT"], folder / "last.ckpt"
    saver = ModelCheckpoint(dirpath=folder, save_last=True, every_n_train_steps=2, save_top_k=0)
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=FSDPOffloadStrategy(min_params=100, state_dict_type=kind, timeout=60),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saver, *([LoseRankOne("killed")] if attempt == "0" else [])],
        **OPTIONS,
    )
    model = Split()
    trainer.fit(model, ckpt_path=last if last.exists() else None)
    if trainer.is_global_zero:
        torch.save({"weights": model.state_dict(), "attempt": attempt, "step": trainer.global_step}, folder / "end.pt")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_run_goes_on_where_a_rank_was_killed(kind, fit, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    tests = Path(__file__).parents[2]
    settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONPATH": f"{tests.parent}:{tests}"}
    run = subprocess.run(
        [*command, __file__, str(tmp_path), kind],
        env={**os.environ, **settings, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    end = torch.load(tmp_path / "end.pt")
    assert (end["attempt"], end["step"]) == ("1", 6)
    torch.testing.assert_close(end["weights"], dict(fit(Split, **OPTIONS).state_dict()), rtol=0, atol=1e-6)


def _fit_as_rank(make_trainer, rank, port, how, may_end, file):
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    strategy = FSDPOffloadStrategy(min_params=100, timeout=60 if how == "killed" else 10)
    trainer = make_trainer(devices=2, strategy=strategy, callbacks=[LoseRankOne(how, may_end)], **OPTIONS)
    try:
        trainer.fit(Split())
    except LostPeerError as error:
        file.write_text(str(error))
        may_end.set()


@pytest.mark.slow_except("killed")
@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_the_rank_that_is_left_says_where_it_was_and_why(how, make_trainer, tmp_path):
    context = multiprocessing.get_context("fork")
    may_end, port, file = context.Event(), find_free_port(), tmp_path / "error"
    arguments = ((make_trainer, rank, port, how, may_end, file) for rank in range(2))
    ranks = [context.Process(target=_fit_as_rank, args=one) for one in arguments]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
        rank.kill()
    message = file.read_text()
    assert message.startswith("Rank 0 of 2 on ")
    assert "step 3, training_step" in message
    assert ("peer" if how == "killed" else "Timed out waiting 10000ms") in message


if __name__ == "__main__":
    run_under_torchrun(Path(sys.argv[1]), sys.argv[2])
