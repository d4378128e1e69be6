"""Signals that come while the command starts wait until the run can save."""

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from support.requeue_runs import FakeSlurm

from lightning_vram import startup
from lightning_vram.callbacks.slurm_requeue import callback
from lightning_vram.callbacks.slurm_requeue.callback import JobStopped, SlurmRequeue
from lightning_vram.cli import main

ROOT = Path(__file__).parents[1]
HELD = {signal.SIGUSR1, signal.SIGTERM}
SMALL = [
    "--data.init_args.batch_size=2",
    "--model.init_args.num_layers=1",
    "--model.init_args.width=16",
    "--model.init_args.sequence_length=32",
    "--trainer.max_steps=3",
    "--trainer.limit_val_batches=0",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/venv/bin/python", "/venv/bin/lightning-vram", "fit"], True),
        (["python", "-u", "-X", "dev", "-m", "lightning_vram", "fit"], True),
        (["python", "-u", "-W", "ignore", "/venv/bin/lightning-vram", "fit"], True),
        (["python", "train.py"], False),
        (["python", "train.py", "lightning-vram"], False),
        (["python", "-m", "lightning_vram_plus"], False),
        ([], False),
    ],
)
def test_only_the_command_is_the_command(arguments, expected):
    assert startup.is_command(arguments) is expected


@pytest.fixture
def mask():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def blocked() -> set[int]:
    return signal.pthread_sigmask(signal.SIG_BLOCK, ()) & HELD


@pytest.mark.parametrize(
    ("name", "rank", "held"), [("lightning-vram", "0", HELD), ("lightning-vram", None, set()), ("train.py", "0", set())]
)
def test_only_a_command_in_a_task_of_slurm_holds_signals_back_at_import(name, rank, held, monkeypatch, mask):
    startup.let_through()
    monkeypatch.setattr(sys, "orig_argv", ["python", name])
    monkeypatch.delenv("SLURM_PROCID", raising=False)
    if rank is not None:
        monkeypatch.setenv("SLURM_PROCID", rank)
    runpy.run_path(startup.__file__)
    assert blocked() == held


@pytest.mark.slow
def test_a_signal_does_not_end_the_command_while_it_starts():
    environment = os.environ | {"SLURM_PROCID": "0", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", "lightning_vram", "fit", "--help"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as run:
        timer = threading.Timer(60, run.kill)
        timer.start()
        status = Path(f"/proc/{run.pid}/status")
        held = 0
        while not held >> (signal.SIGUSR1 - 1) & 1 and run.poll() is None:
            (mask,) = (line.split()[1] for line in status.read_text().splitlines() if line.startswith("SigBlk"))
            held = int(mask, 16)
        run.send_signal(signal.SIGUSR1)
        output, _ = run.communicate()
        timer.cancel()
    assert run.returncode == 0, output
    assert "--trainer.max_steps" in output


@pytest.fixture
def command(tmp_path, monkeypatch, mask):
    """A command in a task of SLURM, for which a signal waits."""
    slurm = FakeSlurm(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-vram"])
    taken = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: taken.append(number))
    startup.hold_back()
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    yield slurm, taken
    startup.let_through()  # one that still waits
    signal.signal(signal.SIGUSR1, before)


QUICKSTART = ["fit", f"--config={ROOT / 'configs' / 'quickstart.yaml'}", "--compare_with_baseline=false", *SMALL]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_without_the_callback_the_command_lets_signals_through(command, monkeypatch):
    _, taken = command
    main([*QUICKSTART, "--trainer.callbacks=null"])
    assert taken == [signal.SIGUSR1]
    assert blocked() == set()


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_with_the_callback_the_command_stops_the_fit(command, monkeypatch, tmp_path):
    slurm, taken = command
    monkeypatch.setattr(callback, "_folders", [])
    released = []
    monkeypatch.setattr(SlurmRequeue, "on_exception", lambda self, *unused: released.append(self._release()))
    with pytest.raises(JobStopped) as stopped:
        main([*QUICKSTART, "--trainer.callbacks=lightning_vram.SlurmRequeue"])
    assert (stopped.value.code, taken, len(released)) == (0, [], 1)
    assert slurm.asked == ["show job --oneliner 17", "requeue 17"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tasks_that_srun_did_not_start_are_refused_in_one_line(command, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.delenv("SLURM_STEP_ID")
    with pytest.raises(SystemExit) as ended:
        main(QUICKSTART)
    assert ended.value.code == 2
    said = "lightning-vram: error: The SLURM job has 2 tasks, and this process was not started by srun"
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)


STOPPED = """
import signal
import sys

import lightning.pytorch as pl
from support.requeue_runs import Noting, Send, make_trainer

from lightning_vram import SlurmRequeue


class Loading(Noting):
    def val_dataloader(self):
        return self.make_loader(2, num_workers=2)


if __name__ == "__main__":
    pl.seed_everything(0)
    make_trainer(sys.argv[1], Send(4, signal.SIGTERM), SlurmRequeue()).fit(Loading(num_workers=2))
"""


@pytest.mark.slow
def test_a_program_that_is_stopped_does_not_wait_for_workers(tmp_path, monkeypatch):
    FakeSlurm(tmp_path, monkeypatch)
    script = tmp_path / "train.py"
    script.write_text(STOPPED)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        timer = threading.Timer(60, run.kill)
        timer.start()
        lines = []
        for line in run.stdout:
            lines.append(line)
            if line.startswith("SlurmRequeue: SIGTERM"):
                stopped = time.monotonic()
        run.wait()
        seconds = time.monotonic() - stopped
        timer.cancel()
    assert run.returncode == 0, "".join(lines)
    assert lines[-1].endswith("job 17 is requeued.\n"), "".join(lines)
    assert seconds < 20  # one that is waited for never ends
