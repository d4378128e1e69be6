"""Foreign training code with each callback that promises the same bits."""

from collections.abc import Callable

import lightning.pytorch as pl
import pytest
from foreign_code import programs
from foreign_code.runs import Program, assert_same, fit, fit_plain

from lightning_vram import (
    ActivationCheckpointing,
    ActivationCompression,
    ActivationOffload,
    EarlyRelease,
    EmptyCache,
    InPlaceFusion,
    VRAMMonitor,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:ActivationOffload"),  # from host memory to host memory
]

PROGRAMS: list[Program] = [
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
PARTS: dict[str, Callable[[], list[pl.Callback]]] = {
    "ActivationCheckpointing": lambda: [ActivationCheckpointing()],
    "save=matmuls": lambda: [ActivationCheckpointing(save="matmuls")],
    "ActivationOffload": lambda: [ActivationOffload(min_offload_bytes=256)],
    "ActivationCompression": lambda: [ActivationCompression(min_bytes=64)],
    "InPlaceFusion": lambda: [InPlaceFusion(min_bytes=64)],
    "VRAMMonitor": lambda: [VRAMMonitor(track=True, path=None)],
    "EarlyRelease": lambda: [EarlyRelease(collect_every_n_steps=2)],
    "EmptyCache": lambda: [EmptyCache(every_n_batches=1)],
    "all": lambda: [
        ActivationCheckpointing(every_n_layers=2),
        ActivationOffload(min_offload_bytes=256),
        InPlaceFusion(min_bytes=64),
        EarlyRelease(),
        EmptyCache(),
        VRAMMonitor(track=True, path=None),
    ],
}


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_weights_and_logs_are_those_of_the_plain_run(program, part):
    assert_same(fit(program, *PARTS[part]()), fit_plain(program))
