"""What a checkpointed layer costs in Python, without a clock: calls of functions, beside PyTorch's own checkpoint."""

import pytest

from tests.benchmarks.python_price import LAYERS, NUM_WARM_UP, SAVES, count_calls, make_variants


@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_checkpointed_layer_takes_fewer_python_calls_than_under_torchs_checkpoint(layer, save):
    variants = make_variants(LAYERS[layer], SAVES[save])
    for run in variants.values():
        for _ in range(NUM_WARM_UP):
            run()
    calls = {name: count_calls(run) for name, run in variants.items()}
    assert calls["plain"] < calls["ours"] < 0.9 * calls["torch"], calls
