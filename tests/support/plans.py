"""Plans made by hand, small enough to be worked out."""

from lightning_vram.estimation.step_time import StepTime
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.units import GIB, MIB
from lightning_vram.planner.scheme import Exactness, Found, Measured, Part, Scheme
from lightning_vram.report.plan import ShownPlan

FUSION = Part("lightning_vram.InPlaceFusion", note="recomputes cheap operators in the backward")
OFFLOAD = Part("lightning_vram.ActivationOffload")
CHECKPOINTING = Part("lightning_vram.ActivationCheckpointing")
IN_PARTS = Part("lightning_vram.MicroBatching", {"size": 2}, exactness=Exactness.LOSSLESS)


def checkpointing(budget: str) -> Part:
    return Part("lightning_vram.ActivationCheckpointing", {"budget": budget}, note="recomputes layers in the backward")


def measured(*parts: Part, mib: int, ms: int) -> Measured:
    return Measured(Scheme(parts), mib * MIB, 0, StepTime(ms / 1000))


def tried() -> tuple[Measured, ...]:
    """Of a step of 4000 MiB and 100 ms."""
    return (
        measured(mib=4000, ms=100),
        measured(CHECKPOINTING, mib=1000, ms=135),
        measured(checkpointing("900MiB"), mib=1985, ms=121),
        measured(checkpointing("905MiB"), mib=1990, ms=120),
        measured(FUSION, mib=3000, ms=110),
        measured(FUSION, CHECKPOINTING, mib=1100, ms=140),
        measured(FUSION, checkpointing("950MiB"), mib=2040, ms=115),
        measured(OFFLOAD, mib=1500, ms=150),
        measured(IN_PARTS, mib=700, ms=180),
    )


def plan_of(found: tuple[Measured, ...] | None = None, budget_bytes: int = 2 * GIB, name: str = "H100") -> ShownPlan:
    found = found or tried()
    plain = found[0]
    fitting = [one for one in found if one.needed_bytes <= budget_bytes]
    best = plain if plain in fitting else min(fitting, key=lambda one: one.seconds)
    return ShownPlan(DeviceSpec(name, 80 * GIB), budget_bytes, Found(best, plain, found))
