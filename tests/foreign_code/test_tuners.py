"""Foreign training code that searches its learning rate or its batch size first."""

from collections.abc import Callable
from functools import cache

import pytest
from foreign_code import programs
from foreign_code.runs import Result, assert_same, fit
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from lightning_vram import ActivationCheckpointing, InPlaceFusion, MicroBatching, VRAMMonitor

pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")  # Lightning, of all with ranks

PARTS = {
    "ActivationCheckpointing": lambda: [ActivationCheckpointing()],
    "InPlaceFusion": lambda: [InPlaceFusion(min_bytes=64)],
    "MicroBatching": lambda: [MicroBatching()],
    "VRAMMonitor": lambda: [VRAMMonitor(track=True, path=None)],
    "fsdp_offload": lambda: [],
}
TUNERS = {
    "learning rate": lambda: LearningRateFinder(num_training_steps=8, early_stop_threshold=None),
    "batch size": lambda: BatchSizeFinder(mode="power", steps_per_trial=1, init_val=2, max_trials=2),
}


@pytest.fixture(scope="module")
def find_plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Result]:
    """Search and fit without any part; the same run is made once."""
    return cache(lambda tuner: fit(programs.Images, TUNERS[tuner](), default_root_dir=tmp_path_factory.mktemp("plain")))


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("tuner", TUNERS)
def test_it_finds_what_the_plain_run_finds_and_trains_the_same(tuner, part, find_plain, tmp_path):
    plain = find_plain(tuner)
    arguments = {"strategy": part} if part == "fsdp_offload" else {}
    tuned = fit(programs.Images, TUNERS[tuner](), *PARTS[part](), default_root_dir=tmp_path, **arguments)
    assert (tuned.program.lr, tuned.program.batch_size) == (plain.program.lr, plain.program.batch_size)
    assert_same(tuned, plain)
