"""Each wrong argument of the strategy ends in one sentence, before anything has begun."""

import re
from datetime import timedelta
from pathlib import Path

import pytest

from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy

WRONG = [
    ({"offload": "cpu"}, ValueError, "(offload) must be 'params', 'optimizer' or 'none', got 'cpu'."),
    (
        {"offload": ["optimizer"]},
        TypeError,
        "(offload) must be 'params', 'optimizer' or 'none', got ['optimizer'] of type list.",
    ),
    (
        {"device_bytes": "8GiB", "offload": "none"},
        ValueError,
        "(device_bytes='8GiB') needs offload='params', got 'none'.",
    ),
    (
        {"device_bytes": 0, "offload": "optimizer"},
        ValueError,
        "(device_bytes=0) needs offload='params', got 'optimizer'.",
    ),
    ({"device_bytes": 1.5}, ValueError, "(device_bytes) as a share must be from 0.0 to 1.0, got 1.5."),
    ({"device_bytes": -1}, ValueError, "(device_bytes) must not be negative, got -1."),
    (
        {"device_bytes": "all"},
        ValueError,
        "(device_bytes) must be a number and one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB, got 'all'.",
    ),
    (
        {"device_bytes": True},
        TypeError,
        "(device_bytes) must be bytes as an int or text such as '24GiB', got True of type bool.",
    ),
    ({"host_state": "fp8"}, ValueError, "(host_state) must be 'fp32', 'bf16', '8bit' or '4bit', got 'fp8'."),
    (
        {"host_state": "8bit", "offload": "none"},
        ValueError,
        "(host_state='8bit') needs offload='params' or 'optimizer', got 'none'.",
    ),
    ({"master": "bf16"}, ValueError, "(master) must be 'fp32' or 'split', got 'bf16'."),
    (
        {"master": "split", "offload": "none"},
        ValueError,
        "(master='split') needs offload='params' or 'optimizer', got 'none'.",
    ),
    ({"shard": "half"}, ValueError, "(shard) must be 'full', 'grad_op' or 'hybrid', got 'half'."),
    ({"state_dict_type": "local"}, ValueError, "(state_dict_type) must be 'full' or 'sharded', got 'local'."),
    ({"min_params": 0}, ValueError, "(min_params) must be at least 1, got 0."),
    ({"cpu_threads": -1}, ValueError, "(cpu_threads) must be at least 1, got -1."),
    ({"data_parallel_replicate_size": 0}, ValueError, "(data_parallel_replicate_size) must be at least 1, got 0."),
    (
        {"data_parallel_replicate_size": 2},
        ValueError,
        "(data_parallel_replicate_size=2) needs shard='hybrid', got 'full'.",
    ),
    (
        {"shard": "grad_op", "reshard_after_forward": True},
        ValueError,
        "(reshard_after_forward=True) needs shard='full' or 'hybrid', got 'grad_op'.",
    ),
    (
        {"pin_memory": True, "offload": "none"},
        ValueError,
        "(pin_memory=True) needs offload='params' or 'optimizer', got 'none'.",
    ),
    (
        {"bind_to_numa_node": True, "offload": "none"},
        ValueError,
        "(bind_to_numa_node=True) needs offload='params' or 'optimizer', got 'none'.",
    ),
    (
        {"nvme_path": "/scratch", "offload": "none"},
        ValueError,
        "(nvme_path='/scratch') needs offload='params' or 'optimizer', got 'none'.",
    ),
    ({"timeout": 0}, ValueError, "(timeout) must be at least 1, got 0."),
    ({"timeout": True}, TypeError, "(timeout) must be seconds, or a timedelta, got True of type bool."),
    ({"timeout": "10"}, TypeError, "(timeout) must be seconds, or a timedelta, got '10' of type str."),
]
FLAGS = [
    *("narrow_transfers", "async_save", "verify", "init_on_meta"),
    *("pin_memory", "reshard_after_forward", "bind_to_numa_node"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), WRONG, ids=[str(case[0]) for case in WRONG])
def test_a_wrong_argument_is_refused_in_one_sentence(arguments, kind, message):
    with pytest.raises(kind, match=f"^{re.escape('FSDPOffloadStrategy' + message)}$"):
        FSDPOffloadStrategy(**arguments)


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_is_true_or_false(flag):
    with pytest.raises(TypeError, match=rf"^FSDPOffloadStrategy\({flag}\) must be "):
        FSDPOffloadStrategy(**{flag: "yes"})


def test_layers_stay_whole_after_the_forward_where_only_gradients_are_sharded():
    assert FSDPOffloadStrategy().arguments.reshard_after_forward
    assert not FSDPOffloadStrategy(shard="grad_op").arguments.reshard_after_forward
    assert not FSDPOffloadStrategy(reshard_after_forward=False).arguments.reshard_after_forward


def test_seconds_and_names_of_folders_are_understood():
    arguments = FSDPOffloadStrategy(timeout=1.5, nvme_path="scratch").arguments
    assert arguments.timeout == timedelta(seconds=1.5)
    assert arguments.nvme_path == Path("scratch")
    assert FSDPOffloadStrategy().arguments.timeout == timedelta(minutes=10)


@pytest.mark.parametrize(
    "given",
    [{}, {"offload": "optimizer", "shard": "grad_op"}, {"offload": "none"}, {"device_bytes": "8GiB", "timeout": 3}],
)
def test_a_strategy_made_again_has_the_same_arguments(given):
    strategy = FSDPOffloadStrategy(**given)
    assert strategy.make_again().arguments == strategy.arguments
