"""What decides how much a compiled forward keeps for its backward.

* ``torch._functorch.config.patch``: set several settings until they are put back | 2.11 - | nothing works
* ``torch._functorch.config.activation_memory_budget``: share of 0 to 1 of what the partitioner would keep | 2.11 - |
  a budget for compiled layers is refused: it has no effect
* ``torch._functorch.config.joint_custom_pass``: is shown forward and backward before they are cut apart | 2.11 - |
  random numbers are drawn anew where they are recomputed, and gradients are wrong (see below)
* ``torch._inductor.config.joint_custom_post_pass``: the same after inductor put its random operators in | 2.11 - | as
  without ``joint_custom_pass``, with inductor
* ``torch._functorch.config.enable_autograd_cache``: graphs that were cut apart before are used again | 2.11 - | a graph
  that was compiled without the pass may be found on disk
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._functorch import config
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import CheckpointPolicy

LEAST_SHARE = 1e-6
"""At 0 the partitioner keeps its inputs without a look at what must be kept."""


@contextmanager
def activation_share(share: float) -> Iterator[None]:
    """Let what is compiled inside keep ``share`` of what it would keep for the backward, from LEAST_SHARE to 1.

    Random results are always kept; of inductor's, their seeds. By itself the partitioner recomputes them at small
    shares and draws other numbers: the backward has another dropout mask than the forward (seen in 2.11, 2.13 and 2.15
    with ``aot_eager``, in 2.13 with ``inductor``).
    """
    partitioner = {
        "activation_memory_budget": share,
        "joint_custom_pass": _KeepRandom(config.joint_custom_pass),
        "enable_autograd_cache": False,
    }
    inductor = {"joint_custom_post_pass": _KeepRandom(inductor_config.joint_custom_post_pass)}
    with config.patch(partitioner), inductor_config.patch(inductor):
        yield


class _KeepRandom:
    """Marks random results to be kept, after the passes that somebody else had set."""

    def __init__(self, others: Any) -> None:
        self._others = others if isinstance(others, list | tuple) else [others] * (others is not None)

    def __call__(self, joint: Any, *inputs: Any) -> Any:
        for other in self._others:
            joint = other(joint, *inputs) or joint
        graph = joint if isinstance(joint, fx.Graph) else joint.graph
        for node in graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        return joint
