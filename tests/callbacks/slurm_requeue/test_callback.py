"""A fit that SLURM stops and starts again ends as one that was not stopped."""

import os
import pickle
import signal
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.evil import Evil
from support.helpers import PlantedError
from support.requeue_runs import (
    JOB_ID,
    NUM_VAL_BATCHES,
    Fail,
    Noting,
    Send,
    assert_went_on,
    end_process,
    fit,
    make_trainer,
)
from torch.utils.data import DataLoader

from lightning_vram.callbacks.slurm_requeue import callback as slurm_requeue
from lightning_vram.callbacks.slurm_requeue import job
from lightning_vram.callbacks.slurm_requeue.callback import JobStopped, SlurmRequeue
from lightning_vram.checkpoint_io import StreamedCheckpointIO
from lightning_vram.core.processes import note_signal

TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the callback says on rank 0."""
    lines: list[str] = []
    for module in (job, slurm_requeue):
        monkeypatch.setattr(module, "rank_zero_info", lines.append)
    return lines


# --- a run that is stopped anywhere

# arguments of the module, of the trainer; batches at which a signal comes too late, since the fit ends before it looks
MID_WINDOW = "validation between batches of one step"
CASES = {
    "epochs with validation": ({}, {}, []),
    "validation within epochs": ({"num_batches": 5}, {"val_check_interval": 2, "max_epochs": 1}, [8]),
    "validation across epochs": ({}, {"check_val_every_n_epoch": None, "val_check_interval": 2}, []),
    "accumulation": ({"num_batches": 4}, {"accumulate_grad_batches": 2, "limit_val_batches": 0}, [6, 7]),
    MID_WINDOW: (
        {"num_batches": 5},
        {"accumulate_grad_batches": 2, "val_check_interval": 3, "max_epochs": 1},
        [6],
    ),
    "one batch per epoch without validation": ({"num_batches": 1}, {"max_epochs": 4, "limit_val_batches": 0}, [3]),
    "max_steps": ({}, {"max_epochs": -1, "max_steps": 5}, [6]),
    "a generator of the loader's own": ({"num_batches": 4, "has_generator": True}, {"limit_train_batches": 2}, []),
    "checkpoints that are streamed": ({}, {"plugins": [StreamedCheckpointIO()]}, []),
}


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_stopped_after_any_batch_goes_on_as_if_nothing_had_been(case, slurm, tmp_path):
    of_module, of_trainer, too_late = CASES[case]
    make = partial(Noting, **of_module)
    counter = Send(at=None)
    expected = fit(make, tmp_path, counter, SlurmRequeue(), **of_trainer)
    missed = []
    for at in range(counter.num_batches):
        slurm.start(0)
        send = Send(at)
        stopped = fit(make, tmp_path, send, SlurmRequeue(), **of_trainer)
        if stopped.code is None:
            missed.append(at)
            assert slurm.asked == []
            assert_went_on(expected, stopped)
        else:
            assert (stopped.code, slurm.asked) == (0, [ASK, REQUEUE])
            most = 3 if case != MID_WINDOW else 3 + NUM_VAL_BATCHES  # the batch, and two more
            assert send.num_batches - at <= most
            slurm.start(1)
            assert_went_on(expected, stopped, fit(make, tmp_path, SlurmRequeue(), **of_trainer))
        assert not (tmp_path / "slurm_requeue").exists()
    assert missed == too_late


class Plateau(Noting):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


@pytest.mark.parametrize("at", [4, 8])
def test_a_scheduler_that_follows_a_metric_misses_no_step(at, slurm, tmp_path):
    expected = fit(Plateau, tmp_path, SlurmRequeue(), max_epochs=3)
    assert expected.trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3
    stopped = fit(Plateau, tmp_path, Send(at), SlurmRequeue(), max_epochs=3)
    assert stopped.code == 0
    slurm.start(1)
    again = fit(Plateau, tmp_path, SlurmRequeue(), max_epochs=3)
    assert again.trainer.lr_scheduler_configs[0].scheduler.last_epoch == 3
    assert_went_on(expected, stopped, again)


def test_a_run_is_stopped_again_after_a_restart(slurm, tmp_path):
    expected = fit(Noting, tmp_path, SlurmRequeue())
    parts = [fit(Noting, tmp_path, Send(0), SlurmRequeue())]
    slurm.start(1)
    parts.append(fit(Noting, tmp_path, Send(1), SlurmRequeue()))
    assert slurm.asked == [ASK, REQUEUE]
    slurm.start(2)
    parts.append(fit(Noting, tmp_path, SlurmRequeue()))
    assert [part.code for part in parts] == [0, 0, None]
    assert_went_on(expected, *parts)


class WithWorkers(Noting):
    def __init__(self) -> None:
        super().__init__(num_workers=1)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        super().validation_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        pass

    def val_dataloader(self) -> list[DataLoader]:
        return [self.make_loader(NUM_VAL_BATCHES, num_workers=1) for _ in range(2)]


@pytest.mark.parametrize(
    ("number", "at"), [(USR1, 1), (TERM, 3 + NUM_VAL_BATCHES)], ids=["training", "the second validation"]
)
def test_workers_outlive_what_slurm_sends_to_all_processes(number, at, slurm, tmp_path):
    slurm.answer("JobState=RUNNING")
    send = Send(at, number, to_all=True)
    stopped = fit(WithWorkers, tmp_path, send, SlurmRequeue(), max_epochs=1)
    assert send.outlived
    assert all(send.outlived)
    assert stopped.code == 0
    assert list(tmp_path.glob("slurm_requeue/*/*/fit.ckpt"))


@pytest.mark.parametrize(
    ("is_same", "at"), [(True, None), (False, 5)], ids=["between the runs", "at the end of the fit, other callback"]
)
def test_a_signal_after_the_last_batch_of_a_fit_stops_the_test(is_same, at, slurm, tmp_path):
    first = SlurmRequeue()
    second = first if is_same else SlurmRequeue()
    fit(Noting, tmp_path, Send(at), first, ends_process=False, limit_val_batches=0)
    if at is None:
        os.kill(os.getpid(), USR1)
    count = Send(None)
    with pytest.raises(JobStopped):
        make_trainer(tmp_path, count, second).test(Noting())
    end_process(first, second)
    assert count.num_batches == 1


def test_a_program_that_goes_on_after_an_error_outlives_a_signal(slurm, tmp_path):
    callback = SlurmRequeue()
    with pytest.raises(PlantedError):
        make_trainer(tmp_path, Fail(1), callback).fit(Noting())
    os.kill(os.getpid(), TERM)
    with pytest.raises(JobStopped):
        make_trainer(tmp_path, callback).test(Noting())
    end_process(callback)


def wait_for(number: int) -> None:
    """Let a signal be sent that is blocked; in this thread only, for others of torch's do not block it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    signal.pthread_kill(threading.get_ident(), number)


