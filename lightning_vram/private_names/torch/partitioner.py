"""What decides how much a compiled forward keeps for its backward."""

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
