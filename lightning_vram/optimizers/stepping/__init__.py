"""How somebody else steps in the place of an optimizer; the other rooms share it.

May import: techniques, core, memory.
"""

from lightning_vram.optimizers.stepping.averaging import move_average
from lightning_vram.optimizers.stepping.foreign_steps import WholeSteps, can_step_wholes, explain_failures
from lightning_vram.optimizers.stepping.state_dtypes import convert_states, full_sized, refill_accumulators
from lightning_vram.optimizers.stepping.state_forms import (
    DIVISORS,
    FORMS,
    KINDS,
    MOMENTS,
    HostState,
    LowBitForm,
    StateForm,
    describe_unheld,
    draw_of_moment,
    find_unheld,
    first_place,
    is_narrow,
    make_seeds,
    narrow_state,
    widen_state,
    widened,
)
from lightning_vram.optimizers.stepping.step_round import (
    Member,
    State,
    StepRound,
    as_sharded,
    check_state,
    list_tensors,
    local_parts,
    make_stand_in,
    publish_state,
)
from lightning_vram.optimizers.stepping.steppable import (
    STEPPABLE,
    has_own_step,
    is_lion,
    iterate_parameters,
    make_twin,
    plain_step,
    refuse_optimizer,
    steps_like,
    why_not_steppable,
)
from lightning_vram.optimizers.stepping.take_over import MembersStep, StepTakeOver, owner_of
from lightning_vram.optimizers.stepping.update_check import UpdateCheck

__all__ = [
    "DIVISORS",
    "FORMS",
    "KINDS",
    "MOMENTS",
    "STEPPABLE",
    "HostState",
    "LowBitForm",
    "Member",
    "MembersStep",
    "State",
    "StateForm",
    "StepRound",
    "StepTakeOver",
    "UpdateCheck",
    "WholeSteps",
    "as_sharded",
    "can_step_wholes",
    "check_state",
    "convert_states",
    "describe_unheld",
    "draw_of_moment",
    "explain_failures",
    "find_unheld",
    "first_place",
    "full_sized",
    "has_own_step",
    "is_lion",
    "is_narrow",
    "iterate_parameters",
    "list_tensors",
    "local_parts",
    "make_seeds",
    "make_stand_in",
    "make_twin",
    "move_average",
    "narrow_state",
    "owner_of",
    "plain_step",
    "publish_state",
    "refill_accumulators",
    "refuse_optimizer",
    "steps_like",
    "why_not_steppable",
    "widen_state",
    "widened",
]