def test_signals_that_came_before_the_fit_are_taken_in(slurm, tmp_path):
    expected = fit(Noting, tmp_path, SlurmRequeue())
    wait_for(USR1)
    stopped = fit(Noting, tmp_path, SlurmRequeue())
    assert (stopped.code, len(stopped.module.seen)) == (0, 1)
    slurm.start(1)
    wait_for(USR1)
    again = fit(Noting, tmp_path, SlurmRequeue())
    assert (again.code, len(again.module.seen)) == (0, 1)  # it gets on
    slurm.start(2)
    assert_went_on(expected, stopped, again, fit(Noting, tmp_path, SlurmRequeue()))


def test_another_signal_and_another_folder(slurm, tmp_path):
    expected = fit(Noting, tmp_path, SlurmRequeue())
    make = partial(SlurmRequeue, tmp_path / "shared", "USR2")
    before, look = signal.getsignal(USR1), Look()
    slurm.start(0)
    stopped = fit(Noting, tmp_path, Send(1, USR2), look, make())
    assert (stopped.code, [each[USR1] for each in look.handlers]) == (0, [before])
    assert (tmp_path / "shared" / "slurm_requeue" / JOB_ID / "step-0" / "fit.ckpt").exists()
    slurm.start(1)
    assert_went_on(expected, stopped, fit(Noting, tmp_path, make()))
    assert list((tmp_path / "shared").iterdir()) == []


