"""All of in-place fusion on one module, and two modules as one: a norm folded into its convolution, or inverted.

Recomputation works from the first training step on. Folding, inverting and writing in place need proof of which module
alone reads which output: the first step that records a gradient is observed, and they apply from the next on, because
its backward must find the modules as its forward did.

Of a proven link, the first module does the work of both, and the second passes on what it is given. The classes of both
are swapped: names, ``state_dict``, copies and pickles stay those of the original modules, hooks see the result of both,
and in compiled code the pair breaks the graph.

Folding works on the fly and from the live parameters: the convolution's own output, which the norm would save for
backward, never exists. Autograd differentiates through it, so both modules train on ("Tune mode",
https://arxiv.org/abs/2305.11624). Equal up to rounding. Autograd saves the folded weights unless they are recomputed:
without recomputation, small batches use more memory, not less.

Inverting (InPlace-ABN, https://arxiv.org/abs/1712.02616): norm and activation are one function that saves only its
output, which the next layer saves anyway; the backward recovers ``y = act^-1(output)`` and ``xhat = (y - beta) /
gamma``. The paper trains with ``|gamma| + eps``: here gamma is used as it is, and the output is that of the original
layers, by the same kernels. Costs the inverse in the backward, and accuracy: the rounding of the output is divided by
gamma. A pair computes as the original modules do once gamma is too small for that.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_vram.core.hooks import is_in_backward, is_transformed
from lightning_vram.core.patching import Run, Swaps, has_own_forward, plain_class_forward
from lightning_vram.core.tensors.properties import PLAIN_TYPES
from lightning_vram.memory.device.accelerators import is_capturing
from lightning_vram.memory.storages import version_of
from lightning_vram.memory.units import format_bytes
from lightning_vram.private_names import dispatcher
from lightning_vram.private_names import torch as private
from lightning_vram.techniques.in_place_fusion.observed_links import Link, StepObserver
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation, apply_compiled_recomputation


class Pair:
    """What both modules carry in their ``__dict__``."""

    def __init__(self, link: Link, run_both: "RunBoth") -> None:
        self.producer: Any = link.producer
        self.consumer: Any = link.consumer
        self.run_both = run_both
        self.num_forwards = 0  # that did the work of both, without those in a backward
        self.is_off = False  # for good
        self._is_active = False  # the last forward of the producer did the work of both
        self._output: tuple[weakref.ref[torch.UntypedStorage], int] | None = None  # on its way, and its version
        self._is_lost = False

    def give(self, output: Tensor | None) -> None:
        """Note what the producer made for both; ``None`` if it did its own work only."""
        self._is_active = output is not None
        if output is not None:
            self._is_lost |= self._output is not None
            self._output = weakref.ref(output.untyped_storage()), version_of(output)  # FSDP2 passes on an alias
            self.num_forwards += not is_in_backward()

    def take(self, input: Tensor) -> bool:
        """Whether nothing is left to do with ``input``, the consumer's."""
        if self._output is None:
            return self._is_active and is_in_backward()  # a checkpoint runs the consumer alone, on what it saved
        (storage, version), self._output = self._output, None
        if storage() is not input.untyped_storage() or version != version_of(input):
            raise RuntimeError(
                f"{self.consumer} got another tensor than the output of {self.producer}, which has done its work. "
                "fold_frozen_bn and abn need a model that takes the same path in every step: leave them out."
            )
        return True

    def end_step(self) -> bool:
        """Forget what is on its way. Returns whether, since the last call, an output did not go to the consumer."""
        was_lost = self._is_lost or self._output is not None
        self._output, self._is_lost = None, False
        return was_lost


RunBoth = Callable[[Pair, Tensor], Tensor | None]
"""What a producer runs; its own forward where that gives ``None``."""


class Pairs(Swaps):
    """Swaps links under ``key``, and undoes that. Raises ``ValueError`` if one cannot be; then no module is changed."""

    def __init__(self, key: str, links: Iterable[Link], run_both: RunBoth) -> None:
        super().__init__(key)
        self.pairs = [Pair(link, run_both) for link in links]
        with self.all_or_none():
            for pair in self.pairs:
                self.add(pair.producer, pair, _run_producer)
                self.add(pair.consumer, pair, _run_consumer)


