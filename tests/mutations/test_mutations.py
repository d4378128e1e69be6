"""Each wait of the package is needed: a program is wrong on the simulated device without it, and right with it."""

from functools import cache

import pytest
import torch
from mutations.hostile import settings
from mutations.mutation import Mutation, Workload
from mutations.table import MUTATIONS
from support.devices import DEVICE, device_module
from torch import Tensor

from lightning_vram.techniques.sharding import flat_shards

pytestmark = pytest.mark.device
FROM_A_RACE = (
    "simulated device:",
    "Expected all tensors to be on the same device",
    # A thread of the host meets what FSDP2 is given meanwhile for a gradient, or the optimizer finds none.
    "more than one element of the written-to tensor",
    "in argument 2, but got NoneType",
)
WORKLOADS = list({mutation.workload: None for mutation in MUTATIONS})


@cache
def expected(workload: Workload) -> list[Tensor]:
    """The results where copies are over as soon as they are asked for."""
    with settings(lazy=False, races=0):
        return workload()


@pytest.fixture(autouse=True)
def _stream_of_its_own():
    """Streams come from a pool: one that is kept from before may be that of the computation, where there is no race."""
    flat_shards._side_stream.cache_clear()


@pytest.fixture(autouse=True)
def _forget_races():
    yield
    if DEVICE == "sim":
        with settings(races=0):
            torch.accelerator.synchronize()
        device_module().clear_races()


def is_wrong(workload: Workload) -> bool:
    """Whether the results are others, or a race ends in an error; any other error is one of the mutation."""
    try:
        results = workload()
    except (RuntimeError, TypeError) as error:
        if not any(text in str(error) for text in FROM_A_RACE):
            raise
        return True
    return not are_equal(results, expected(workload))


def are_equal(results: list[Tensor], others: list[Tensor]) -> bool:
    return len(results) == len(others) and all(map(torch.equal, results, others))


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_results_do_not_depend_on_when_copies_happen(workload):
    results = workload()

    assert are_equal(results, expected(workload))


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "sim", reason="on other devices it may go well")
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: f"{mutation.place} {mutation.new.splitlines()[0]}")
def test_each_wait_is_needed(mutation: Mutation):
    expected(mutation.workload)  # of the package as it is

    with mutation.applied():
        assert is_wrong(mutation.workload)
