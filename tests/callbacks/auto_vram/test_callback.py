"""What is planned at the start of a fit is what the fit does, and the results are those of the plain run."""

import logging
import re
import warnings
from contextlib import contextmanager

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.helpers import ForkingOffload, TinyByteGPT, assert_equal_weights
from support.planned_models import LitGPT
from torch.utils.data import DataLoader, Dataset

from lightning_vram import ActivationCheckpointing, AutoVRAM, VRAMMonitor
from lightning_vram.callbacks.auto_vram import callback as callback_module
from lightning_vram.memory.units import MIB

PLAIN_BYTES = 16.78 * MIB  # of a step


def peak_of(monitor: VRAMMonitor) -> int:
    return monitor.peaks["train"].peak_allocated_bytes


def messages(caplog) -> str:
    return "\n".join(record.getMessage() for record in caplog.records if "AutoVRAM" in record.getMessage())


@pytest.fixture
def heard(caplog):
    caplog.set_level(logging.INFO, "lightning.pytorch")
    return caplog


def test_a_run_that_fits_stays_as_it_is(same_as_baseline, heard, monkeypatch):
    auto, seen, stages = AutoVRAM(), [], []

    @contextmanager
    def show_progress(trainer):
        yield lambda stage, done: stages.append(stage)
        stages.append("end")

    class Look(pl.Callback):
        takes_no_memory = True

        def on_train_start(self, trainer, pl_module):
            seen.append(([type(one).__name__ for one in trainer.callbacks], auto.scheme.parts))

    monkeypatch.setattr(callback_module, "show_progress", show_progress)
    same_as_baseline(LitGPT, auto, Look())
    assert stages == ["tracing baseline", "end"]
    assert seen == [(["AutoVRAM", "Look"], ())]
    message = r"AutoVRAM: Fits without changes: 16\.78 MiB of .* on cpu\. There is nothing to do\."
    assert re.search(message, messages(heard))
    assert auto.scheme is None


def test_a_budget_is_kept_and_nothing_else_changes(same_as_baseline, heard):
    budget = int(0.5 * PLAIN_BYTES)
    monitor, auto = VRAMMonitor(track=True, path=None), AutoVRAM(budget)
    model, _ = same_as_baseline(LitGPT, auto, monitor)
    assert model.trainer.callbacks == [auto, monitor]
    assert 0.8 * budget < peak_of(monitor) <= budget == auto.budget_bytes
    assert "AutoVRAM: Fits with this plan: " in messages(heard)
    assert "EarlyRelease + ActivationCheckpointing(budget=" in " ".join(messages(heard).split())
    lines = [line.split() for line in messages(heard).splitlines() if line.strip()]
    assert [line[-1] for line in lines].count("baseline") == 1
    (chosen,) = (line for line in lines if line[0] == "*" and line[1].isdigit())
    header = "memory of budget step time results configuration"
    assert lines[lines.index(chosen) - int(chosen[1])] == header.split()


@pytest.mark.slow
def test_the_least_is_told_where_nothing_fits(fit):
    message = (
        r"^AutoVRAM: No plan fits 2\.00 MiB\. The minimum found is \S+ MiB, with OptimizerInBackward "
        r"\+ InPlaceFusion \+ ActivationCheckpointing, in the \S.*, mostly for '\S+' \(\S+ \w+\)\. What helps: "
        r"budget='\d+\.\d\dMiB', or perhaps allow='lossless' or 'any'\.$"
    )
    with pytest.raises(MisconfigurationException, match=message):
        fit(LitGPT, AutoVRAM("2MiB"))


@pytest.mark.slow
def test_what_is_left_is_tried_where_nobody_named_a_budget(fit, monkeypatch):
    monkeypatch.setattr("lightning_vram.estimation.running_trainer.available_host_bytes", lambda: 2 * MIB)
    monitor = VRAMMonitor(track=True, path=None)
    with pytest.warns(UserWarning, match=r"The run continues with the minimum, and will probably run out of memory\."):
        fit(LitGPT, AutoVRAM(), monitor)
    assert peak_of(monitor) < 0.5 * PLAIN_BYTES


