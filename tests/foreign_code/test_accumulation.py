"""Foreign training code whose gradients are accumulated: where windows are alike, what Lightning makes of it."""

import pytest
from foreign_code import programs
from foreign_code.runs import assert_close, fit, fit_plain
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_vram import AccumulationScheduler

PROGRAMS = [
    programs.MomentumTeacher,
    programs.AdaptersWithDropout,
    programs.Detection,
    programs.Diffusion,
    programs.Speech,
    programs.TwoTasks,
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_equal_windows_are_those_of_lightning(program):
    scheduled = fit(program, AccumulationScheduler(by_epoch={0: 2}))
    assert_close(scheduled, fit_plain(program, accumulate_grad_batches=2), 1e-5)


def test_a_step_by_hand_is_refused():
    with pytest.raises(MisconfigurationException, match=r"^AccumulationScheduler does not work with manual optimiz"):
        fit(programs.Adversarial, AccumulationScheduler(by_epoch={0: 2}))
