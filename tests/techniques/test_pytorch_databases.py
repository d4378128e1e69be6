"""Every operator and module that PyTorch tests itself: outputs and gradients inside of each stage, to the bit."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from support.database_samples import Program, module_programs, operator_programs
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_vram import track_memory
from lightning_vram.techniques.activation_compression.stage import CompressionStage
from lightning_vram.techniques.activation_offload.stage import ActivationOffloading
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation

pytest.importorskip("expecttest", reason="PyTorch's databases import it: pip install expecttest")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # samples try what is deprecated, too
]

PARTS = [
    *(pytest.param(operator_programs, part, 24, id=f"operators {part}") for part in range(24)),
    *(pytest.param(module_programs, part, 4, id=f"modules {part}") for part in range(4)),
]
NOT_THE_SAME_TWICE = {
    *("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"),  # memory as it is
    "linalg.lstsq",  # some of its results are memory as it is, too
}
"""Plain runs of them differ, if not in each try."""


def offloading() -> Any:
    return ActivationOffloading(min_offload_bytes=1, window_bytes=0)


def compression() -> Any:
    return CompressionStage(min_bytes=1)


def recomputation() -> Any:
    return Recomputation(min_bytes=1)


def replay() -> Any:
    return Recomputation(min_bytes=1, dropout="replay")


STAGES: dict[str, list[Callable[[], Any]]] = {
    "offloaded": [offloading],
    "compressed": [compression],
    "recomputed": [recomputation],
    "drawn again": [replay],
    "tracked": [track_memory],
    "all": [offloading, compression, recomputation],
}


def differentiable(output: Any) -> list[Tensor]:
    tensors = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad]
    return [x for x in tensors if x.is_floating_point() or x.is_complex()]


def run(program: Program, stages: list[Callable[[], Any]]) -> list[Tensor | None] | type[Exception]:
    """Return outputs and gradients, or the class of the error that it ends with."""
    torch.manual_seed(1)
    arguments = program.make()
    leaves = program.find_leaves(arguments)
    try:
        with ExitStack() as stack:
            for make in stages:
                stack.enter_context(make())
            output = program.call(arguments)
            outputs = differentiable(output)
        torch.manual_seed(2)
        seeds = [torch.randn_like(x) for x in outputs]
        gradients = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True) if outputs and leaves else ()
    except Exception as error:
        return type(error)
    everything = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
    return [*(x.detach() for x in everything), *(x.detach() if x is not None else None for x in gradients)]


def is_same(one: Any, other: Any) -> bool:
    if not isinstance(one, list) or not isinstance(other, list):
        return one is other
    return len(one) == len(other) and all(map(has_same_bits, one, other))


def has_same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
        return False
    if one.layout is not torch.strided:
        one, other = one.to_dense(), other.to_dense()
    return bool(((one == other) | ((one != one) & (other != other))).all())


@pytest.mark.parametrize(("programs", "part", "num_parts"), PARTS)
def test_stages_change_no_bit(programs: Callable[..., Iterator[Program]], part: int, num_parts: int) -> None:
    different = set()
    for program in programs(part, num_parts):
        plain = run(program, [])
        if program.name.partition(" ")[0] in NOT_THE_SAME_TWICE or not is_same(plain, run(program, [])):
            continue
        different |= {(program.name, way) for way, stages in STAGES.items() if not is_same(run(program, stages), plain)}
    assert different == set()
