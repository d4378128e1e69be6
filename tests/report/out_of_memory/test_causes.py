"""Causes by what is known; those that a fit can show are in tests/callbacks/vram_monitor."""

from dataclasses import replace
from math import nan

import numpy as np
import pytest
import torch

from lightning_vram.memory.device.out_of_memory import (
    FailedRequest,
    OutOfMemorySource,
    read_failed_request,
    read_out_of_memory,
)
from lightning_vram.memory.units import GIB, MIB
from lightning_vram.report.out_of_memory import OutOfMemory, Place, Work, find_cause, page, summary
from lightning_vram.report.plan import Choice

REQUEST = FailedRequest(2 * GIB, 80 * GIB, 1 * GIB, 79 * GIB, None, 77 * GIB, 1 * GIB)
FOUND = OutOfMemory("", OutOfMemorySource.DEVICE, "cuda:0", REQUEST, "train", Place(Work.FORWARD))


MORE_THAN_THERE_CAN_BE = 1 << 60  # bytes: no machine maps that many


@pytest.mark.parametrize(
    ("allocate", "asked_bytes"),
    [
        (lambda: torch.empty(MORE_THAN_THERE_CAN_BE, dtype=torch.uint8), MORE_THAN_THERE_CAN_BE),
        (lambda: np.empty(MORE_THAN_THERE_CAN_BE, dtype=np.uint8), None),  # in other words
    ],
    ids=["torch", "numpy"],
)
def test_a_host_that_really_runs_out_is_told_from_the_device(allocate, asked_bytes):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate()
    source = read_out_of_memory(caught.value)
    request = read_failed_request(str(caught.value), torch.device("cpu"))
    assert (source, request.asked_bytes) == (OutOfMemorySource.HOST, asked_bytes)
    found = replace(FOUND, source=source, request=request, message=str(caught.value))
    assert page(found).startswith("# Out of memory: the host ran out of memory\n")


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ([(step, GIB * (40 + step)) for step in range(8)], GIB),
        ([(step, GIB * (40 + step)) for step in range(7)], None),  # too few
        ([(step, GIB * 40 + MIB * step) for step in range(64)], None),  # too little
        ([(step, GIB * (40 + step % 3)) for step in range(64)], None),  # up and down
        ([(step, GIB * (70 - step)) for step in range(16)], None),
    ],
)
def test_growth_is_steady_and_large(ends, expected):
    assert replace(FOUND, growth=tuple(ends)).leaked_bytes == expected


# 24 GiB, of which a desktop has 400 MiB; 64 MiB would be there without it
DESKTOP = FailedRequest(64 * MIB, 24 * GIB, 10 * MIB, 24 * GIB - 410 * MIB, None, 23 * GIB, 32 * MIB)


@pytest.mark.parametrize(
    ("changes", "title"),
    [
        ({"growth": tuple((step, GIB * 20 + 50 * MIB * step) for step in range(60))}, "a memory leak"),
        ({"place": Place(Work.OPTIMIZER_STEP)}, "the optimizer state"),
        ({}, "the batch is too large"),
        ({"request": replace(DESKTOP, process_bytes=20 * GIB)}, "another process"),
    ],
)
def test_a_desktop_on_the_device_hides_no_cause(changes, title):
    assert find_cause(replace(FOUND, **{"request": DESKTOP, **changes})).title.startswith(title)


def test_who_has_a_limit_of_its_own_does_not_blame_others():
    """As an H100 had it: 6 GiB allowed, 64 GiB free, 8 GiB taken by others."""
    request = FailedRequest(144 * MIB, 79 * GIB, 64 * GIB, 7 * GIB, 6 * GIB, 5 * GIB + 900 * MIB, 57 * MIB)
    assert request.other_bytes == 8 * GIB
    assert find_cause(replace(FOUND, request=request)).title.startswith("the batch is too large")
    without_limit = replace(request, free_bytes=100 * MIB, limit_bytes=None)
    assert find_cause(replace(FOUND, request=without_limit)).title == "another process is on the device"


def test_a_leak_goes_before_pieces_that_are_too_small():
    in_pieces = replace(FOUND, request=replace(REQUEST, asked_bytes=20 * MIB, cached_bytes=300 * MIB))
    assert find_cause(in_pieces).title.startswith("fragmentation")
    growth = tuple((step, GIB * 60 + 256 * MIB * step) for step in range(60))
    assert find_cause(replace(in_pieces, growth=growth)).title.startswith("a memory leak")


def test_logits_are_told_by_the_function_that_failed():
    in_loss = replace(FOUND, place=Place(Work.FORWARD, function="cross_entropy"))
    assert find_cause(in_loss).title == "the logits, and the loss over them"


def test_what_fits_comes_into_the_summary_unless_the_cause_is_another():
    rows = (
        Choice("baseline", 2 * GIB, 1.6, 1.0, "exact", is_plan=False),
        Choice("`callbacks=[ActivationOffload()]`", GIB, 0.8, 1.1, "lossless", is_plan=True),
        Choice("`lean`", GIB // 2, 0.4, nan, "approximate", is_plan=False),
    )
    found = replace(FOUND, remedies=rows, budget_bytes=5 * GIB // 4)
    assert summary(found).endswith("What helps: `callbacks=[ActivationOffload()]`.")
    leaking = replace(found, growth=tuple((step, GIB * (40 + step)) for step in range(8)))
    assert "ActivationOffload" not in summary(leaking)
    _, table = page(leaking).split("|  | memory", 1)
    assert table.startswith(  # as `plan` has it: the same columns, from the most to the least
        " | of budget | step time | results | line to paste |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| 1 | 2.00 GiB | 160.0% | 1.00x | exact | baseline |\n"
        "| * 2 | 1.00 GiB | 80.0% | 1.10x | lossless | `callbacks=[ActivationOffload()]` |\n"
        "| 3 | 512.00 MiB | 40.0% | ? | approximate | `lean` |\n\n"
        "\\* recommended. Estimated "
    )