@pytest.mark.slow
def test_lossless_runs_batches_in_parts(fit):
    auto, monitor, schemes = AutoVRAM(int(0.3 * PLAIN_BYTES), "lossless"), VRAMMonitor(track=True, path=None), []
    auto.on_train_start = lambda trainer, pl_module: schemes.append(auto.scheme)
    model = fit(LitGPT, auto, monitor)
    assert peak_of(monitor) <= 0.3 * PLAIN_BYTES
    assert "MicroBatching" in str(schemes[0])
    assert_equal_weights(fit(LitGPT, *(part.make() for part in schemes[0].parts)), model)


@pytest.mark.slow
def test_a_part_of_the_users_is_kept(fit, same_as_baseline, heard):
    own = ActivationCheckpointing(every_n_layers=2)
    with pytest.raises(
        MisconfigurationException,
        match=r"No plan fits 6\.71 MiB\. .* with OptimizerInBackward \+ InPlaceFusion, in the",
    ):
        fit(LitGPT, AutoVRAM(int(0.4 * PLAIN_BYTES)), own)
    monitor = VRAMMonitor(track=True, path=None)
    same_as_baseline(LitGPT, AutoVRAM(int(0.75 * PLAIN_BYTES)), own, monitor)
    assert peak_of(monitor) <= 0.75 * PLAIN_BYTES
    assert "AutoVRAM: Fits without changes" in messages(heard)


class Wide(pl.LightningModule):
    """Weights and their gradients are most of it, of 6 MiB each."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(torch.ones(8, 512), batch_size=4)


def test_where_parameters_step_in_the_backward_nothing_runs_a_step_again(same_as_baseline, monkeypatch):
    monkeypatch.setattr(callback_module, "can_repeat_step", lambda trainer: True)
    monitor, seen = VRAMMonitor(track=True, path=None), []

    class Look(pl.Callback):
        takes_no_memory = True

        def on_train_start(self, trainer, pl_module):
            seen.extend(type(one).__name__ for one in trainer.callbacks)

    same_as_baseline(Wide, AutoVRAM(8 * MIB), monitor, Look())
    assert seen == ["AutoVRAM", "VRAMMonitor", "Look", "OptimizerInBackward"]
    assert peak_of(monitor) <= 8 * MIB


def test_the_precision_gives_way_to_a_plugin_for_the_fit(fit):
    precision = {"precision": "bf16-mixed"}
    monitors = [VRAMMonitor(track=True, path=None) for _ in range(2)]
    plain = fit(Wide, monitors[0], **precision)
    budget = peak_of(monitors[0]) - MIB
    packed = fit(Wide, AutoVRAM(budget), monitors[1], **precision)
    assert_equal_weights(plain, packed)
    assert type(packed.trainer.precision_plugin) is type(plain.trainer.precision_plugin)
    assert peak_of(monitors[1]) <= budget


class Lengths(Dataset):
    """Sequences of several lengths, with noise from a generator of its own and a global one."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.own = lengths, torch.Generator().manual_seed(3)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = torch.randint(128, (self.lengths[index] + 1,), generator=self.own)
        return noise + torch.randint(128, noise.shape)


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


class LitLengths(LitGPT):
    """Of its first 8 batches the third is the longest, and the tenth is longer, if nobody shuffles them."""

    lengths = (8, 16, 48, 8, 16, 8, 24, 8, 8, 64, 60, 8)
    shuffles = False

    def train_dataloader(self) -> DataLoader:
        lengths = [length for length in self.lengths for _ in range(2)]
        return DataLoader(Lengths(lengths), batch_size=2, shuffle=self.shuffles, collate_fn=padded)


