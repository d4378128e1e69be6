"""What optimizers take of memory and time: the same loop with another ``make_optimizer``, and ours in a Trainer."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.optim import AdamW

from lightning_vram import FSDPOffloadStrategy, LeanMixedPrecision, LowBitOptimizer, MomentsInBF16, OptimizerInBackward
from lightning_vram.optimizers.bf16_weights import SCHEMES
from tests.benchmarks.cases import Workload
from tests.benchmarks.compare import Options, measure_ways
from tests.benchmarks.measure import Row
from tests.benchmarks.peers import bitsandbytes, torchao
from tests.benchmarks.peers.installed import needs
from tests.benchmarks.ways import PLAIN, Way

SETTINGS: dict[str, Any] = {"repeats": 5, "steps": 5}
QUICK: dict[str, Any] = {"repeats": 1, "steps": 2}


def _lean(parameters: Any, workload: Workload) -> dict[str, Any]:
    return {"plugins": [LeanMixedPrecision("bf16", parameters=parameters)]}


def _narrow_moments(workload: Workload) -> dict[str, Any]:
    return {"callbacks": [MomentsInBF16()], "precision": "bf16-mixed"}


def _low_bit(bits: Any, library: Any, workload: Workload) -> dict[str, Any]:
    return {"callbacks": [LowBitOptimizer(bits, library)], "precision": "bf16-mixed"}


def _on_host(workload: Workload) -> dict[str, Any]:
    return {"strategy": FSDPOffloadStrategy(offload="optimizer", min_params=10_000)}


def _in_backward(workload: Workload) -> dict[str, Any]:
    return {"callbacks": [OptimizerInBackward()], "precision": "bf16-mixed"}


def _two_passes(workload: Workload) -> dict[str, Any]:
    return {"callbacks": [OptimizerInBackward("two-pass")], "gradient_clip_val": 1.0, "precision": "bf16-mixed"}


def _wants_gpu(device: torch.device) -> str | None:
    return "needs a GPU: on a CPU the host is the device" if device.type == "cpu" else None


WAYS = (
    PLAIN,
    Way('precision="bf16-mixed"', "plain", make_trainer_options=lambda workload: {"precision": "bf16-mixed"}),
    Way("AdamW(foreach=True)", "PyTorch", make_optimizer=partial(AdamW, lr=1e-4, foreach=True)),
    Way("AdamW(foreach=False)", "PyTorch", make_optimizer=partial(AdamW, lr=1e-4, foreach=False)),
    Way("AdamW(fused=True)", "PyTorch", make_optimizer=partial(AdamW, lr=1e-4, fused=True)),
    *(
        Way(f'LeanMixedPrecision("bf16", parameters="{scheme}")', "ours", make_trainer_options=partial(_lean, scheme))
        for scheme in SCHEMES
    ),
    Way('MomentsInBF16(), precision="bf16-mixed"', "ours", make_trainer_options=_narrow_moments),
    *(
        Way(
            f'LowBitOptimizer(bits={bits}), precision="bf16-mixed"',
            "ours",
            make_trainer_options=partial(_low_bit, bits, "own"),
        )
        for bits in (8, 4)
    ),
    *(
        Way(
            f'LowBitOptimizer(bits={bits}, library="{peer.PIP}"), precision="bf16-mixed"',
            "ours",
            make_trainer_options=partial(_low_bit, bits, peer.PIP),
            why_not=needs(peer.MODULE, peer.PIP),
            pip=peer.PIP,
        )
        for bits, peer in ((8, torchao), (4, torchao), (8, bitsandbytes))
    ),
    Way('OptimizerInBackward(), precision="bf16-mixed"', "ours", make_trainer_options=_in_backward),
    Way('OptimizerInBackward("two-pass"), clipped, precision="bf16-mixed"', "ours", make_trainer_options=_two_passes),
    Way('FSDPOffloadStrategy(offload="optimizer")', "ours", make_trainer_options=_on_host, why_not=_wants_gpu),
)


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each workload and optimizer."""
    for workload in options.workloads():
        yield from measure_ways(workload, options.choose("optimizers", WAYS), options.device, **options.turns)