def test_its_checkpoint_goes_before_ckpt_path(slurm, tmp_path):
    other = tmp_path / "other.ckpt"
    fit(Noting, tmp_path, SlurmRequeue()).trainer.save_checkpoint(other)
    slurm.start(0)
    expected = fit(Noting, tmp_path, SlurmRequeue(), ckpt_path=other, max_epochs=4)
    slurm.start(0)
    stopped = fit(Noting, tmp_path, Send(1), SlurmRequeue(), ckpt_path=other, max_epochs=4)
    assert stopped.code == 0
    assert stopped.module.seen[0][0] == 2  # the third epoch
    slurm.start(1)
    assert_went_on(expected, stopped, fit(Noting, tmp_path, SlurmRequeue(), ckpt_path=other, max_epochs=4))


def test_another_job_does_not_go_on_from_it(slurm, tmp_path, monkeypatch):
    expected = fit(Noting, tmp_path, SlurmRequeue())
    fit(Noting, tmp_path, Send(1), SlurmRequeue())
    slurm.start(0)
    monkeypatch.setenv("SLURM_JOB_ID", "18")
    assert_went_on(expected, fit(Noting, tmp_path, SlurmRequeue()))
    assert [folder.name for folder in (tmp_path / "slurm_requeue").iterdir()] == [JOB_ID]


def test_a_module_may_keep_objects_in_the_checkpoint(slurm, tmp_path):
    class Keeping(Noting):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["path"] = Path("here")

        def on_load_checkpoint(self, checkpoint):
            assert checkpoint["path"] == Path("here")

    expected = fit(Keeping, tmp_path, SlurmRequeue())
    slurm.start(0)
    stopped = fit(Keeping, tmp_path, Send(1), SlurmRequeue())
    slurm.start(1)
    assert_went_on(expected, stopped, fit(Keeping, tmp_path, SlurmRequeue()))


class KeepingEvil(Noting):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["evil"] = Evil(Path(self.trainer.default_root_dir) / "was_run")


def stop_with_evil(slurm, folder: Path) -> Path:
    fit(KeepingEvil, folder, Send(1), SlurmRequeue())
    slurm.start(1)
    return folder / "slurm_requeue" / JOB_ID / "step-0"


def test_a_checkpoint_that_others_may_have_written_runs_nothing(slurm, tmp_path):
    folder = stop_with_evil(slurm, tmp_path)
    folder.chmod(0o770)
    with pytest.raises(pickle.UnpicklingError) as caught:
        fit(Noting, tmp_path, SlurmRequeue())
    assert str(caught.value) == (
        f"SlurmRequeue does not load '{folder / 'fit.ckpt'}': it contains more than tensors and basic "
        f"types, and other users may have written it. If you trust it: SlurmRequeue(weights_only=False), or "
        f"allow its classes with torch.serialization.add_safe_globals."
    )
    assert not (tmp_path / "was_run").exists()
    fit(Noting, tmp_path, SlurmRequeue(weights_only=False))
    assert (tmp_path / "was_run").exists()


def test_the_user_may_want_tensors_only_wherever_they_lie(slurm, tmp_path):
    stop_with_evil(slurm, tmp_path)
    with pytest.raises(pickle.UnpicklingError, match="it contains more than tensors and basic types"):
        fit(Noting, tmp_path, SlurmRequeue(weights_only=True))
    assert not (tmp_path / "was_run").exists()


def test_an_open_folder_does_not_keep_a_plain_program_from_going_on(slurm, tmp_path):
    expected = fit(Noting, tmp_path, SlurmRequeue())
    slurm.start(0)
    stopped = fit(Noting, tmp_path, Send(1), SlurmRequeue())
    slurm.start(1)
    (tmp_path / "slurm_requeue" / JOB_ID).chmod(0o777)
    assert_went_on(expected, stopped, fit(Noting, tmp_path, SlurmRequeue()))


# --- checkpoints of ModelCheckpoint


