"""How somebody else steps in the place of an optimizer; the other rooms share it.

May import: techniques, core, memory.
"""

from lightning_vram.optimizers.stepping.shadow import OptimizerShadow
from lightning_vram.optimizers.stepping.sharded_steps import explain_failures
from lightning_vram.optimizers.stepping.state_dtypes import convert_states, full_sized, refill_accumulators
from lightning_vram.optimizers.stepping.step_round import Member, State, StepRound, local_part, publish_state
from lightning_vram.optimizers.stepping.steppable import STEPPABLE, iterate_parameters, plain_step, why_not_steppable
from lightning_vram.optimizers.stepping.stray_steps import Step, redirect_steps
from lightning_vram.optimizers.stepping.whole_steps import WholeSteps

__all__ = [
    "STEPPABLE",
    "Member",
    "OptimizerShadow",
    "State",
    "Step",
    "StepRound",
    "WholeSteps",
    "convert_states",
    "explain_failures",
    "full_sized",
    "iterate_parameters",
    "local_part",
    "plain_step",
    "publish_state",
    "redirect_steps",
    "refill_accumulators",
    "why_not_steppable",
]
