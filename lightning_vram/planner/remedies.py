"""The features that a plan may combine, from the cheapest to the most expensive, and which of them suit a run.

*Free* features take no time. *States* are schemes for weights, gradients and optimizer state. *Singles* and the flags
are for activations, and are tried on top of each scheme. Nothing is added to a kind that the user's own Trainer has.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lightning_vram.estimation.fake_trainer import as_list
from lightning_vram.planner.scheme import Exactness, Part, Scheme

EARLY_RELEASE = Part("lightning_vram.EarlyRelease", note="frees gradients before the next forward, not after it")
CHUNKED_LOSS = Part(
    "lightning_vram.ChunkedLoss", exactness=Exactness.LOSSLESS, note="computes logits and loss in chunks of tokens"
)
IN_BACKWARD = Part(
    "lightning_vram.OptimizerInBackward", note="updates each parameter in the backward, and frees its gradient"
)
CHECKPOINTING = Part("lightning_vram.ActivationCheckpointing", note="recomputes layers in the backward")
TOKEN_TILING = Part(
    "lightning_vram.TokenTiling",
    exactness=Exactness.LOSSLESS,
    note="runs MLPs on a tile of tokens at a time, and recomputes each in the backward",
)
FUSION = Part("lightning_vram.InPlaceFusion", note="recomputes cheap operators in the backward")
OFFLOAD = Part("lightning_vram.ActivationOffload", note="moves saved activations to the host")
COMPRESSION = Part(
    "lightning_vram.ActivationCompression",
    {"lossy": "int8"},
    exactness=Exactness.ANY,
    note="rounds saved activations to 8 bits",
)
IN_PARTS = Part("lightning_vram.MicroBatching", exactness=Exactness.LOSSLESS, note="splits batches into micro-batches")
OPTIMIZER_ON_HOST = Part(
    "lightning_vram.FSDPOffloadStrategy",
    {"offload": "optimizer"},
    place="strategy",
    exactness=Exactness.LOSSLESS,  # kernels of the host round differently
    note="keeps the optimizer and its state on the host",
)
WEIGHTS_ON_HOST = replace(
    OPTIMIZER_ON_HOST,
    init_args={"offload": "params"},
    note="keeps weights, the optimizer and its state on the host",
)
LOW_BIT = Part(
    "lightning_vram.LowBitOptimizer", {"bits": 8}, exactness=Exactness.ANY, note="stores optimizer moments in 8 bits"
)
LOWER_BIT = replace(LOW_BIT, init_args={"bits": 4}, note="stores optimizer moments in 4 bits")
_IN_8_BITS = Part(
    "lightning_vram.QuantizeFrozenWeights",
    {"bits": 8},
    exactness=Exactness.ANY,
    note="quantizes frozen weights to 8 bits",
)
QUANTIZED = (_IN_8_BITS, replace(_IN_8_BITS, init_args={"bits": 4}, note="quantizes frozen weights to 4 bits"))
MOMENTS = Part("lightning_vram.MomentsInBF16", exactness=Exactness.ANY, note="stores optimizer moments in bfloat16")
# Strategies include or refuse these.
NOT_ON_HOST = frozenset(part.name for part in (EARLY_RELEASE, IN_BACKWARD, QUANTIZED[0]))
_FORMATS = {"bf16-mixed": "bf16", "16-mixed": "fp16"}


@dataclass(frozen=True)
class Remedies:
    """Features to try."""

    states: tuple[Scheme, ...]  # the first one is empty; parts that a run refuses are left out of later ones
    singles: tuple[Part, ...] = ()  # for activations, without a number to choose
    checkpoints: bool = True  # activation checkpointing
    offloads: bool = False  # saved activations of checkpointed layers may go to the host
    cuts: bool = False  # micro-batches
    tiles: bool = False  # MLPs in tiles of tokens
    free: tuple[Part, ...] = ()  # take no time


def remedies_for(
    own: Mapping[str, Any],
    level: Exactness,
    *,
    on_card: bool,
    module: nn.Module | None = None,
    has_strategies: bool = True,
    knows_host: bool = False,
) -> Remedies:
    """Return the features that suit a run; ``knows_host``: host memory is limited."""
    features = [*as_list(own.get("callbacks")), *as_list(own.get("plugins"))]
    taken = {base.__name__ for one in features for base in type(one).__mro__}

    def suits(part: Part) -> bool:
        return part.name not in taken and part.exactness <= level

    states = [Scheme()]
    has_choice = on_card and has_strategies and has_plain_strategy(own)
    if has_choice and level >= OPTIMIZER_ON_HOST.exactness:
        for part in (OPTIMIZER_ON_HOST, WEIGHTS_ON_HOST):
            states += [Scheme((one,)) for one in (part, *(leaner_on_host(part, own) if knows_host else ()))]
    lean = _precision_parts(own) if "LeanMixedPrecision" not in taken and not own.get("plugins") else []
    lean_states = [Scheme((part,)) for part in lean]
    if not taken & {MOMENTS.name, LOW_BIT.name}:
        lean_states[1:1] = [Scheme((MOMENTS,)), *(Scheme((part, MOMENTS)) for part in lean[:1])]
        lean_states += [Scheme((LOW_BIT,)), Scheme((IN_BACKWARD, LOW_BIT)), Scheme((IN_BACKWARD, LOWER_BIT))]
    if module is not None and _is_mostly_frozen(module):
        lean_states = [*(Scheme((part,)) for part in QUANTIZED), *lean_states]
    states[1:1] = [Scheme((IN_BACKWARD,)), *lean_states]
    states = [scheme for scheme in states if scheme.exactness <= level]
    singles = (FUSION, OFFLOAD, COMPRESSION) if on_card else (FUSION, COMPRESSION)
    has_checkpoints = CHECKPOINTING.name in taken
    return Remedies(
        states=tuple(states),
        singles=tuple(filter(suits, singles)),
        checkpoints=not has_checkpoints,
        offloads=on_card and not has_checkpoints and OFFLOAD.name not in taken,
        cuts=suits(IN_PARTS),
        tiles=suits(TOKEN_TILING),
        free=tuple(filter(suits, (EARLY_RELEASE, CHUNKED_LOSS))),
    )


def may_be_guarded(names: Iterable[str]) -> bool:
    """Whether a step with these features can be repeated after OOM.

    ``MicroBatching`` does so itself; with ``OptimizerInBackward`` some parameters have been stepped by then.
    """
    return {IN_PARTS.name, IN_BACKWARD.name}.isdisjoint(names)


def has_plain_strategy(own: Mapping[str, Any]) -> bool:
    """Whether a Trainer has the default strategy."""
    return own.get("strategy") in (None, "auto", "ddp")


def leaner_on_host(part: Part, own: Mapping[str, Any]) -> list[Part]:
    """Return variants of a strategy that need ever less host memory."""
    split = replace(
        part,
        init_args={**part.init_args, "master": "split"},
        note=f"{part.note}, weights split into a bfloat16 half and a 16-bit remainder",
    )
    can_split = str(own.get("precision")) == "bf16-mixed"
    base = split if can_split else part
    low_precision = [
        replace(
            base,
            init_args={**base.init_args, "host_state": form},
            exactness=Exactness.ANY,
            note=f"{base.note}, moments in {words}",
        )
        for form, words in (("bf16", "bfloat16"), ("8bit", "8 bits"))
    ]
    return [split, *low_precision] if can_split else low_precision


def mode_of(scheme: Scheme) -> Mapping[str, Any] | None:
    """Return the arguments of a strategy that decide its device memory; ``None``: no strategy."""
    for part in scheme.parts:
        if part.place == "strategy":
            return {name: value for name, value in part.init_args.items() if name not in ("master", "host_state")}
    return None


def _precision_parts(own: Mapping[str, Any]) -> list[Part]:
    """Return plugins that replace the precision."""
    format_name = _FORMATS.get(str(own.get("precision")))
    if format_name is None:
        return []
    exact = Part(
        "lightning_vram.LeanMixedPrecision",
        {"precision": format_name, "recast_in_backward": True},
        place="plugins",
        replaces=("precision",),
        note="saves no 16-bit copies of weights for backward",
    )
    rounded = replace(
        exact,
        init_args={**exact.init_args, "parameters": "bf16+kahan"},
        exactness=Exactness.ANY,
        note="stores weights and optimizer state in bfloat16, with a Kahan remainder for the weights",
    )
    return [exact, rounded] if format_name == "bf16" else [exact]


def _is_mostly_frozen(module: nn.Module) -> bool:
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    return 2 * sum(size for size, is_trained in sizes if not is_trained) > sum(size for size, _ in sizes)
