"""Link batch norms to the invertible activations behind them: a pair saves one map instead of three.

The class of the norm is swapped for one that normalizes and activates, that of the activation for one that passes on
what such a norm gave it. Names, ``state_dict``, copies, pickles and the bits of the forward stay (SyncBatchNorm: up to
rounding). The gradient uses the recovered input: a pair is refused, or falls back during training, where gamma is too
small for that. In compiled code it breaks the graph. Hooks that read the norm's output see it activated.
"""

import functools
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_vram.core.hooks import is_in_backward, is_transformed
from lightning_vram.core.patching import Swaps, restore_class, swap_class
from lightning_vram.memory.device.accelerators import is_capturing
from lightning_vram.private_names.dispatcher import FakeTensor
from lightning_vram.private_names.torch import BatchNormBase, check_dimensions, is_in_forward_ad
from lightning_vram.techniques.in_place_fusion.invertible_norm import (
    InvertibleActivation,
    Normalization,
    normalize_and_activate,
    predict_inversion_error,
)
from lightning_vram.techniques.in_place_fusion.observed_links import Link

MAX_ERROR = 1e-3
MAX_ERROR_16_BIT = 2e-2  # a fresh norm (gamma 1, beta 0) has a predicted error of 3.9e-3 (bfloat16), 4.9e-4 (float16)
STATE = "_invertible_norms"  # attribute of a changed module: what its pair shares


def _check_link(name: str, link: Link, changed: Container[nn.Module]) -> None:
    """Raise ``ValueError`` if a pair is of other kinds; an activation among ``changed`` may serve several norms."""
    is_shared = link.consumer in changed
    for module in (link.producer, link.consumer):
        if STATE in vars(module) and not (is_shared and module is link.consumer):
            raise ValueError(f"{name}: {_describe(module)} is linked already. Link each norm once, to one activation.")
        if "forward" in vars(module):
            raise ValueError(
                f"{name}: forward was replaced on the instance of {_describe(module)}. Leave the pair out."
            )
    if type(link.producer).forward not in (BatchNormBase.forward, nn.SyncBatchNorm.forward):
        raise ValueError(
            f"{name}: {_describe(link.producer)} does not run as a batch norm of torch.nn. "
            "Link BatchNorm1d, BatchNorm2d, BatchNorm3d or SyncBatchNorm."
        )
    if not is_shared:
        _check_activation(name, link.consumer)


def _check_activation(name: str, consumer: nn.Module) -> None:
    way_out = "Use LeakyReLU, or leave the pair to the recomputation of InPlaceFusion, which needs no inverse."
    forward = type(consumer).forward
    if forward not in (nn.LeakyReLU.forward, nn.ELU.forward, nn.Identity.forward):
        is_cut = isinstance(consumer, (nn.ReLU, nn.ReLU6))
        reason = "it drops negative values" if is_cut else "its output does not determine its input"
        raise ValueError(f"{name}: {type(consumer).__name__} cannot be inverted: {reason}. {way_out}")
    for argument in ("negative_slope", "alpha"):
        value = getattr(consumer, argument, 1.0) if forward is not nn.Identity.forward else 1.0
        if not 0 < value < float("inf"):
            raise ValueError(f"{name}: with {argument}={value} it cannot be inverted; it must be above 0. {way_out}")


def _check_error(name: str, link: Link, dtype: torch.dtype | None, max_error: float | None) -> None:
    norm: Any = link.producer
    parameter = next((value for value in (norm.weight, norm.bias, norm.running_mean) if value is not None), None)
    dtype = dtype or (parameter.dtype if parameter is not None else torch.get_default_dtype())
    limit = limit_error(max_error, dtype)
    error = read_error(norm, dtype, read_activation(link.consumer))
    if not error <= limit:
        gamma = float(norm.weight.detach().abs().min()) if norm.weight is not None else 1.0
        raise ValueError(
            f"{name}: with gamma down to {gamma:.3g} in {str(dtype).removeprefix('torch.')}, its input is recovered "
            f"with a predicted relative error of {error:.2g}, above {limit:.2g}. Train in float32, raise max_error, or "
            "leave the pair to the recomputation of InPlaceFusion, which is exact."
        )


def limit_error(max_error: float | None, dtype: torch.dtype) -> float:
    """Return the largest predicted error that is allowed."""
    default = MAX_ERROR_16_BIT if torch.finfo(dtype).bits == 16 else MAX_ERROR
    return max_error if max_error is not None else default


