"""Foreign training code under ``fsdp_offload`` on one device, against the plain run with the same fused optimizers."""

import pytest
from foreign_code import programs
from foreign_code.runs import assert_close, assert_same, fit, fit_plain

from lightning_vram import ActivationCheckpointing, FSDPOffloadStrategy

pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")  # Lightning, of all with ranks

PROGRAMS = [
    programs.MomentumTeacher,
    programs.MomentumTeacherInTheStep,
    programs.MomentumTeacherThroughData,
    programs.Adversarial,
    programs.AdaptersWithDropout,
    programs.Detection,
    programs.GraphClassification,
    programs.Speech,
    programs.TwoTasks,
    programs.Images,
]


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_weights_and_logs_are_those_of_the_plain_run(program):
    assert_same(fit(program, strategy=FSDPOffloadStrategy(min_params=100)), fit_plain(program))


def test_what_several_sharded_layers_read_has_its_gradients_added_in_another_order():
    strategy = FSDPOffloadStrategy(min_params=100)  # each block of the U-Net reads the time
    assert_close(fit(programs.Diffusion, strategy=strategy), fit_plain(programs.Diffusion), 1e-6)


@pytest.mark.parametrize("program", [programs.AdaptersWithDropout, programs.TwoTasks])
def test_the_same_with_checkpointed_layers(program):
    strategy = FSDPOffloadStrategy(min_params=100)
    assert_same(fit(program, ActivationCheckpointing(), strategy=strategy), fit_plain(program))