def save_last(folder: Path) -> ModelCheckpoint:
    return ModelCheckpoint(folder / "saved", every_n_train_steps=1, save_last=True, save_top_k=0)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize(
    ("at", "limit_val_batches", "ckpt_path"),
    [
        (2, 2, "last"),  # outside of a job
        pytest.param(
            3, 2, None, marks=pytest.mark.xfail(reason="Lightning 2.6 leaves out the validation that was due")
        ),
        (3, 0, "last"),
        (4, 2, None),
    ],
)
def test_a_run_that_failed_goes_on_from_the_last_checkpoint(
    at, limit_val_batches, ckpt_path, slurm, tmp_path, monkeypatch
):
    if ckpt_path is not None:
        slurm.leave()
    arguments = {"limit_val_batches": limit_val_batches, "enable_checkpointing": True}
    expected = fit(Noting, tmp_path, save_last(tmp_path / "expected"), SlurmRequeue(), **arguments)
    fail = Fail(at)
    with pytest.raises(PlantedError):
        fit(Noting, tmp_path, fail, save_last(tmp_path), SlurmRequeue(), **arguments)
    if ckpt_path is None:
        slurm.start(1)
    resumed = fit(Noting, tmp_path, save_last(tmp_path), SlurmRequeue(), ckpt_path=ckpt_path, **arguments)
    assert_went_on(expected, fail.run, resumed)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("newer", ["requeue", "last"])
def test_the_newest_checkpoint_is_taken(newer, slurm, tmp_path, said):
    arguments = {"limit_val_batches": 0, "enable_checkpointing": True}
    stopped = fit(Noting, tmp_path, save_last(tmp_path), Send(1), SlurmRequeue(), **arguments)
    assert stopped.code == 0
    own, last = tmp_path / "slurm_requeue" / JOB_ID / "step-0" / "fit.ckpt", tmp_path / "saved" / "last.ckpt"
    now = own.stat().st_mtime
    for path, is_newer in ((own, newer == "requeue"), (last, newer == "last")):
        os.utime(path, (now + 10 + is_newer,) * 2)
    (own if newer == "last" else last).write_text("not read")
    slurm.start(1)
    resumed = fit(Noting, tmp_path, save_last(tmp_path), SlurmRequeue(), **arguments)
    assert len(resumed.module.seen) == 4
    assert said[-1] == f"SlurmRequeue: restart 1 of job {JOB_ID}."


# --- evaluation alone


@pytest.mark.parametrize(("verb", "number", "code"), [("validate", USR1, 0), ("test", TERM, 1), ("predict", USR1, 0)])
def test_an_evaluation_is_requeued_and_saves_nothing(verb, number, code, slurm, tmp_path, said):
    slurm.answer("JobState=RUNNING" if number == USR1 else "JobState=COMPLETING")
    send, callback = Send(0, number), SlurmRequeue()
    trainer = make_trainer(tmp_path, send, callback)
    with pytest.raises(JobStopped) as stopped:
        getattr(trainer, verb)(Noting())
    end_process(callback)
    assert (stopped.value.code, send.num_batches) == (code, 1)
    assert not (tmp_path / "slurm_requeue").exists()
    outcome = "is requeued" if number == USR1 else "was cancelled and is not requeued"
    assert said == [f"SlurmRequeue: {number.name} at step 0: nothing to save; job {JOB_ID} {outcome}."]


def test_the_sanity_check_is_not_stopped(slurm, tmp_path):
    expected = fit(Noting, tmp_path, SlurmRequeue(), num_sanity_val_steps=1)
    wait_for(USR1)
    stopped = fit(Noting, tmp_path, SlurmRequeue(), num_sanity_val_steps=1)
    assert (len(stopped.module.val_losses), len(stopped.module.seen)) == (1, 1)
    slurm.start(1)
    resumed = fit(Noting, tmp_path, SlurmRequeue(), num_sanity_val_steps=1)
    assert_went_on(expected, stopped, resumed)


# --- what is said


NO_SCONTROL = f"job {JOB_ID} could not be requeued ([Errno 2] No such file or directory: 'scontrol'): submit it again"
ASK, REQUEUE = f"show job --oneliner {JOB_ID}", f"requeue {JOB_ID}"