def test_the_largest_of_the_first_batches_is_planned_for_and_a_larger_one_is_told_once(fit, heard):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(LitLengths, AutoVRAM("1GiB"))
    assert messages(heard).endswith("\nPlanned for the largest of the first 8 batches, [2, 49].")
    told = [str(one.message) for one in caught if "AutoVRAM" in str(one.message)]
    assert told == [
        "AutoVRAM: a batch of shape [2, 65] is larger than the batch the run was planned for. It may need more memory."
    ]


@pytest.mark.slow
def test_looking_at_batches_changes_neither_data_nor_random_numbers(fit):
    class Shuffled(LitLengths):
        shuffles = True

    seen = []

    class Look(pl.Callback):
        takes_no_memory = True

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append(batch.clone())

        def on_train_end(self, trainer, pl_module):
            seen.append(torch.get_rng_state())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        plain = fit(Shuffled, Look())
        packed = fit(Shuffled, AutoVRAM("1GiB"), Look())
    assert len(seen) == 26
    for one, other in zip(seen[:13], seen[13:], strict=True):
        assert torch.equal(one, other)
    assert_equal_weights(plain, packed)


class RunsOut(LitGPT):
    """As long as its layers keep more than their inputs."""

    def training_step(self, batch):
        found = [one for one in self.trainer.callbacks if isinstance(one, ActivationCheckpointing)]
        if is_real(batch) and all(one.budget is not None for one in found):
            raise torch.OutOfMemoryError("out of memory")
        return super().training_step(batch)


def is_real(batch) -> bool:
    return type(batch) is torch.Tensor


@pytest.mark.slow
def test_memory_that_runs_out_in_spite_of_it_ends_in_a_tighter_plan(fit, monkeypatch):
    monkeypatch.setattr(callback_module, "can_repeat_step", lambda trainer: True)
    with pytest.warns(
        UserWarning,
        match=r"^AutoVRAM: a step ran out of memory in spite of the plan\. It is repeated with EarlyRelease \+ A",
    ):
        packed = fit(RunsOut, AutoVRAM(int(0.6 * PLAIN_BYTES)))
    assert_equal_weights(fit(LitGPT), packed)


@pytest.mark.slow
def test_where_no_plan_is_left_the_error_says_what_would_help(fit, monkeypatch):
    monkeypatch.setattr(callback_module, "can_repeat_step", lambda trainer: True)

    class Full(LitGPT):
        def training_step(self, batch):
            if is_real(batch):
                raise torch.OutOfMemoryError("out of memory")
            return super().training_step(batch)

    with (
        pytest.warns(UserWarning, match="It is repeated with"),
        pytest.raises(torch.OutOfMemoryError) as caught,
    ):
        fit(Full, AutoVRAM(int(0.6 * PLAIN_BYTES)))
    assert (
        "AutoVRAM: no tighter plan is left. allow='lossless' would split the batch into micro-batches."
        in caught.value.__notes__
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_all_ranks_refuse_alike(make_trainer):
    trainer = make_trainer(callbacks=[AutoVRAM("1KiB")], strategy=ForkingOffload(), devices=2)
    with pytest.raises(Exception, match="AutoVRAM: No plan fits"):
        trainer.fit(TinyByteGPT())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"allow": "some"}, ValueError, r"AutoVRAM\(allow\) must be 'exact', 'lossless' or 'any', got 'some'\."),
        ({"budget": 1.5}, ValueError, r"AutoVRAM\(budget\) as a share .* at most 1, got 1\.5\."),
        ({"budget": [1]}, TypeError, r"AutoVRAM\(budget\) must be 'auto', bytes, .* got \[1\] of type list\."),
        ({"replan": 1}, TypeError, r"AutoVRAM\(replan\)"),
        ({"cache": "no"}, TypeError, r"AutoVRAM\(cache\)"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        AutoVRAM(**arguments)


def test_two_of_them_are_refused(fit):
    with pytest.raises(MisconfigurationException, match=r"AutoVRAM can be used once, got several"):
        fit(LitGPT, AutoVRAM(), AutoVRAM("1GiB"))