def _uncompiled(run: Run) -> Run:
    """Break the graph, also of parts: a module outside of it may have done the work of one inside."""
    outside: Run = torch.compiler.disable(run)  # type: ignore[no-untyped-call]

    def choose(*args: Any, **kwargs: Any) -> Any:
        return (outside if torch.compiler.is_compiling() else run)(*args, **kwargs)

    return choose


@_uncompiled
def _run_producer(module: Any, pair: Pair, original: Callable[[Tensor], Tensor], /, input: Tensor) -> Tensor:
    if module is not pair.producer:  # DataParallel's copy, with weights of its own
        return original(input)
    output = pair.run_both(pair, input)
    pair.give(output)
    return output if output is not None else original(input)


@_uncompiled
def _run_consumer(_: Any, pair: Pair, original: Callable[[Tensor], Tensor], /, input: Tensor) -> Tensor:
    return input if pair.take(input) else original(input)


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_CONV_METHODS = {(kind.forward, private.class_conv_forward(kind)) for kind in CONVOLUTIONS}
_NORM_FORWARDS = {kind.forward for kind in BATCH_NORMS}


def fold_frozen_batch_norm(links: Iterable[Link]) -> Pairs:
    """Let convolutions do the work of the frozen batch norms that follow them; return the undo.

    A call folds if the norm is in evaluation mode then. The links must be proven, and foldable (:func:`can_fold`).
    """
    return Pairs("_frozen_batch_norm_folding", links, _run_convolution)


def can_fold(link: Link) -> bool:
    """Whether ``link`` is a stock convolution and a stock batch norm with running statistics."""
    convolution, norm = link.producer, link.consumer
    methods = plain_class_forward(convolution), private.class_conv_forward(type(convolution))
    has_own = has_own_forward(convolution) or has_own_forward(norm) or methods not in _CONV_METHODS
    if has_own or plain_class_forward(norm) not in _NORM_FORWARDS or not isinstance(norm, BATCH_NORMS):
        return False
    return norm.running_mean is not None and norm.num_features == convolution.out_channels


def _run_convolution(pair: Pair, input: Tensor) -> Tensor | None:
    convolution, norm = pair.producer, pair.consumer
    if norm.training or norm.running_mean is None or norm.running_var is None or is_transformed():
        return None
    tensors = (convolution.weight, convolution.bias, norm.weight, norm.bias, norm.running_mean, norm.running_var)
    if not all(tensor is None or type(tensor) in PLAIN_TYPES for tensor in tensors):
        return None  # FSDP2 has sharded the norm, which is in another group
    return private.convolve_with(convolution, input, *_fold(convolution, norm))