def read_error(norm: Any, dtype: torch.dtype, activation: InvertibleActivation) -> float:
    """The worst channel's predicted error; zero where there are no values to read: fake tensors, graph capture."""
    parameters = [value for value in (norm.weight, norm.bias) if value is not None]
    is_abstract = any(value.is_meta or isinstance(value.data, FakeTensor) for value in parameters)
    if is_abstract or any(is_capturing(value.device) for value in parameters):
        return 0.0
    return float(predict_inversion_error(norm.weight, norm.bias, dtype, activation).max())


def read_activation(consumer: nn.Module) -> InvertibleActivation:
    """Return what a module does to the norm's result."""
    if isinstance(consumer, nn.LeakyReLU):
        return InvertibleActivation(negative_slope=consumer.negative_slope)
    return InvertibleActivation(alpha=consumer.alpha if isinstance(consumer, nn.ELU) else None)


def _describe(module: nn.Module) -> str:
    return f"{type(module).__name__}({getattr(module, 'num_features', '')})"


CHECK_EVERY_N_FORWARDS = 100  # how often a pair reads gamma and beta in training: a GPU has to wait for that


@dataclass
class _Handover:
    """Activated outputs on their way from norms to one activation."""

    under_way: list[StorageWeakRef] = field(default_factory=list)  # by storage: FSDP2 passes on an alias
    _lost: bool = False

    def give(self, output: Tensor) -> None:
        self._forget_expired()
        self.under_way.append(_refer_to(output))

    def take(self, input: Tensor) -> bool:
        if self.under_way and (storage := _refer_to(input)) in self.under_way:
            self.under_way.remove(storage)
            return True
        self._forget_expired()
        return False

    def end_step(self) -> bool:
        """Forget what is under way. Returns whether an output was given and never taken."""
        was_lost = self._lost or bool(self.under_way)
        self.under_way, self._lost = [], False
        return was_lost

    def _forget_expired(self) -> None:
        """Forget outputs that never arrived, because a forward was interrupted."""
        self._lost = self._lost or any(storage.expired() for storage in self.under_way)  # type: ignore[no-untyped-call]
        self.under_way = [storage for storage in self.under_way if not storage.expired()]  # type: ignore[no-untyped-call]


@dataclass
class _ProducerState:
    consumer: nn.Module
    handover: _Handover
    max_error: float | None
    num_forwards: int = 0
    has_fallen_back: bool = False


class InPlaceABNHandle(Swaps):
    """Counts what fell back, and undoes :func:`apply_inplace_abn`."""

    def __init__(self) -> None:
        super().__init__(STATE)
        self._states: list[_ProducerState] = []

    @property
    def num_links(self) -> int:
        """Pairs that were linked."""
        return len(self._states)

    @property
    def num_fallen_back(self) -> int:
        """Pairs that compute as the original modules do, because gamma has become too small to recover the input."""
        return sum(state.has_fallen_back for state in self._states)

    def end_step(self) -> bool:
        """Return whether, since the last call, a norm activated its output and the activation did not get it."""
        handovers = {id(state.handover): state.handover for state in self._states}
        return sum(handover.end_step() for handover in handovers.values()) > 0  # all of them are asked


def apply_inplace_abn(
    links: Iterable[Link], *, dtype: torch.dtype | None = None, max_error: float | None = None
) -> InPlaceABNHandle:
    """Let each linked norm normalize and activate in one function that saves only its output; return the undo.

    That the activation is the norm's only reader is not checked. Raises ``ValueError`` if a pair is refused; then no
    module is changed. Every 100th forward that records a gradient predicts the error again, for the dtype the norm
    really gets; a pair beyond ``max_error`` falls back for good. Processes that train the same weights decide alike.

    Args:
        links: Norms and the activations behind them; several norms may share one, which may also get other tensors.
        dtype: What the activations are computed in, for the first check. ``None``: the dtype of the norm's weights.
        max_error: Largest value of :func:`predict_inversion_error`. ``None``: 1e-3, and 2e-2 in 16 bits.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LeakyReLU(), nn.Conv2d(8, 8, 3))
        >>> handle = apply_inplace_abn([Link(model[1], model[2])])
        >>> handle.num_links, handle.num_fallen_back
        (1, 0)
        >>> handle.remove()
    """
    if max_error is not None and not max_error > 0:
        raise ValueError(f"apply_inplace_abn(max_error) must be positive, got {max_error}.")
    handle = InPlaceABNHandle()
    with handle.all_or_none():
        for index, link in enumerate(links):
            name = f"link {index}, {_describe(link.producer)} followed by {link.consumer}"
            _check_link(name, link, handle.modules)
            _check_error(name, link, dtype, max_error)
            if link.consumer not in handle.modules:
                handle.add(link.consumer, _Handover(), _run_consumer)
            state = _ProducerState(link.consumer, vars(link.consumer)[STATE], max_error)
            handle.add(link.producer, state, _run_producer)
            handle._states.append(state)
    return handle


