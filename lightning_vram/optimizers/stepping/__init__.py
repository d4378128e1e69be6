"""How somebody else steps in the place of an optimizer; the other rooms share it.

May import: techniques, core, memory.
"""

from lightning_vram.optimizers.stepping.foreign_steps import WholeSteps, can_step_wholes, explain_failures
from lightning_vram.optimizers.stepping.state_dtypes import convert_states, full_sized, refill_accumulators
from lightning_vram.optimizers.stepping.step_round import (
    Member,
    State,
    StepRound,
    as_sharded,
    list_tensors,
    make_stand_in,
    publish_state,
)
from lightning_vram.optimizers.stepping.steppable import (
    STEPPABLE,
    iterate_parameters,
    make_twin,
    plain_step,
    refuse_optimizer,
    steps_like,
    why_not_steppable,
)
from lightning_vram.optimizers.stepping.take_over import StepTakeOver

__all__ = [
    "STEPPABLE",
    "Member",
    "State",
    "StepRound",
    "StepTakeOver",
    "WholeSteps",
    "as_sharded",
    "can_step_wholes",
    "convert_states",
    "explain_failures",
    "full_sized",
    "iterate_parameters",
    "list_tensors",
    "make_stand_in",
    "make_twin",
    "plain_step",
    "publish_state",
    "refill_accumulators",
    "refuse_optimizer",
    "steps_like",
    "why_not_steppable",
]
