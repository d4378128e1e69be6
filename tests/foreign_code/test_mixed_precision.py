"""Foreign training code in bf16: our plugin against Lightning's."""

import lightning.pytorch as pl
import pytest
from foreign_code import programs
from foreign_code.runs import assert_same, fit, fit_plain

from lightning_vram import LeanMixedPrecision

PROGRAMS = [
    programs.MomentumTeacher,
    programs.MomentumTeacherInTheStep,
    programs.MomentumTeacherThroughData,
    programs.Adversarial,
    programs.AdaptersWithDropout,
    programs.Detection,
    programs.GraphClassification,
    programs.Diffusion,
    programs.Speech,
    programs.TwoTasks,
    programs.Images,
]


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("program", PROGRAMS)
def test_weights_and_logs_are_those_of_lightning(program):
    assert_same(fit(program, plugins=[LeanMixedPrecision("bf16")]), fit_plain(program, precision="bf16-mixed"))


TEACHERS = [
    programs.MomentumTeacher,
    programs.MomentumTeacherInTheStep,
    programs.MomentumTeacherThroughData,
]


@pytest.mark.parametrize("program", TEACHERS)
def test_a_teacher_that_moves_a_little_cannot_be_in_bf16(program):
    message = (
        r"^The frozen parameter teacher\.0\.weight is written at almost every step, and bfloat16 loses small changes: "
        r"name its module in fp32_modules=\[\.\.\.\]\.$"
    )
    with pytest.raises(RuntimeError, match=message):
        fit(program, plugins=[LeanMixedPrecision("bf16", parameters="bf16+split")])


@pytest.mark.parametrize("program", TEACHERS)
def test_a_teacher_in_float32_follows_its_student_in_bf16(program):
    plugin = LeanMixedPrecision("bf16", parameters="bf16+split", fp32_modules=["teacher"])
    actual, plain = fit(program, plugins=[plugin]), fit_plain(program, precision="bf16-mixed")
    pl.seed_everything(0, verbose=False)
    begin = program().state_dict()
    for name in (name for name in begin if name.startswith("teacher")):
        moved, expected = actual.weights[name] - begin[name], plain.weights[name] - begin[name]
        assert (moved - expected).norm() < 0.3 * expected.norm(), name


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_with_casts_in_the_backward(program):
    plugin = LeanMixedPrecision("bf16", recast_in_backward=True)
    assert_same(fit(program, plugins=[plugin]), fit_plain(program, precision="bf16-mixed"))