@pytest.mark.parametrize(  # all that SLURM may answer: test_job.py
    ("number", "answer", "code", "outcome", "asked"),
    [
        (USR1, "JobState=RUNNING Restarts=0", 0, f"job {JOB_ID} is requeued", [ASK, REQUEUE]),
        (TERM, "JobState=COMPLETING Reason=None", 1, f"job {JOB_ID} was cancelled and is not requeued", [ASK]),
        (USR1, None, 1, NO_SCONTROL, []),
    ],
    ids=["announced", "cancelled", "no scontrol"],
)
@pytest.mark.filterwarnings("ignore:SlurmRequeue cannot find scontrol")
def test_what_becomes_of_the_job_is_said(number, answer, code, outcome, asked, slurm, tmp_path, said, monkeypatch):
    monkeypatch.setattr(slurm_requeue, "time", SimpleNamespace(perf_counter=lambda: 7.0))
    if answer is None:
        slurm.take_away()
    else:
        slurm.answer(answer)
    stopped = fit(Noting, tmp_path, Send(1, number), SlurmRequeue())
    path = tmp_path / "slurm_requeue" / JOB_ID / "step-0" / "fit.ckpt"
    assert said == [f"SlurmRequeue: {number.name} at step 2: saved {path} in 0.0 s; {outcome}."]
    assert (stopped.code, slurm.asked) == (code, asked)
    assert path.exists()


# --- refusals


@pytest.mark.parametrize("name", ["SIGNAL", "KILL", "SIGTERM"])
def test_a_signal_that_cannot_be_used_is_refused(name):
    message = rf"^SlurmRequeue\(requeue_signal\) must be a signal like 'SIGUSR1', got '{name}'\.$"
    with pytest.raises(ValueError, match=message):
        SlurmRequeue(requeue_signal=name)


def test_arguments_of_a_wrong_type_are_refused():
    with pytest.raises(TypeError, match=r"\(requeue_signal\) must be the name of a signal, got 10 of type int\.$"):
        SlurmRequeue(requeue_signal=10)
    with pytest.raises(TypeError, match=r"^SlurmRequeue\(dirpath\) must be a path or None, got 3 of type int\.$"):
        SlurmRequeue(3)
    with pytest.raises(
        TypeError, match=r"^SlurmRequeue\(weights_only\) must be True or False, got 'no' of type str\.$"
    ):
        SlurmRequeue(weights_only="no")


def test_tasks_that_srun_did_not_start_are_refused(slurm, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "2")
    SlurmRequeue()
    monkeypatch.delenv("SLURM_STEP_ID")
    with pytest.raises(
        MisconfigurationException, match=r"^The SLURM job has 2 tasks, and this process was not started"
    ):
        SlurmRequeue()


def refuse(folder: Path, *callbacks: pl.Callback, **arguments: object) -> str:
    with pytest.raises(MisconfigurationException) as caught:
        fit(Noting, folder, *callbacks, **arguments)
    return str(caught.value)


def test_two_of_them_are_refused(slurm, tmp_path):
    class Another(SlurmRequeue):  # Lightning itself refuses two of one class
        pass

    assert refuse(tmp_path, SlurmRequeue(), Another()) == (
        "SlurmRequeue can be used once, got several. Remove all but one."
    )


def test_a_second_fit_of_the_program_is_refused(slurm, tmp_path):
    run = fit(Noting, tmp_path, SlurmRequeue(), ends_process=False)
    with pytest.raises(MisconfigurationException) as caught:
        run.trainer.fit(run.module)
    end_process(*run.trainer.callbacks)
    assert str(caught.value) == (
        "SlurmRequeue resumes one fit per program, and this is the second: a restarted job would not know which one it "
        "was in. Start each fit with an srun of its own, or use SlurmRequeue in one of them only."
    )


def test_tuners_are_refused_in_a_job(slurm, tmp_path):
    assert refuse(tmp_path, LearningRateFinder(), SlurmRequeue()) == (
        "SlurmRequeue does not work with LearningRateFinder: a restarted job would search again. Search in a "
        "program of its own, and give its result to this one."
    )


