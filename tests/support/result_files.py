"""Small files of results, made by hand."""

import json

MACHINE = {
    **{"device": "x86_64, 1 threads", "driver": None, "cuda": None},
    **{"python": "3.11.7", "torch": "2.13.0+cpu", "lightning": "2.6.6"},
}
MIB = 2**20


def way(variant, by, peak_mib, ratio, **fields):
    """A row of the suite ``speed``; plain takes half a second."""
    row = {"workload": "GPT", "variant": variant, "by": by, "peak_bytes": peak_mib * MIB}
    times = {"seconds_per_step": 0.5 * ratio, "seconds_of_first": ratio}
    return {**row, **times, "seconds_of_first_low": ratio - 0.05, "seconds_of_first_high": ratio + 0.1, **fields}


def failed(variant, by, error, **fields):
    return {"workload": "GPT", "variant": variant, "by": by, "error": error, **fields}


SPEED = [
    way("plain", "plain", 400, 1.0),
    way("ActivationCheckpointing()", "ours", 100, 1.25, all_seconds_per_step=[[1, 2]]),
    way("InPlaceFusion()", "ours", 300, 1.125),
    way("torch.utils.checkpoint", "PyTorch", 120, 1.5),
    failed("OffloadActivations()", "torchtune", "not installed: pip install torchtune", traceback=["a", "b"]),
]


def biggest(variant, by, largest, what="batch size"):
    figures = {"what": what, "largest": largest, "budget_bytes": 300 * MIB, "peak_bytes": 290 * MIB}
    return {"workload": "GPT", "variant": variant, "by": by, **figures}


def write(path, rows, suite="speed", **machine):
    path.write_text(json.dumps({"suite": suite, "date": "2026-11-24", "machine": {**MACHINE, **machine}, "rows": rows}))
    return path