def apply_inplace_abn_where_safe(links: Iterable[Link]) -> tuple[InPlaceABNHandle, list[str]]:
    """Apply :func:`apply_inplace_abn` where possible; return the undo, and why each other link was refused."""
    whole, refused = InPlaceABNHandle(), []
    handovers: dict[nn.Module, _Handover] = {}
    for link in links:
        if link.consumer in handovers:  # an activation that several norms feed is swapped once
            restore_class(link.consumer, STATE)
        try:
            handle = apply_inplace_abn([link])
        except ValueError as error:
            refused.append(str(error).partition(": ")[2])
            if link.consumer in handovers:
                swap_class(link.consumer, STATE, handovers[link.consumer], _run_consumer)
            continue
        handover = handovers.setdefault(link.consumer, handle._states[0].handover)
        handle._states[0].handover = handover
        vars(link.consumer)[STATE] = handover
        whole.modules += [module for module in handle.modules if module not in whole.modules]
        whole._states += handle._states
    return whole, refused


def _never_compiled(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Break the graph, also of parts: a norm that ran outside of a graph has activated what the graph would again."""
    uncompiled: Callable[..., Tensor] = torch.compiler.disable(run)  # type: ignore[no-untyped-call]

    @functools.wraps(run)
    def choose(*args: Any, **kwargs: Any) -> Tensor:
        chosen = uncompiled if torch.compiler.is_compiling() else run
        return chosen(*args, **kwargs)

    return choose


@_never_compiled
def _run_producer(norm: Any, state: _ProducerState, original: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    activation = read_activation(state.consumer)
    if not _is_recorded(norm, input) or not _is_safe(norm, state, input.dtype, activation):
        return original(input)
    check_dimensions(norm, input)
    output = normalize_and_activate(input, norm.weight, norm.bias, _begin_forward(norm), activation)
    state.handover.give(output)
    return output


@_never_compiled
def _run_consumer(
    activation: nn.Module, handover: _Handover, original: Callable[[Tensor], Tensor], input: Tensor
) -> Tensor:
    if handover.take(input):
        return input
    if handover.under_way and input.requires_grad and not is_in_backward():
        raise RuntimeError(
            f"{activation} got a tensor that is not the output of the batch norm before it, which is activated "
            "already. Link only norms whose output goes to the activation, unchanged and first."
        )
    return original(input)


def _is_recorded(norm: Any, input: Tensor) -> bool:
    """Whether a gradient is recorded by autograd alone, and the original norm would not refuse the input."""
    if not torch.is_grad_enabled() or is_transformed() or input.dim() < 2 or is_in_forward_ad():
        return False
    if norm.training and _process_group(norm) is None and input.numel() <= input.shape[1]:
        return False
    return any(value is not None and value.requires_grad for value in (input, norm.weight, norm.bias))


def _is_safe(norm: Any, state: _ProducerState, dtype: torch.dtype, activation: InvertibleActivation) -> bool:
    if state.has_fallen_back or is_in_backward():
        return not state.has_fallen_back  # a recomputed forward must take the path that the forward took
    if state.num_forwards % CHECK_EVERY_N_FORWARDS == 0:
        error = read_error(norm, dtype, activation)
        state.has_fallen_back = not error <= limit_error(state.max_error, dtype)
    state.num_forwards += 1
    return not state.has_fallen_back


def _begin_forward(norm: Any) -> Normalization:
    """Count the batch and choose the statistics, as the forward of torch.nn does."""
    momentum = norm.momentum if norm.momentum is not None else 0.0
    if norm.training and norm.track_running_stats and norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:
            momentum = 1.0 / float(norm.num_batches_tracked)
    is_batch = norm.training or (norm.running_mean is None and norm.running_var is None)
    is_used = not norm.training or norm.track_running_stats
    mean, variance = (norm.running_mean, norm.running_var) if is_used else (None, None)
    return Normalization(mean, variance, is_batch, momentum, norm.eps, _process_group(norm))


def _process_group(norm: Any) -> dist.ProcessGroup | None:
    """The processes that share statistics, if there are several and the norm is in training."""
    is_synchronized = isinstance(norm, nn.SyncBatchNorm) and norm.training
    if not (is_synchronized and dist.is_available() and dist.is_initialized()):
        return None
    group: dist.ProcessGroup | None = norm.process_group or dist.group.WORLD
    return group if dist.get_world_size(group) > 1 else None


def _refer_to(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
