"""Search for the fastest configuration that fits: which features, and how many activations to save.

Each candidate is measured by whole steps on fake tensors, which take seconds. So the search goes from cheap to
expensive, and skips candidates that cannot be faster than the best, or cannot fit. Activation budgets and micro-batch
sizes are one number each, and memory is nearly linear in it: a few steps find the largest that fits.

*Free* features take no time. *States* are schemes for weights, gradients and optimizer state. *Singles* and the flags
are for activations, and are tried on top of each scheme. Nothing is added to a kind that the user's own Trainer has.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_vram.estimation.fake_trainer import as_list
from lightning_vram.memory.units import MIB, format_argument, parse_bytes
from lightning_vram.planner import scheme as schemes
from lightning_vram.private_names.dispatcher import is_compiled
from lightning_vram.private_names.lightning import ddp_arguments, is_plain_ddp

EXACT, LOSSLESS, ANY = schemes.Exactness


def _part(
    name: str, note: str, exactness: schemes.Exactness = EXACT, place: schemes.Place = "callbacks", **init_args: Any
) -> schemes.Part:
    return schemes.Part(f"lightning_vram.{name}", init_args, place, exactness, note)


EARLY_RELEASE = _part("EarlyRelease", "frees gradients before the next forward, not after it")
CHUNKED_LOSS = _part("ChunkedLoss", "computes logits and loss in chunks of tokens", LOSSLESS)
IN_BACKWARD = _part("OptimizerInBackward", "updates each parameter in the backward, and frees its gradient")
CHECKPOINTING = _part("ActivationCheckpointing", "recomputes layers in the backward")
TOKEN_TILING = _part(
    "TokenTiling", "runs MLPs on a tile of tokens at a time, and recomputes each in the backward", LOSSLESS
)
FUSION = _part("InPlaceFusion", "recomputes cheap operators in the backward")
OFFLOAD = _part("ActivationOffload", "moves saved activations to the host")
COMPRESSION = _part("ActivationCompression", "rounds saved activations to 8 bits", ANY, lossy="int8")
IN_PARTS = _part("MicroBatching", "splits batches into micro-batches", LOSSLESS)
# lossless: kernels of the host round differently
OPTIMIZER_ON_HOST, WEIGHTS_ON_HOST = (
    _part("FSDPOffloadStrategy", f"keeps {what} and its state on the host", LOSSLESS, "strategy", offload=offload)
    for offload, what in (("optimizer", "the optimizer"), ("params", "weights, the optimizer"))
)
LOW_BIT, LOWER_BIT = (
    _part("LowBitOptimizer", f"stores optimizer moments in {bits} bits", ANY, bits=bits) for bits in (8, 4)
)
QUANTIZED = tuple(
    _part("QuantizeFrozenWeights", f"quantizes frozen weights to {bits} bits", ANY, bits=bits) for bits in (8, 4)
)
MOMENTS = _part("MomentsInBF16", "stores optimizer moments in bfloat16", ANY)
_FORMATS = {"bf16-mixed": "bf16", "16-mixed": "fp16"}


@dataclass(frozen=True)
class Remedies:
    """Features to try."""

    states: tuple[schemes.Scheme, ...]  # the first one is empty; parts that a run refuses are left out of later ones
    singles: tuple[schemes.Part, ...] = ()  # for activations, without a number to choose
    checkpoints: bool = True  # activation checkpointing
    budgets: bool = True  # of bytes for checkpointed layers: refused where they are compiled
    offloads: bool = False  # saved activations of checkpointed layers may go to the host
    cuts: bool = False  # micro-batches
    tiles: bool = False  # MLPs in tiles of tokens
    free: tuple[schemes.Part, ...] = ()  # take no time


def remedies_for(
    own: Mapping[str, Any],
    level: schemes.Exactness,
    *,
    may_offload: bool,
    module: nn.Module | None = None,
    has_strategies: bool = True,
    knows_host: bool = False,
) -> Remedies:
    """Return the features that suit a run; ``may_offload``: to the host; ``knows_host``: host memory is limited."""
    features = [*as_list(own.get("callbacks")), *as_list(own.get("plugins"))]
    taken = {base.__name__ for one in features for base in type(one).__mro__}

    def suits(part: schemes.Part) -> bool:
        return part.name not in taken and part.exactness <= level

    states = [schemes.Scheme()]
    if may_offload and has_strategies and has_plain_strategy(own) and level >= OPTIMIZER_ON_HOST.exactness:
        for part in (OPTIMIZER_ON_HOST, WEIGHTS_ON_HOST):
            states += [schemes.Scheme((one,)) for one in (part, *(leaner_on_host(part, own) if knows_host else ()))]
    lean = _precision_parts(own) if "LeanMixedPrecision" not in taken and not own.get("plugins") else []
    lean_states = [schemes.Scheme((part,)) for part in lean]
    if not taken & {MOMENTS.name, LOW_BIT.name}:
        lean_states[1:1] = [schemes.Scheme((MOMENTS,)), *(schemes.Scheme((part, MOMENTS)) for part in lean[:1])]
        lean_states += [
            schemes.Scheme((LOW_BIT,)),
            schemes.Scheme((IN_BACKWARD, LOW_BIT)),
            schemes.Scheme((IN_BACKWARD, LOWER_BIT)),
        ]
    parameters = [] if module is None else list(module.parameters())
    if 2 * sum(one.numel() for one in parameters if not one.requires_grad) > sum(one.numel() for one in parameters):
        lean_states = [*(schemes.Scheme((part,)) for part in QUANTIZED), *lean_states]
    states[1:1] = [schemes.Scheme((IN_BACKWARD,)), *lean_states]
    states = [scheme for scheme in states if scheme.exactness <= level]
    has_checkpoints = CHECKPOINTING.name in taken
    return Remedies(
        states=tuple(states),
        singles=tuple(filter(suits, (FUSION, OFFLOAD, COMPRESSION) if may_offload else (FUSION, COMPRESSION))),
        checkpoints=not has_checkpoints,
        budgets=module is None or not is_compiled(module),  # traces run uncompiled, and would not refuse
        offloads=may_offload and not has_checkpoints and OFFLOAD.name not in taken,
        cuts=suits(IN_PARTS),
        tiles=suits(TOKEN_TILING),
        free=tuple(filter(suits, (EARLY_RELEASE, CHUNKED_LOSS))),
    )


DDP = "lightning.pytorch.strategies.DDPStrategy"
_IS_INTERACTIVE = hasattr(sys, "ps1") or bool(sys.flags.interactive)


def bucket_views(own: Mapping[str, Any], num_ranks: int) -> list[schemes.Part]:
    """Return DDP with its arguments and gradients as views of its buckets; nothing if that is set, or not DDP."""
    strategy = own.get("strategy")
    arguments: Mapping[str, Any] | None = None
    if has_plain_strategy(own) and (strategy == "ddp" or not _IS_INTERACTIVE):  # where Lightning would start others
        arguments = {} if num_ranks > 1 else None
    elif strategy == "ddp_find_unused_parameters_true":
        arguments = {"find_unused_parameters": True}
    elif is_plain_ddp(strategy):
        given = ddp_arguments(cast(DDPStrategy, strategy))
        defaults = inspect.signature(DistributedDataParallel).parameters
        arguments = {name: value for name, value in given.items() if value != defaults[name].default}
    is_plain = arguments is not None and all(isinstance(value, bool | int | float) for value in arguments.values())
    if arguments is None or not is_plain or arguments.keys() & {"gradient_as_bucket_view", "static_graph"}:
        return []
    if (own.get("accumulate_grad_batches") or 1) > 1:  # a backward without reduction leaves gradients out of buckets
        return []
    # A copy into a bucket multiplies gradients by the reciprocal of the number of ranks; a view is divided by it.
    exactness = EXACT if num_ranks & (num_ranks - 1) == 0 else LOSSLESS
    note = "stores gradients in DDP's buckets only, not a second time"
    return [schemes.Part(DDP, {**arguments, "gradient_as_bucket_view": True}, "strategy", exactness, note)]


def may_be_guarded(names: Iterable[str]) -> bool:
    """Whether a step with these features can be repeated after OOM.

    ``MicroBatching`` does so itself; with ``OptimizerInBackward`` some parameters have been stepped by then.
    """
    return {IN_PARTS.name, IN_BACKWARD.name}.isdisjoint(names)


def has_plain_strategy(own: Mapping[str, Any]) -> bool:
    """Whether a Trainer has the default strategy."""
    return own.get("strategy") in (None, "auto", "ddp")


def leaner_on_host(part: schemes.Part, own: Mapping[str, Any]) -> list[schemes.Part]:
    """Return variants of a strategy that need ever less host memory."""
    can_split = str(own.get("precision")) == "bf16-mixed"
    note = part.note + ", weights split into a bfloat16 half and a 16-bit remainder" * can_split
    arguments = {**part.init_args, **({"master": "split"} if can_split else {})}
    variants = [replace(part, init_args=arguments, note=note)] if can_split else []
    for form, words in (("bf16", "bfloat16"), ("8bit", "8 bits")):
        more = {**arguments, "host_state": form}
        variants.append(
            replace(part, init_args=more, exactness=schemes.Exactness.ANY, note=f"{note}, moments in {words}")
        )
    return variants


def mode_of(scheme: schemes.Scheme) -> Mapping[str, Any] | None:
    """Return the arguments of a strategy that decide its device memory; ``None``: no strategy."""
    for part in scheme.parts:
        if part.place == "strategy" and part.class_path != DDP:
            return {name: value for name, value in part.init_args.items() if name not in ("master", "host_state")}
    return None


def _precision_parts(own: Mapping[str, Any]) -> list[schemes.Part]:
    """Return plugins that replace the precision."""
    format_name = _FORMATS.get(str(own.get("precision")))
    if format_name is None:
        return []
    arguments = {"precision": format_name, "recast_in_backward": True}
    parts = [
        _part("LeanMixedPrecision", "saves no 16-bit copies of weights for backward", EXACT, "plugins", **arguments)
    ]
    if format_name == "bf16":
        note = "stores weights and optimizer state in bfloat16, with a Kahan remainder for the weights"
        parts.append(_part("LeanMixedPrecision", note, ANY, "plugins", **arguments, parameters="bf16+kahan"))
    return [replace(part, replaces=("precision",)) for part in parts]


_ROUNDS = 4  # to find one number
_CLOSE = 0.01  # unused share of the budget
_LITTLE = 0.005  # share of the step's memory
_AS_FAST = 1.01  # within this factor, fewer parts win


def search(measure: schemes.Measure, workload: schemes.Workload, remedies: Remedies) -> schemes.Found:
    """Find the fastest scheme that fits."""
    return _Search(measure, workload, remedies).run()


def fastest(tried: Iterable[schemes.Measured], fits: Callable[[schemes.Measured], bool]) -> schemes.Measured | None:
    """Return the fastest step that fits; of those that are about as fast, one of the fewest parts."""
    fitting = [one for one in tried if fits(one)]
    best = min((one.seconds for one in fitting), default=0.0)
    close = [one for one in fitting if one.seconds <= _AS_FAST * best]
    return min(close, key=lambda one: (len(one.scheme.parts), one.seconds), default=None)


class _Search:
    def __init__(self, measure: schemes.Measure, workload: schemes.Workload, remedies: Remedies) -> None:
        self._measure, self._remedies, self._tiles = measure, remedies, remedies.tiles
        self._workload, self._fits, self._budget_bytes = workload, workload.fits, workload.budget_bytes
        self._tried: list[schemes.Measured] = []
        self._sets: list[schemes.Measured] = []  # of those, the ones about states
        self._refused: list[schemes.Part] = []

    def run(self) -> schemes.Found:
        baseline = self._run(schemes.Scheme())
        assert baseline is not None  # nothing refuses the user's own run
        if not self._fits(baseline):
            start = self._take_what_is_free(baseline)
            for wanted in self._remedies.states:
                if self._is_as_fast(baseline):
                    break
                states = schemes.Scheme(tuple(part for part in wanted.parts if part not in self._refused))
                if self._is_needless(start, states):
                    continue
                whole = self._run(_on(start, states)) if states.parts else start
                if whole is None:
                    self._refused += states.parts if len(states.parts) == 1 else ()
                    continue
                self._sets.append(whole)
                if not self._fits(whole) and self._may_win(whole, start):
                    self._try_remedies(whole, is_first=whole is start)
            if self._best() is None:
                self._find_least()
        return schemes.Found(self._best(), baseline, tuple(self._tried))

    def _run(self, scheme: schemes.Scheme) -> schemes.Measured | None:
        measured = self._measure(scheme)
        if measured is not None:
            self._tried.append(measured)
        return measured

    def _take_what_is_free(self, baseline: schemes.Measured) -> schemes.Measured:
        """Add the free features that help."""
        start = baseline
        for part in self._remedies.free:
            scheme = start.scheme
            # Gradients must not be in the old buckets when the second forward makes new ones.
            if part.class_path == DDP and EARLY_RELEASE in self._remedies.free and EARLY_RELEASE not in scheme.parts:
                scheme += EARLY_RELEASE
            leaner = self._run(scheme + part)
            if leaner is not None and leaner.needed_bytes < start.needed_bytes:
                start = leaner
            if self._fits(start):
                break
        return start

    def _is_needless(self, start: schemes.Measured, states: schemes.Scheme) -> bool:
        """Whether it was traced, or what is faster is enough: a subset of it, or a variant with more host memory."""
        mode, names = mode_of(states), {part.name for part in (*start.scheme.parts, *states.parts)}
        if any(one.scheme == _on(start, states) for one in self._sets):
            return True
        for one in self._tried:
            is_leaner_on_host = mode is not None and mode_of(one.scheme) == mode
            is_more = names.issuperset(part.name for part in one.scheme.parts)
            if (is_leaner_on_host and self._workload.fits_host(one)) or (is_more and self._fits(one)):
                return True
        return False

    def _best(self) -> schemes.Measured | None:
        return fastest(self._tried, self._fits)

    def _is_as_fast(self, whole: schemes.Measured) -> bool:
        """Whether the best is as fast as this step: there is nothing to gain."""
        best = self._best()
        return best is not None and best.seconds <= _AS_FAST * whole.seconds

    def _may_win(self, whole: schemes.Measured, baseline: schemes.Measured) -> bool:
        """Whether remedies on top of a set may beat the best: they save activations, at a cost that grows with them."""
        if whole.needed_bytes - whole.activation_bytes > self._budget_bytes or not self._workload.fits_host(whole):
            return False
        best = self._best()
        # Gradients are the peak once layers are checkpointed.
        if whole is baseline or (best is None and IN_BACKWARD in whole.scheme.parts):
            return True
        if baseline.needed_bytes - whole.needed_bytes < _LITTLE * baseline.needed_bytes:
            return False  # steps are expensive: tiny savings make nothing fit
        if best is None:
            return True
        share = (whole.needed_bytes - self._budget_bytes) / (baseline.needed_bytes - self._budget_bytes)
        return whole.seconds + share * (best.seconds - baseline.seconds) < best.seconds

    def _try_remedies(self, whole: schemes.Measured, *, is_first: bool) -> None:
        if is_first:
            for part in self._remedies.singles:
                self._run(whole.scheme + part)
            if self._is_as_fast(whole):
                return
        lean = self._try_checkpoints(whole) if self._remedies.checkpoints else None
        may_cut = self._remedies.cuts and self._workload.batch_size > 1 and IN_BACKWARD not in whole.scheme.parts
        if may_cut and not self._is_as_fast(whole):
            self._fit_parts(whole)
            if self._best() is None and lean is not None:
                self._fit_parts(lean)
        if self._tiles:
            self._try_tiles(whole if lean is None else lean, may_cut=may_cut)

    def _try_checkpoints(self, whole: schemes.Measured) -> schemes.Measured | None:
        """Try checkpointed layers that save nothing, and as much as fits; return the first."""
        lean = self._run(whole.scheme + CHECKPOINTING)
        if lean is None:
            return None
        has_budgets = self._remedies.budgets
        if has_budgets and self._fits(lean):
            self._fit_budget(whole, lean, {})
        if not self._remedies.offloads or self._is_as_fast(whole):
            return lean
        if not self._fits(lean):
            self._run(lean.scheme + OFFLOAD)
        transfer_bytes = int(self._workload.transfer_bytes_per_s * whole.seconds)
        if has_budgets and transfer_bytes >= MIB:
            arguments = {"remedies": ["recompute", "offload"], "offload_bytes": format_argument(transfer_bytes)}
            self._fit_budget(whole, lean, arguments)
        return lean

    def _try_tiles(self, lean: schemes.Measured, *, may_cut: bool) -> None:
        """Try tiled MLPs if checkpointed layers are not enough: that costs one more forward of MLPs."""
        if self._fits(lean) or self._is_as_fast(lean):
            return
        tiled = self._run(lean.scheme + TOKEN_TILING)
        self._tiles = tiled is not None and tiled.activation_bytes < lean.activation_bytes  # otherwise never again
        if tiled is None or not self._tiles or self._fits(tiled):
            return
        if self._remedies.offloads:
            self._run(tiled.scheme + OFFLOAD)
        if may_cut and self._best() is None:
            self._fit_parts(tiled)

    def _find_least(self) -> None:
        """Add parts one by one while they save memory, to report the minimum."""
        if any(one.needed_bytes <= self._budget_bytes for one in self._tried):
            return  # only the host is too small
        least = self._sets[-1]
        parts = [part for part in self._remedies.singles if part != OFFLOAD]
        parts += [CHECKPOINTING] if self._remedies.checkpoints else []
        parts += [TOKEN_TILING] if self._tiles else []
        parts += [OFFLOAD] if self._remedies.offloads or OFFLOAD in self._remedies.singles else []
        parts += [_in_parts(1)] if self._remedies.cuts and self._workload.batch_size > 1 else []
        for part in parts:
            scheme = least.scheme + part
            if part.name == IN_PARTS.name:  # gradients accumulate over a batch: EarlyRelease, not OptimizerInBackward
                free = [one for one in self._remedies.free if one == EARLY_RELEASE]
                replaced = (other for one in scheme.parts for other in (free if one == IN_BACKWARD else [one]))
                scheme = schemes.Scheme(tuple(replaced))
            leaner = schemes.find_measured(scheme, self._tried) or self._run(scheme)
            if leaner is not None and leaner.needed_bytes < least.needed_bytes:
                least = leaner

    def _fit_budget(self, whole: schemes.Measured, lean: schemes.Measured, arguments: Mapping[str, object]) -> None:
        """Find the largest activation budget that fits."""
        least = MIB if arguments else lean.activation_bytes
        saved_bytes = self._budget_bytes - (whole.needed_bytes - whole.activation_bytes)
        saved_bytes = max(least, saved_bytes, lean.activation_bytes + self._budget_bytes - lean.needed_bytes)
        too_many = math.inf  # the smallest that does not fit
        for _ in range(_ROUNDS):
            budget = format_argument(saved_bytes)
            saved_bytes = parse_bytes(budget)
            found = self._run(whole.scheme + replace(CHECKPOINTING, init_args={"budget": budget, **arguments}))
            if found is None:
                return
            left = self._budget_bytes - found.needed_bytes
            if left < 0:
                too_many = saved_bytes
            elif left <= _CLOSE * self._budget_bytes or self._is_as_fast(whole):
                return
            wanted = max(least, found.activation_bytes + left)
            if left > 0 and (wanted <= saved_bytes or wanted >= too_many):
                return
            if left < 0 and wanted >= saved_bytes:
                wanted = saved_bytes + left  # it exceeds its budget
            if left < 0 and wanted <= least:
                wanted = (least + saved_bytes) // 2  # the allocator's segments are large steps
            saved_bytes = wanted

    def _fit_parts(self, whole: schemes.Measured) -> None:
        """Find the largest micro-batch that fits."""
        batch_size = size = self._workload.batch_size
        large = whole
        small_size = -(-size // 2)
        for _ in range(_ROUNDS):
            small = self._run(whole.scheme + _in_parts(small_size))
            if small is None or small_size == 1 or large.needed_bytes <= small.needed_bytes:
                return
            if self._fits(small) and large is not whole:
                return
            slope = (large.needed_bytes - small.needed_bytes) / (size - small_size)
            fitting = small_size + (self._budget_bytes - small.needed_bytes) / slope
            num_parts = -(-batch_size // min(max(1, int(fitting)), batch_size))
            fitting_size = -(-batch_size // num_parts)  # the largest micro-batch for as many parts
            if fitting_size in (small_size, size):
                return
            size, large, small_size = small_size, small, fitting_size


def _on(start: schemes.Measured, states: schemes.Scheme) -> schemes.Scheme:
    """Put free parts before a set, without those that handle gradients if the set does."""
    has_strategy = any(part.place == "strategy" for part in states.parts)
    frees = has_strategy or IN_BACKWARD in states.parts
    kept = (part for part in start.scheme.parts if part != EARLY_RELEASE or not frees)
    return schemes.Scheme((*(part for part in kept if part.class_path != DDP or not has_strategy), *states.parts))


def _in_parts(size: int) -> schemes.Part:
    return replace(IN_PARTS, init_args={"size": size})
