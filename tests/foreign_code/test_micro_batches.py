"""Foreign training code in micro-batches: the whole batch up to rounding, or a refusal that says why."""

import pytest
from foreign_code import programs
from foreign_code.runs import assert_close, assert_same, fit, fit_plain
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_vram import ActivationCheckpointing, MicroBatching, VRAMMonitor
from lightning_vram.core.batches.splitting import BatchSplitError

CUT = [programs.MomentumTeacher, programs.Adapters, programs.Detection, programs.Speech]


@pytest.mark.parametrize("program", CUT)
def test_two_halves_are_the_whole_batch(program):
    assert_close(fit(program, MicroBatching(2)), fit_plain(program), 1e-4)


def test_logged_metrics_of_several_tasks_are_those_of_the_whole_batch():
    assert_close(fit(programs.TwoTasks, MicroBatching(2, eval=2)), fit_plain(programs.TwoTasks), 1e-4)


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("program", [*CUT, programs.TwoTasks, programs.Diffusion, programs.Images])
def test_a_batch_that_fits_is_run_as_ever(program):
    callbacks = [MicroBatching(), ActivationCheckpointing(), VRAMMonitor(track=True, path=None)]
    assert_same(fit(program, *callbacks), fit_plain(program))


def test_graphs_that_were_joined_cannot_be_cut():
    message = (
        r"^batch\.edge_index has 2 rows \(int64\[2, \d+\]\), but the batch has \d+ samples \(batch\.x has \d+ rows\)\. "
        r"If it belongs to all samples, name it: shared_keys=\[\"edge_index\"\]; if not, pass split= to "
        r"MicroBatching, or define split_batch\(batch, size\) on the LightningModule\.$"
    )
    with pytest.raises(BatchSplitError, match=message):
        fit(programs.GraphClassification, MicroBatching(2))


def test_a_step_by_hand_is_refused():
    with pytest.raises(MisconfigurationException, match=r"^MicroBatching does not work with manual optimization"):
        fit(programs.Adversarial, MicroBatching(2))
