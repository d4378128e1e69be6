from lightning_vram.planner.parts import Part
from lightning_vram.planner.remedies import CHECKPOINTING, OFFLOAD
from lightning_vram.planner.single_remedies import as_code

LEAN = Part("lightning_vram.LeanMixedPrecision", {"precision": "bf16"}, place="plugins", replaces=("precision",))
SHARDED = Part("lightning_vram.FSDPOffloadStrategy", {"offload": "params"}, place="strategy")


def test_code_can_be_pasted():
    assert as_code([CHECKPOINTING, OFFLOAD]) == "callbacks=[ActivationCheckpointing(), ActivationOffload()]"
    assert as_code([LEAN]) == "precision=None, plugins=[LeanMixedPrecision(precision='bf16')]"
    assert as_code([SHARDED]) == "strategy=FSDPOffloadStrategy(offload='params')"
