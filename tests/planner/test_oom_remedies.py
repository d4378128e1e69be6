import pytest

from lightning_vram.estimation.step_time import StepTime
from lightning_vram.planner.oom_remedies import as_code, measure_singles
from lightning_vram.planner.remedies import CHECKPOINTING, OFFLOAD, remedies_for
from lightning_vram.planner.scheme import Exactness, Measured, Part

LEAN = Part("lightning_vram.LeanMixedPrecision", {"precision": "bf16"}, place="plugins", replaces=("precision",))
SHARDED = Part("lightning_vram.FSDPOffloadStrategy", {"offload": "params"}, place="strategy")


def test_code_can_be_pasted():
    assert as_code([CHECKPOINTING, OFFLOAD]) == "callbacks=[ActivationCheckpointing(), ActivationOffload()]"
    assert as_code([LEAN]) == "precision=None, plugins=[LeanMixedPrecision(precision='bf16')]"
    assert as_code([SHARDED]) == "strategy=FSDPOffloadStrategy(offload='params')"


class Steps:
    """Steps of which no configuration saves anything."""

    batch_size = 8

    def __init__(self, states_bytes):
        self.tried, self._states_bytes = [], states_bytes

    def transfer_bytes(self, seconds):
        return 0

    def __call__(self, scheme):
        self.tried.append(Measured(scheme, 100, 50, StepTime(1.0), self._states_bytes))
        return self.tried[-1]


@pytest.mark.parametrize(("states_bytes", "first"), [(20, "MicroBatching(size=4)"), (60, "MomentsInBF16")])
@pytest.mark.parametrize("budget_bytes", [None, 10])
def test_the_largest_share_of_the_peak_comes_first_then_what_autovram_would_take(states_bytes, first, budget_bytes):
    steps = Steps(states_bytes)
    exact, every = (remedies_for({}, level, on_card=False) for level in (Exactness.EXACT, Exactness.ANY))
    measure_singles(steps, exact, every, budget_bytes)
    tried = [str(one.scheme) for one in steps.tried]
    assert tried[0] == "baseline"
    assert len(tried) == len(set(tried))
    not_exact = [text for text, one in zip(tried, steps.tried, strict=True) if one.scheme.exactness > Exactness.EXACT]
    assert not_exact[0] == first
    assert tried[1] == ("ActivationCheckpointing" if states_bytes < 50 else "OptimizerInBackward")
    if budget_bytes is not None:
        assert tried.index("OptimizerInBackward + ActivationCheckpointing") < tried.index(first)
