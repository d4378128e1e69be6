"""Foreign training code that averages its weights with Lightning's callback."""

from collections.abc import Callable

import lightning.pytorch as pl
import pytest
from foreign_code import programs
from foreign_code.runs import assert_same, fit
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_vram import (
    ActivationCheckpointing,
    ActivationCompression,
    InPlaceFusion,
    LeanMixedPrecision,
    VRAMMonitor,
)

PARTS: dict[str, Callable[[], list[pl.Callback]]] = {
    "ActivationCheckpointing": lambda: [ActivationCheckpointing()],
    "ActivationCompression": lambda: [ActivationCompression(min_bytes=64)],
    "InPlaceFusion": lambda: [InPlaceFusion(min_bytes=64)],
    "VRAMMonitor": lambda: [VRAMMonitor(track=True, path=None)],
}


def average() -> StochasticWeightAveraging:
    return StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1, annealing_epochs=1)


@pytest.mark.parametrize("part", PARTS)
def test_averages_and_the_statistics_of_batch_norms_are_those_of_the_plain_run(part):
    plain = fit(programs.Images, average(), max_epochs=3)
    assert_same(fit(programs.Images, average(), *PARTS[part](), max_epochs=3), plain)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"strategy": "fsdp_offload"},
            r"^FSDPOffloadStrategy does not work with StochasticWeightAveraging, which copies parameters, ",
        ),
        (
            {"plugins": [LeanMixedPrecision("bf16", parameters="bf16+split")]},
            r"^LeanMixedPrecision\(parameters='bf16\+split'\) does not work with StochasticWeightAveraging, which ",
        ),
    ],
    ids=["fsdp_offload", "bf16+split"],
)
def test_where_averages_have_no_place_they_are_refused(arguments, message):
    with pytest.raises(MisconfigurationException, match=message):
        fit(programs.Images, average(), **arguments)