def test_a_url_is_no_folder(slurm, tmp_path):
    message = "SlurmRequeue needs a folder that all nodes share, got default_root_dir='memory://runs'. "
    assert refuse(tmp_path, SlurmRequeue(), default_root_dir="memory://runs") == (
        message + "Give it one: SlurmRequeue(dirpath=...)."
    )
    stopped = fit(Noting, tmp_path, Send(1), SlurmRequeue(tmp_path), default_root_dir="memory://runs")
    assert stopped.code == 0


WAY_OUT = "Give a folder that all nodes share: SlurmRequeue(dirpath=...), or the trainer's default_root_dir."


def test_a_folder_that_cannot_be_written_is_refused(slurm, tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "slurm_requeue" / JOB_ID / "step-0"
    assert refuse(tmp_path, SlurmRequeue(tmp_path / "file")) == (
        f"SlurmRequeue cannot write to '{path}': [Errno 20] Not a directory: '{path.parents[1]}'. {WAY_OUT}"
    )


# --- handlers


def handlers() -> dict[int, object]:
    return {number: signal.getsignal(number) for number in (TERM, USR1, USR2)}


class Look(pl.Callback):
    def __init__(self) -> None:
        self.handlers: list[object] = []
        self.auto_requeue: list[bool] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.handlers.append(handlers())
        environment = trainer._accelerator_connector.cluster_environment
        self.auto_requeue.append(getattr(environment, "auto_requeue", None))


def test_lightnings_requeueing_is_off_meanwhile(slurm, tmp_path):
    environment, look, callback = SLURMEnvironment(auto_requeue=True), Look(), SlurmRequeue()
    before = handlers()
    for _ in range(2):
        slurm.start(0)
        fit(Noting, tmp_path, look, callback, plugins=[environment])
        assert environment.auto_requeue
        assert handlers() == before
    assert look.auto_requeue == [False, False]
    assert [each[USR1] == note_signal for each in look.handlers] == [True, True]


def test_a_fit_that_fails_leaves_handlers_as_they_were(slurm, tmp_path):
    environment, before = SLURMEnvironment(auto_requeue=True), handlers()
    callback = SlurmRequeue()
    trainer = make_trainer(tmp_path, Fail(1), callback, plugins=[environment])
    with pytest.raises(PlantedError):
        trainer.fit(Noting())
    after = handlers()
    end_process(callback)
    # by default they would end the program: while it clears up, or where it goes on
    assert after == before | {TERM: note_signal, USR1: note_signal}
    assert handlers() == before
    assert environment.auto_requeue
    assert "resume_start" not in vars(trainer._checkpoint_connector)
    assert "advance" not in vars(trainer.fit_loop.epoch_loop)
    assert "_sigterm_notifier_fn" not in vars(trainer._signal_connector)
    assert list((tmp_path / "slurm_requeue" / JOB_ID / "step-0").glob("fit.started"))  # the job may be started again


@pytest.mark.parametrize("is_trial", [False, True], ids=["outside of a job", "a trial run"])
def test_without_a_job_or_in_a_trial_run_signals_are_left_alone(is_trial, slurm, tmp_path, monkeypatch):
    if not is_trial:
        monkeypatch.delenv("SLURM_JOB_ID")
    look, environment = Look(), SLURMEnvironment(auto_requeue=False)
    fit(Noting, tmp_path, look, SlurmRequeue(), fast_dev_run=is_trial, plugins=[environment])
    assert [each[USR1] for each in look.handlers] == [handlers()[USR1]]
    assert not (tmp_path / "slurm_requeue").exists()


def test_outside_of_the_main_thread_it_says_that_it_has_no_effect(slurm, tmp_path):
    runs = []

    def fit_in_thread() -> None:
        thread = threading.Thread(target=lambda: runs.append(fit(Noting, tmp_path, SlurmRequeue())))
        thread.start()
        thread.join()

    message = r"^SlurmRequeue has no effect outside of the main thread: only that thread receives signals\.$"
    with pytest.warns(UserWarning, match=message):
        fit_in_thread()
    assert len(runs[0].module.seen) == 6
