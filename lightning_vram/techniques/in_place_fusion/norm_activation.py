"""Let the activation behind a norm keep the norm's input, which is kept anyway, instead of the norm's output.

Plain autograd keeps the norm's input, its output for the activation, and the activation's output for the next layer.
Here the activation's backward makes the norm's output again, by the kernel of the forward, so that gradients are equal
to the bit (those of a double backward up to rounding: they are summed in another order). Pairs are recognised at every
call, by the tensor: whoever else reads the norm's output reads what it always did.

No dispatch mode, no cost per operator: the light form of ``recomputation/stage.py``, which saves more.
What it does not see: functional calls, sums, casts, and the next layer's input. It does not help for activations that
keep their output anyway: ReLU, sigmoid, tanh.
"""

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from lightning_vram.core.surgery.class_swap import restore_class, swap_class
from lightning_vram.private_names.torch.autograd import is_in_forward_ad, is_in_transform
from lightning_vram.private_names.torch.modules import BatchNormBase
from lightning_vram.private_names.torch.tensors import num_writes

_KEY = "_fused_module"

FUSED_NORMS: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
FUSED_ACTIVATIONS: tuple[type[nn.Module], ...] = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.Mish,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Softplus,
)
_FORWARDS = frozenset(vars(kind).get("forward") for kind in (*FUSED_NORMS, *FUSED_ACTIVATIONS, BatchNormBase)) - {None}


class FusedModulesHandle:
    """Undoes :func:`fuse_norm_activations`."""

    def __init__(self) -> None:
        self._changed: list[nn.Module] = []
        self._outputs = _Outputs()

    @property
    def num_fused(self) -> int:
        """Calls of activations, so far, that kept a norm's input."""
        return self._outputs.num_taken

    def remove(self) -> None:
        """Give every module its class back. Calling it again does nothing."""
        while self._changed:
            restore_class(self._changed.pop(), _KEY)


def fuse_norm_activations(model: nn.Module, leave_out: Collection[nn.Module] = ()) -> FusedModulesHandle:
    """Let the norms and activations of ``model`` work together wherever one follows the other.

    Modules with a ``forward`` of their own, scripted ones and those of other classes are left alone.

    Args:
        model: Any module.
        leave_out: Modules inside it that others have changed.

    Returns:
        The undo.
    """
    handle = FusedModulesHandle()
    for module in model.modules():
        if module in leave_out or getattr(type(module), "forward", None) not in _FORWARDS or "forward" in vars(module):
            continue
        run = _run_norm if isinstance(module, FUSED_NORMS) else _run_activation
        if run is _run_activation and (not isinstance(module, FUSED_ACTIVATIONS) or getattr(module, "inplace", False)):
            continue
        try:
            swap_class(module, _KEY, handle._outputs, run)
        except ValueError:
            continue
        handle._changed.append(module)
    return handle


@dataclass(frozen=True)
class _Output:
    """What a norm returned, and how to make it again."""

    tensor: weakref.ref[Tensor]
    version: int
    norm: Any
    autocast: dict[str, Any]
    inputs: tuple[Tensor | None, ...]
    """Input, weight, bias, and in evaluation the running statistics. The norm's own backward keeps them as well."""

    def again(self, input: Tensor, weight: Tensor | None, bias: Tensor | None, *statistics: Tensor | None) -> Tensor:
        norm = self.norm
        with torch.autocast(**self.autocast, cache_enabled=False):
            if isinstance(norm, nn.LayerNorm):
                return F.layer_norm(input, norm.normalized_shape, weight, bias, norm.eps)
            if isinstance(norm, nn.GroupNorm):
                return F.group_norm(input, norm.num_groups, weight, bias, norm.eps)
            if isinstance(norm, nn.RMSNorm):
                return F.rms_norm(input, norm.normalized_shape, weight, norm.eps)
            mean, variance = statistics
            is_training = mean is None or variance is None
            if is_training and norm.running_mean is not None:  # others to move: their dtype decides on the kernel
                mean, variance = torch.zeros_like(norm.running_mean), torch.ones_like(norm.running_var)
            return F.batch_norm(input, mean, variance, weight, bias, is_training, 0.0, norm.eps)


class _Outputs:
    """Outputs of norms that are alive and have met no activation."""

    def __init__(self) -> None:
        self._by_id: dict[int, _Output] = {}
        self.num_taken = 0

    def give(self, output: Tensor, norm: Any, autocast: dict[str, Any], inputs: tuple[Tensor | None, ...]) -> None:
        key = id(output)
        # What the norm read dies with its output: the entry must not keep it.
        reference = weakref.ref(output, lambda _: self._by_id.pop(key, None))
        self._by_id[key] = _Output(reference, num_writes(output), norm, autocast, inputs)

    def take(self, input: Tensor) -> _Output | None:
        output = self._by_id.pop(id(input), None)
        if output is None or output.tensor() is not input or output.version != num_writes(input):
            return None
        self.num_taken += 1
        return output


def _is_recorded(input: Tensor) -> bool:
    is_transformed = is_in_transform() or is_in_forward_ad()
    is_plain = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_transformed
    return is_plain and type(input) is Tensor


def _run_norm(
    norm: nn.Module, outputs: _Outputs, plain: Callable[[Tensor], Tensor], /, *args: Tensor, **kwargs: Tensor
) -> Tensor:
    (input,) = (*args, *kwargs.values())  # each class has another name for it
    output = plain(input)
    if getattr(plain, "__func__", None) not in _FORWARDS:  # another technique is below, and its output is not ours
        return output
    if _is_recorded(input) and type(output) is Tensor and output.requires_grad and output is not input:
        module: Any = norm
        is_frozen = isinstance(norm, BatchNormBase) and not norm.training
        statistics = (module.running_mean, module.running_var) if is_frozen else (None, None)
        device_type = input.device.type
        autocast = {
            "device_type": device_type,
            "dtype": torch.get_autocast_dtype(device_type),
            "enabled": torch.is_autocast_enabled(device_type),
        }
        outputs.give(output, norm, autocast, (input, module.weight, getattr(norm, "bias", None), *statistics))
    return output


def _run_activation(
    activation: nn.Module, outputs: _Outputs, plain: Callable[[Tensor], Tensor], input: Tensor
) -> Tensor:
    output = outputs.take(input) if _is_recorded(input) else None
    if output is None:
        return plain(input)
    result: Tensor = _Activation.apply(output, plain, input, *output.inputs)  # type: ignore[no-untyped-call]
    return result


class _Activation(torch.autograd.Function):
    """The activation of a norm's output; keeps what the norm keeps."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, output: _Output, plain: Callable[[Tensor], Tensor], input: Tensor, *of_norm: Tensor | None
    ) -> Tensor:
        ctx.call = replace(output, inputs=()), plain  # type: ignore[attr-defined]  # saved below, not hidden
        ctx.save_for_backward(*of_norm)  # type: ignore[arg-type]
        return plain(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        output, plain = ctx.call
        saved = ctx.saved_tensors  # asked for once: checkpoints of the user's own allow no more
        is_differentiable = torch.is_grad_enabled()  # a graph of the backward is asked for
        with torch.set_grad_enabled(is_differentiable):
            again = output.again(*saved)
        with torch.enable_grad():
            source = again if is_differentiable else again.detach().requires_grad_()
            with torch.autocast(**output.autocast, cache_enabled=False):
                result = plain(source)
        (gradient,) = torch.autograd.grad(result, source, grad, create_graph=is_differentiable)
        return None, None, gradient, *(None for _ in saved)
