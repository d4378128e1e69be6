"""What the precision plugin saves and costs beside Lightning's, of the same format, in a Trainer.

``--fake`` tracks shapes of GPU size on fake tensors: one step in bf16 without dropout, so that attention keeps no
probabilities, as on a GPU.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from lightning_vram import LeanMixedPrecision, track_memory
from lightning_vram.demos import ByteGPT
from lightning_vram.optimizers.bf16_weights import SCHEMES, LeanParameters
from lightning_vram.techniques.mixed_precision.module_precision import keep_norms_low
from lightning_vram.techniques.mixed_precision.weight_casts import WeightCasts
from tests.benchmarks.cases import Workload
from tests.benchmarks.compare import Options, measure_ways
from tests.benchmarks.measure import Row, describe_timeline
from tests.benchmarks.ways import Way

SETTINGS: dict[str, Any] = {"repeats": 3, "steps": 9, "fake": False, "layers": 48}
QUICK: dict[str, Any] = {"repeats": 1, "steps": 2, "layers": 2}
RECAST = {"recast_in_backward": True}
NORMS = {"low_precision_norms": True}


def make_ways(workload: Workload, device: torch.device) -> Iterator[list[Way]]:
    """Yield the ways of each format; the first is Lightning's plugin."""
    norms = NORMS if "GPT" in workload.name else {}  # elsewhere there are batch norms only
    yield [
        _lightning("bf16-mixed", device),
        _ours("bf16"),
        _ours("bf16", **RECAST),
        *([_ours("bf16", **RECAST, **norms)] if norms else []),
        *(_ours("bf16", parameters=parameters, **norms) for parameters in SCHEMES),
    ]
    if device.type == "cuda":  # float16 on a CPU is for tests
        yield [_lightning("16-mixed", device), _ours("fp16"), _ours("fp16", **RECAST, **norms)]


def _lightning(precision: Any, device: torch.device) -> Way:
    def make(workload: Workload) -> dict[str, Any]:
        return {"plugins": [MixedPrecision(precision, device.type)]}

    return Way(f'precision="{precision}"', "plain", make_trainer_options=make)


def _ours(precision: Any, **arguments: Any) -> Way:
    make = partial(LeanMixedPrecision, precision, **arguments)
    return Way(_name_of(precision, **arguments), "ours", make_trainer_options=lambda workload: {"plugins": [make()]})


def _name_of(*values: str, **arguments: Any) -> str:
    texts = [f'"{value}"' for value in values]
    texts += [f"{name}={value}" if value is True else f'{name}="{value}"' for name, value in arguments.items()]
    return f"LeanMixedPrecision({', '.join(texts)})"


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each workload and plugin."""
    if options["fake"]:
        yield from measure_fake(options["layers"])
        return
    for workload in options.workloads():
        for ways in make_ways(workload, options.device):
            yield from measure_ways(workload, options.choose("precision", ways), options.device, **options.turns)


def measure_fake(num_layers: int = 48) -> list[Row]:
    """Return a row for each combination of what the plugin does."""
    variants: list[Row] = [{}, {"recast": True}, {"recast": True, "norms": True}]
    variants += [{"norms": True, "parameters": parameters} for parameters in SCHEMES]
    rows = [track_fake(num_layers, **variant) for variant in variants]
    return [{**row, "peak_of_first": row["peak_bytes"] / rows[0]["peak_bytes"]} for row in rows]


def track_fake(num_layers: int, *, recast: bool = False, norms: bool = False, parameters: str = "fp32") -> Row:
    """GPT-2 XL over bytes, T 1024, B 4: what the plugin does to the module, without a Trainer."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = ByteGPT(num_layers, 1600, 25, 1024, dropout=0.0)
        tokens = torch.randint(256, (4, 1025))
        if norms:
            keep_norms_low(model, "cpu")
        if recast:
            WeightCasts(model, "cpu")
        kept = {p for part in model.modules() if isinstance(part, torch.nn.LayerNorm) for p in part.parameters()}
        lean = [p for p in model.parameters() if p not in kept] if parameters != "fp32" else []
        lean_parameters = LeanParameters(lean, parameters if lean else "bf16+split")
        optimizer = torch.optim.AdamW(model.parameters())
        lean_parameters.attach([optimizer])

        def step() -> None:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with track_memory(model, optimizers=[optimizer], inputs=tokens) as tracker:
            step()
    given = {"parameters": parameters} if lean else {}
    return {
        "workload": "ByteGPT GPT-2 XL body, T 1024, B 4, fake tensors",
        "variant": _name_of("bf16", **given, **RECAST if recast else {}, **NORMS if norms else {}),
        "by": "ours",
        **describe_timeline(tracker.timeline),
    }
