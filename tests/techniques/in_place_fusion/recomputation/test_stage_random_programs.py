"""Random programs of cheap and costly operators, views and writes: equal to the plain run, or refused as it refuses."""

from contextlib import nullcontext

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from techniques.in_place_fusion.random_programs import run, steps
from techniques.saved_tensors import is_same

from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation

NUM_CASES = 2000


@pytest.mark.parametrize("num_cases", [100, pytest.param(NUM_CASES, marks=pytest.mark.slow)])
def test_random_programs_give_the_same_bits_or_the_same_refusal(num_cases) -> None:
    @settings(
        max_examples=num_cases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    @given(program=steps, seed=st.integers(0, 3), dropout=st.sampled_from(["mask", "replay"]))
    def check(program, seed, dropout) -> None:
        expected = run(program, nullcontext(), seed)
        got = run(program, Recomputation(min_bytes=0, dropout=dropout, verify="never"), seed)
        if isinstance(expected, str) or isinstance(got, str):
            assert got == expected
        else:
            assert all(map(is_same, expected, got))

    check()