def _fold(convolution: Any, norm: Any) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias that do what both modules do. Computed in float32 at least."""
    weight, bias = convolution.weight, convolution.bias
    dtype = torch.promote_types(weight.dtype, torch.float32)
    scale = torch.rsqrt(norm.running_var.to(dtype) + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.to(dtype)
    mean = norm.running_mean.to(dtype)
    shift = (bias.to(dtype) - mean if bias is not None else -mean) * scale
    if norm.bias is not None:
        shift = shift + norm.bias.to(dtype)
    return (weight.to(dtype) * scale.view(-1, *[1] * (weight.dim() - 1))).to(weight.dtype), shift.to(weight.dtype)


CHECK_EVERY_N_FORWARDS = 100  # how often a pair reads gamma and beta: a GPU has to wait for that
MAX_ERROR = 4e-4
MAX_ERROR_16_BIT = 8e-3  # a fresh norm (gamma 1, beta 0) has an error of 1.6e-3 in bfloat16
_NUM_QUANTILES = 101
_aten = torch.ops.aten


def apply_inplace_abn(links: Iterable[Link]) -> Pairs:
    """Let each linked norm normalize and activate in one function that saves only its output; return the undo.

    The links must be proven, and invertible (:func:`can_invert`). A call inverts if the norm trains then. The first
    and every 100th forward that records a gradient measures the error of the inverse; a pair beyond the limit is off
    from then on. Processes that train the same weights decide alike.
    """
    return Pairs("_invertible_norms", links, _run_norm)


def can_invert(link: Link) -> bool:
    """Whether ``link`` is a stock batch norm and a LeakyReLU or ELU with a positive slope."""
    norm, activation = link.producer, link.consumer
    if has_own_forward(norm) or has_own_forward(activation) or type(norm).forward is not private.BatchNormBase.forward:
        return False
    if type(activation).forward not in (nn.LeakyReLU.forward, nn.ELU.forward):
        return False
    return 0 < getattr(activation, "negative_slope", getattr(activation, "alpha", 0.0)) < float("inf")


def _run_norm(pair: Pair, input: Tensor) -> Tensor | None:
    norm, activation = pair.producer, pair.consumer
    if not (norm.training and torch.is_grad_enabled()) or is_transformed() or private.is_in_forward_ad():
        return None
    private.check_dimensions(norm, input)
    is_needed = any(value is not None and value.requires_grad for value in (input, norm.weight, norm.bias))
    if not is_needed or input.numel() <= input.shape[1]:  # the norm itself refuses one value per channel
        return None
    # In a backward a checkpoint must take the path of its forward, if that did the work of both.
    is_due = pair.num_forwards % CHECK_EVERY_N_FORWARDS == 0 and not (pair.num_forwards and is_in_backward())
    if is_due and not pair.is_off:
        pair.is_off = not _is_accurate(norm, input.dtype, activation)
    return None if pair.is_off else normalize_and_activate(input, norm, activation)


def _is_accurate(norm: Any, dtype: torch.dtype, activation: nn.Module) -> bool:
    """Whether gamma is large enough; true without values to read, of fake tensors or in the capture of a graph."""
    if any(
        value.is_meta or isinstance(value.data, dispatcher.FakeTensor) or is_capturing(value.device)
        for value in (norm.weight, norm.bias)
        if value is not None
    ):
        return True
    limit = MAX_ERROR_16_BIT if torch.finfo(dtype).bits == 16 else MAX_ERROR
    with dispatcher.without_dispatch():  # recipes are known by their number in the forward
        return float(measure_inversion_error(norm.weight, norm.bias, dtype, activation).max()) <= limit


def measure_inversion_error(
    weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, activation: nn.Module
) -> Tensor:
    """Measure the error of the recovered ``xhat``, relative to its standard deviation of 1, per channel: ``[C]``.

    It is the root mean square over quantiles of the normal distribution, rounded to ``dtype`` and inverted, and about
    the relative error of gamma's gradient where the incoming gradient is noise. Not finite where gamma is zero.
    """
    gamma = torch.ones(1, 1, device="cpu") if weight is None else weight.detach().cpu().double().unsqueeze(1)
    beta = torch.zeros(1, 1, device="cpu") if bias is None else bias.detach().cpu().double().unsqueeze(1)
    shares = torch.arange(1, 2 * _NUM_QUANTILES, 2, dtype=torch.float64, device="cpu") / (2 * _NUM_QUANTILES)
    xhat = torch.special.ndtri(shares)
    output = activate_((gamma * xhat + beta).to(dtype), activation)
    error: Tensor = ((invert(output, activation) - beta) / gamma - xhat).square().mean(1).sqrt()
    return error


def activate_(value: Tensor, activation: Any) -> Tensor:
    """Run a LeakyReLU or ELU in place."""
    if isinstance(activation, nn.ELU):
        return F.elu(value, activation.alpha, inplace=True)
    return F.leaky_relu(value, activation.negative_slope, inplace=True)


def invert(output: Tensor, activation: Any) -> Tensor:
    """Compute the input of a LeakyReLU or ELU; what an ELU has rounded to ``-alpha`` stays finite."""
    if isinstance(activation, nn.LeakyReLU):
        return F.leaky_relu(output, 1 / activation.negative_slope)  # the inverse of a leaky ReLU is one
    lowest = torch.finfo(output.dtype).eps / 2 - 1
    return output.clamp(max=0).div_(activation.alpha).clamp_(min=lowest).log1p_().add_(output.clamp(min=0))


def normalize_and_activate(input: Tensor, norm: nn.Module, activation: nn.Module) -> Tensor:
    """Compute ``activation(norm(input))`` of a norm in training mode, saving only the output for backward.

    The output must not be changed in place before the backward, nor the gradient be differentiated: autograd raises.
    ``input``: ``[N, C, ...]`` with more than one value per channel; the weight of ``norm``: nowhere zero.
    """
    return _NormalizeAndActivate.apply(input, norm.weight, norm.bias, norm, activation)[0]  # type: ignore[no-untyped-call,no-any-return]


class _NormalizeAndActivate(torch.autograd.Function):
    @staticmethod
    def forward(
        input: Tensor, weight: Tensor | None, bias: Tensor | None, norm: Any, activation: nn.Module
    ) -> tuple[Tensor, Tensor]:
        # As the forward of torch.nn does:
        momentum = norm.momentum if norm.momentum is not None else 0.0
        if norm.track_running_stats and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            if norm.momentum is None:
                momentum = 1.0 / float(norm.num_batches_tracked)
        mean, variance = (norm.running_mean, norm.running_var) if norm.track_running_stats else (None, None)
        # What F.batch_norm is made of: it chooses cuDNN as F.batch_norm does, and returns the statistics too.
        implementation = torch.native_batch_norm
        if dispatcher.batch_norm_and_statistics is not None:
            implementation = functools.partial(
                dispatcher.batch_norm_and_statistics, cudnn_enabled=torch.backends.cudnn.enabled
            )
        output, _, inverse_deviation, *_ = implementation(
            input, weight, bias, mean, variance, training=True, momentum=momentum, eps=norm.eps
        )
        return activate_(output, activation), inverse_deviation.to(torch.promote_types(input.dtype, torch.float32))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _, weight, bias, _, ctx.activation = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight, bias, *output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 5
        weight, bias, output, inverse_deviation = ctx.saved_tensors
        activation = ctx.activation
        with private.without_autocast():
            value = invert(output, activation)  # y = gamma * xhat + beta
            if isinstance(activation, nn.ELU):
                gradient = _aten.elu_backward(gradient, activation.alpha, 1, 1, is_result=True, self_or_result=output)
            else:
                gradient = _aten.leaky_relu_backward(gradient, output, activation.negative_slope, self_is_result=True)
            gamma = inverse_deviation.new_ones(output.shape[1]) if weight is None else weight.to(inverse_deviation)
            beta = torch.zeros_like(gamma) if bias is None else bias.to(inverse_deviation)
            # The kernel computes xhat = (input - mean) * inverse_deviation, and scales by weight * inverse_deviation:
            # given y, beta and 1/gamma, it gets xhat from y itself, without a copy.
            statistics = (None, None, beta, gamma.reciprocal())  # running, of the batch
            scale, needs = gamma.square() * inverse_deviation, ctx.needs_input_grad[:3]
            of_input, of_weight, of_bias = _aten.native_batch_norm_backward(
                gradient, value, scale, *statistics, train=True, eps=0.0, output_mask=needs
            )
        of_weight = of_weight.to(weight.dtype) if of_weight is not None and weight is not None else None
        of_bias = of_bias.to(bias.dtype) if of_bias is not None and bias is not None else None
        return of_input, of_weight, of_bias, None, None


_INVERTIBLE = (nn.LeakyReLU, nn.ELU)


@dataclass(frozen=True)
class FusionPolicy:
    """What to do; see :class:`~lightning_vram.callbacks.in_place_fusion.callback.InPlaceFusion` for the words."""

    mode: Literal["auto", "general"] = "auto"
    inplace: bool = False
    abn: Literal["invert"] | None = None
    fold_frozen_bn: bool = False
    min_bytes: int = 1024
    dropout: Literal["mask", "replay"] = "mask"


class FusionError(ValueError):
    """What the policy asks for is impossible on this module."""


class Fusion:
    """Fusion at work on one module, until :meth:`remove`. ``log`` takes each sentence about what was done."""

    def __init__(self, module: nn.Module, policy: FusionPolicy, log: Callable[[str], None]) -> None:
        self._module = module
        self._policy = policy
        self._needs_links = policy.abn is not None or policy.fold_frozen_bn
        self._log = log
        self.is_observing = True
        self._observer: StepObserver | None = None  # until what it proved is applied
        self._pairs: list[Pairs] = []
        self._overwriting: list[nn.Module] = []
        self._compiled: list[Swaps] = []
        self._recomputation = Recomputation(module, min_bytes=policy.min_bytes, dropout=policy.dropout)
        self.is_useful = True  # False once a step has shown that there is nothing to save
        if policy.mode != "general" and dispatcher.is_compiled(module):
            self._compiled.append(apply_compiled_recomputation(module))
            log(f"lets the compiler recompute {len(self._compiled[0].modules)} norms and activations.")

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one training step inside.

        Raises ``FusionError`` at the start of the second step if the policy is impossible on this module, at the end of
        any step if the model took another path than when it was observed.
        """
        if not self.is_observing and self._observer is not None:
            self._change(self._observer)
            self._observer = None
        with ExitStack() as stack:
            stack.enter_context(self._recomputation)
            if self.is_observing and (self._needs_links or self._policy.inplace):
                self._observer = self._observe(stack)
            stack.enter_context(_switched(self._overwriting, is_inplace=True))
            with _unchanged_path(self._pairs):
                yield
        if self.is_observing:
            self._summarise()

    def _observe(self, stack: ExitStack) -> StepObserver:
        if self._policy.abn is not None:
            # An in-place activation returns the memory it was given: others that read it would not be noticed.
            activations = (member for member in self._module.modules() if isinstance(member, _INVERTIBLE))
            stack.enter_context(_switched(activations, is_inplace=False))
        kinds = ((*CONVOLUTIONS, *BATCH_NORMS), (*BATCH_NORMS, *_INVERTIBLE)) if self._needs_links else ()
        return stack.enter_context(StepObserver(self._module, *kinds, overwriting=self._policy.inplace))

    def remove(self) -> None:
        """Make the module what it was. Calling it again does nothing."""
        for swaps in (*self._pairs, *self._compiled):
            swaps.remove()

    def _change(self, observer: StepObserver) -> None:
        try:
            if self._policy.fold_frozen_bn:
                self._fold(observer)
            if self._policy.abn is not None:
                self._invert(observer)
        except ValueError as error:
            self.remove()
            raise FusionError(str(error)) from None
        self._overwriting = observer.overwriting
        if self._overwriting:
            self._log(f"runs {len(self._overwriting)} activations in place.")

    def _fold(self, observer: StepObserver) -> None:
        links = [link for link in observer.links if can_fold(link)]
        frozen = [link for link in links if not link.consumer.training]
        if not frozen:
            raise ValueError(
                f"fold_frozen_bn=True, but none of {len(links)} batch norms behind a convolution is in evaluation "
                "mode. Call .eval() on them before the fit or in on_train_epoch_start, or leave out fold_frozen_bn."
            )
        self._pairs.append(fold_frozen_batch_norm(frozen))
        self._log(f"folds {len(frozen)} frozen batch norms into their convolutions.")

    def _invert(self, observer: StepObserver) -> None:
        chosen = [link for link in observer.links if can_invert(link) and link.producer.training]
        if not chosen:
            raise ValueError(
                "abn='invert' found no batch norm in training mode (SyncBatchNorm does not count) whose only reader is "
                "a LeakyReLU or ELU that reads nothing else. ReLU cannot be inverted: it drops negative values. Leave "
                "out abn: recomputation saves the same and needs no inverse."
            )
        self._pairs.append(apply_inplace_abn(chosen))
        self._log(f"inverts {len(chosen)} activations behind batch norms.")

    def _summarise(self) -> None:
        report = self._recomputation.report
        if not report.num_saved:
            return  # no gradient was recorded: a step that was skipped, weights that are still frozen
        self.is_observing = False
        self.is_useful = bool(report.num_dropped or any(swaps.modules for swaps in self._compiled) or self._observer)
        if not report.num_dropped:
            return
        whole = format_bytes(report.dropped_bytes + report.kept_bytes)
        self._log(
            f"saves {format_bytes(report.kept_bytes)} instead of {whole} for backward: {report.num_dropped} tensors "
            "are recomputed."
        )
        for operator, count in report.differing.items():
            self._log(f"saves {count} results of {operator}: their recomputation is not exact.")


@contextmanager
def _unchanged_path(changed: list[Pairs]) -> Iterator[None]:
    pairs = [pair for swaps in changed for pair in swaps.pairs]
    for pair in pairs:
        pair.end_step()  # what a failed step, or a checkpoint in a backward, left behind
    yield
    if sum(pair.end_step() for pair in pairs):  # all of them are asked
        raise FusionError(
            "the output of a folded or inverted module went elsewhere than in the first step. fold_frozen_bn and abn "
            "need a model that takes the same path in every step."
        )


@contextmanager
def _switched(activations: Iterable[Any], *, is_inplace: bool) -> Iterator[None]:
    """Let activations overwrite their input, or not, inside."""
    changed = [activation for activation in activations if activation.inplace is not is_inplace]
    for activation in changed:
        activation.inplace = is_inplace
    try:
        yield
    finally:
        for activation in changed:
            activation.inplace = not is_inplace
