"""Keep the outputs of LayerNorm and RMSNorm in 16 bit under autocast.

Autocast runs them in float32: the float32 input of each stays alive until backward, and what follows casts the output
to 16 bit, each reader its own copy. Here input and output are 16 bit, while the kernels still sum in float32 (MosaicML
Composer's "Low Precision LayerNorm"). A pre-norm transformer block saves 4 bytes per element of B*T*D, 2 for each norm,
and 2 more for each further layer that reads a norm's output.

The input is rounded before the statistics are taken: outputs differ by about the rounding of the dtype. Where norms
come last (BERT), their output is the residual stream, which then is 16 bit as well. In float16 an input above 65504
becomes infinite and the output NaN: run such a norm in float32.

Measured on a CPU, whose RMSNorm is composed of several operators, and computes in float32 copies that it saves. A
CPU's LayerNorm of a 16-bit input stays 16 bit under plain autocast, too; on CUDA it becomes float32.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_vram.core.surgery.class_swap import has_own_forward, plain_class_forward
from lightning_vram.core.tensors.nests import cast_where
from lightning_vram.private_names.torch.autograd import is_in_transform
from lightning_vram.techniques.mixed_precision.precision_swaps import PrecisionState, PrecisionSwap, PrecisionSwaps

_NAMES = ("LayerNorm", "RMSNorm")
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)
_STOCK = (nn.LayerNorm.forward, nn.RMSNorm.forward)
_EPS = torch.finfo(torch.float32).eps  # of RMSNorm(eps=None) under plain autocast; as documented by the input's dtype


def keep_norms_low(model: nn.Module, device_type: str, skip: Collection[nn.Module] = ()) -> PrecisionSwaps:
    """Let the norms of ``model`` return 16 bit wherever autocast is enabled when they are called.

    ``nn.LayerNorm`` and ``nn.RMSNorm`` read 16 bit as well. Other classes whose name ends alike (transformers') run
    as they are: those named ``...RMSNorm`` on a 16-bit input, which they cast up themselves, the others on the
    input they get, and only the output is cast. Gains stay float32 parameters with float32 gradients.

    Args:
        model: May be a norm itself.
        device_type: Whose autocast is meant, ``"cuda"`` or ``"cpu"``. Tensors of other devices are left alone.
        skip: These, and what is inside of them, stay as they are.

    Returns:
        The undo, and in ``num_modules`` how many norms were found.

    Raises:
        ValueError: If there is no norm, or the class of one cannot be changed. All modules are then as they were.

    Example:
        >>> norm = nn.LayerNorm(2)
        >>> handle = keep_norms_low(norm, "cpu")
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     print(norm(torch.ones(1, 2)).dtype)
        torch.bfloat16
        >>> handle.remove()
    """
    skipped = {part for module in skip for part in module.modules()}
    swaps = {part: swap for part in model.modules() if part not in skipped and (swap := _choose(part)) is not None}
    if not swaps:
        outside = " outside of fp32_modules" if skipped else ""
        raise ValueError(
            f"low_precision_norms=True finds no LayerNorm or RMSNorm in {type(model).__name__}{outside}: leave it out."
        )
    return PrecisionSwaps(swaps, device_type)


def _choose(module: nn.Module) -> PrecisionSwap | None:
    """What to do with ``module``; ``None`` if it is no norm."""
    if plain_class_forward(module) in _STOCK and not has_own_forward(module):
        return _LOW_KERNEL
    return _LOW_RESULT if type(module).__name__.endswith(_NAMES) else None


def _run_low_kernel(
    norm: nn.Module, state: PrecisionState, plain: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Stands in for the ``forward`` of a stock norm: calls its kernel with everything in 16 bit."""
    device_type = state.device_types[-1]
    if not _is_castable(device_type, args, kwargs):
        return plain(*args, **kwargs)
    if not torch.compiler.is_compiling() and getattr(plain, "__func__", None) not in _STOCK:
        # The class of somebody else keeps us from being the lowest: what another technique does below it goes on.
        return _run_low_result(norm, state, plain, *args, **kwargs)
    dtype = torch.get_autocast_dtype(device_type)
    with torch.autocast(device_type, enabled=False):
        (input,) = (*args, *kwargs.values())  # each class has another name for it
        return _normalize(norm, dtype, input)


def _run_low_result(
    norm: nn.Module, state: PrecisionState, plain: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Stands in for a ``forward`` that is not known: calls it, and casts its output.

    Autocast stays on inside: with it off, kernels on CUDA refuse a 16-bit input beside float32 gains.
    """
    device_type = state.device_types[-1]
    if not _is_castable(device_type, args, kwargs):
        return plain(*args, **kwargs)
    dtype = torch.get_autocast_dtype(device_type)
    if type(norm).__name__.endswith("RMSNorm"):
        # They normalize in float32 and go on in the dtype of their input. T5LayerNorm goes on in float32 and would
        # save the 16-bit input as well.
        if args:
            args = (args[0].to(dtype), *args[1:])
        else:
            name, input = next(iter(kwargs.items()))
            kwargs = {**kwargs, name: input.to(dtype)}
    return cast_where(_is_float32, dtype, plain(*args, **kwargs))


_LOW_KERNEL = PrecisionSwap("_low_norm_kernel", _run_low_kernel, is_lowest=True)
_LOW_RESULT = PrecisionSwap("_low_norm_result", _run_low_result, is_lowest=True)


def _normalize(norm: nn.Module, dtype: torch.dtype, input: Tensor) -> Tensor:
    """As ``norm.forward``, with everything in ``dtype``."""
    if isinstance(norm, nn.RMSNorm):
        eps = _EPS if norm.eps is None else norm.eps
        return F.rms_norm(input.to(dtype), norm.normalized_shape, _cast(norm.weight, dtype), eps)
    assert isinstance(norm, nn.LayerNorm)
    # The CPU's kernel takes float32 gains as well, and then keeps float32 statistics, as CUDA's does in any case. What
    # torch.func makes of it does not.
    gains_dtype = torch.float32 if input.device.type == "cpu" and not _is_transformed() else dtype
    weight, bias = _cast(norm.weight, gains_dtype), _cast(norm.bias, gains_dtype)
    return F.layer_norm(input.to(dtype), norm.normalized_shape, weight, bias, norm.eps)


def _cast(gain: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if gain is None else gain.to(dtype)


def _is_castable(device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autocast would touch a call: it leaves float64 and other devices alone."""
    input = next(iter((*args, *kwargs.values())), None)
    return (
        torch.is_autocast_enabled(device_type)
        and isinstance(input, Tensor)
        and input.device.type == device_type
        and input.dtype in _CASTABLE
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # it compiles once for each stack
def _is_transformed() -> bool:
    """Whether ``torch.func`` is at work."""
    return is_in_transform()


def _is_float32(leaf: object) -> bool:
    """Whether to cast ``leaf``. Losses stay: float16 would overflow once they are scaled."""
    return isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and leaf.dim() > 0
