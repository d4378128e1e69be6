"""DeepSpeed through Lightning's strategy: ZeRO-Offload, and SuperOffload, as DeepSpeed's pages configure them."""

from typing import Any

import torch
from lightning.pytorch.strategies import DeepSpeedStrategy

from tests.benchmarks.cases import Workload
from tests.benchmarks.peers.installed import needs
from tests.benchmarks.peers.pytorch import CHECKPOINT
from tests.benchmarks.ways import Way

PIP = "'deepspeed>=0.18'"


def _config(stage: int, offload: dict[str, Any], workload: Workload) -> dict[str, Any]:
    strategy = DeepSpeedStrategy(
        config={
            "train_micro_batch_size_per_gpu": 1,  # of what Lightning hands over: one batch
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,  # the optimizer is the workload's
            "zero_optimization": {"stage": stage, "overlap_comm": True, "offload_optimizer": offload},
        }
    )
    return {"strategy": strategy, **({"precision": "bf16-mixed"} if workload.autocast == torch.bfloat16 else {})}


def _zero_offload(workload: Workload) -> dict[str, Any]:
    return _config(2, {"device": "cpu", "pin_memory": True}, workload)


def _super_offload(workload: Workload) -> dict[str, Any]:
    offload = {"device": "cpu", "pin_memory": True, "ratio": 0.9, "super_offload": True, "cpuadam_cores_perc": 0.9}
    return _config(3, offload, workload)


_why_not = needs("deepspeed", PIP)
OFFLOAD = (
    Way("ZeRO-Offload, stage 2", "DeepSpeed", make_trainer_options=_zero_offload, why_not=_why_not, pip=PIP),
    Way(
        "ZeRO-Offload, stage 2, checkpointed",
        "DeepSpeed",
        CHECKPOINT.change,
        make_trainer_options=_zero_offload,
        why_not=_why_not,
        pip=PIP,
    ),
    Way(
        "SuperOffload, checkpointed",
        "DeepSpeed",
        CHECKPOINT.change,
        make_trainer_options=_super_offload,
        why_not=_why_not,
        pip=PIP,
    ),
)
