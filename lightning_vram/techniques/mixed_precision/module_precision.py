"""Modules with a precision of their own under autocast: float32 islands, and norms with 16-bit outputs.

The precision goes along into copies and pickles, unlike what other techniques do: weight averages and loaded modules
compute as the module did. Loading such a pickle takes this package. In compiled code the backward of an island runs
under autocast, unless ``torch._functorch.config.backward_pass_autocast`` is ``"off"``.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_vram.core.patching import Run, Swaps, has_own_forward, plain_class_forward
from lightning_vram.core.tensors.properties import cast_where, iterate_leaves
from lightning_vram.private_names.torch import LossBase, is_in_transform


@dataclass(eq=False)
class PrecisionState:
    """What a module carries, in its ``__dict__``."""

    device_type: str  # of autocast
    is_stock: bool = False  # a norm of torch, with its own forward
    has_run: bool = False  # in eager mode


_KEY, _NORM_KEY = "_fp32_island", "_low_norm"
_LOW = (torch.float16, torch.bfloat16)

_compiled: set[type[nn.Module]] = set()  # classes with an island in compiled code, which does not report which module


class Float32Islands(Swaps):
    """Runs each of ``modules``, and all inside them, in float32 where it is called under autocast.

    16-bit tensors among the arguments, in any pytree or dataclass, are cast to float32. If there was one, float32
    tensors of the result are cast to its dtype, but not losses (scalars, or of ``nn.MSELoss`` and the like): float16
    would overflow once they are scaled. The caller does not see what ``forward`` writes into a 16-bit argument.
    :meth:`remove` leaves copies made meanwhile, and modules that were islands before, as they are.
    """

    def __init__(self, modules: Iterable[nn.Module], device_type: str) -> None:
        super().__init__(_KEY)
        # for each given module those that compute for it: itself, or its members
        self._islands = {module: _find_callable(module) for module in modules}
        self._members = list(dict.fromkeys(member for found in self._islands.values() for member in found))
        with self.all_or_none():
            for member in self._members:
                if isinstance(member, LazyModuleMixin) and member.has_uninitialized_params():  # it changes its class
                    raise ValueError(
                        f"module {type(member).__name__} cannot change its precision before it knows its sizes: run "
                        "the model on one batch first."
                    )
                _swap(self, _KEY, member, PrecisionState(device_type), _run)

    @property
    def idle(self) -> list[nn.Module]:
        """Given modules of which nothing was called so far: ``nn.MultiheadAttention.out_proj``, a ``ParameterList``.

        Islands of a class that was compiled somewhere count as called.
        """
        called = [one for one in self._members if vars(one)[_KEY].has_run or type(one) in _compiled]
        inside = {part for member in called for part in member.modules()}
        return [module for module, members in self._islands.items() if inside.isdisjoint((module, *members))]


def _swap(swaps: Swaps, key: str, module: nn.Module, state: PrecisionState, run: Run) -> None:
    """Swap ``module``, unless it is: as a copy, or by a run that this one is inside of."""
    if key in vars(module):
        vars(vars(module)[key]).update(vars(state))
    else:
        swaps.add(module, state, run, in_copies=True, is_lowest=key == _NORM_KEY)


def list_islands(module: nn.Module) -> set[nn.Module]:
    """Return the modules in ``module`` that run in float32, and all inside of them."""
    return {inner for part in module.modules() if _KEY in vars(part) for inner in part.modules()}


def _run(module: nn.Module, state: PrecisionState, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if torch.compiler.is_compiling():
        _note_compiled(type(module))
    else:
        state.has_run = True
    if not torch.is_autocast_enabled(state.device_type):
        return original(*args, **kwargs)
    given = [leaf.dtype for value in (*args, *kwargs.values()) for leaf in iterate_leaves(value) if _is_low(leaf)]
    if given:
        args = tuple(cast_where(_is_low, torch.float32, value) for value in args)
        kwargs = {name: cast_where(_is_low, torch.float32, value) for name, value in kwargs.items()}
    with torch.autocast(state.device_type, enabled=False):
        output = original(*args, **kwargs)
    is_cast_back = given and not isinstance(module, LossBase)
    return cast_where(_is_float32, given[0], output) if is_cast_back else output


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_compiled(kind: type[nn.Module]) -> bool:
    """Runs at compile time: a flag that compiled code sets is refused within checkpoints."""
    _compiled.add(kind)
    return True


def _is_low(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in _LOW


def _is_float32(leaf: object) -> bool:
    """Whether to cast ``leaf`` back. Scalar losses stay: float16 would overflow once they are scaled."""
    return isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and leaf.dim() > 0


def _find_callable(module: nn.Module) -> list[nn.Module]:
    """The module, or the members of a container that is never called itself."""
    if plain_class_forward(module) is not nn.Module.forward or has_own_forward(module):
        return [module]
    return [member for child in module.children() for member in _find_callable(child)]


# Norms with 16-bit outputs (MosaicML Composer's "Low Precision LayerNorm"). Autocast saves their float32 input, and
# each reader of the output casts it to 16 bit, a copy each. Here both are 16 bit, and kernels still sum in float32: a
# pre-norm transformer block saves 4 bytes per element of [B, T, D], and 2 more for each further reader.
#
# The input is rounded before the statistics are taken. Where norms come last (BERT), the residual stream is 16 bit too.
# In float16 an input above 65504 becomes infinite and the output NaN: run such a norm in float32. Measured on a CPU,
# whose RMSNorm saves float32 copies. Its LayerNorm of a 16-bit input stays 16 bit under autocast alone, unlike CUDA's.

_NAMES = ("LayerNorm", "RMSNorm")
_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)
_STOCK = (nn.LayerNorm.forward, nn.RMSNorm.forward)
_EPS = torch.finfo(torch.float32).eps  # of RMSNorm(eps=None) under autocast; documented: that of the input's dtype


def keep_norms_low(model: nn.Module, device_type: str, skip: Collection[nn.Module] = ()) -> Swaps:
    """Let the norms of ``model`` return 16 bit under autocast, except those inside ``skip``.

    ``nn.LayerNorm`` and ``nn.RMSNorm`` read 16 bit as well. Of other classes whose name ends alike (transformers') only
    the output is cast, and the input of ``...RMSNorm``, which they upcast themselves. Gains stay float32 parameters.
    """
    skipped = {part for module in skip for part in module.modules()}
    parts = [part for part in model.modules() if part not in skipped]
    norms = {part: _is_stock(part) for part in parts if _is_stock(part) or type(part).__name__.endswith(_NAMES)}
    if not norms:
        outside = " outside of fp32_modules" if skipped else ""
        raise ValueError(
            f"low_precision_norms=True finds no LayerNorm or RMSNorm in {type(model).__name__}{outside}: leave it out."
        )
    swaps = Swaps(_NORM_KEY)
    with swaps.all_or_none():
        for norm, is_stock in norms.items():
            _swap(swaps, _NORM_KEY, norm, PrecisionState(device_type, is_stock=is_stock), _run_low_norm)
    return swaps


def _is_stock(module: nn.Module) -> bool:
    return plain_class_forward(module) in _STOCK and not has_own_forward(module)


def _run_low_norm(
    norm: nn.Module, state: PrecisionState, original: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    if not _is_castable(state.device_type, args, kwargs):
        return original(*args, **kwargs)
    dtype = torch.get_autocast_dtype(state.device_type)
    # Not the lowest, because of another class swap: keep what another technique does below.
    is_lowest = torch.compiler.is_compiling() or getattr(original, "__func__", None) in _STOCK
    if state.is_stock and is_lowest:
        with torch.autocast(state.device_type, enabled=False):
            (input,) = (*args, *kwargs.values())  # each class has another name for it
            return _normalize(norm, dtype, input)
    # Autocast stays on: without it, CUDA kernels refuse a 16-bit input with float32 gains.
    if type(norm).__name__.endswith("RMSNorm"):
        # They normalize in float32 and go on in the dtype of their input. T5LayerNorm, which does not match, goes on
        # in float32 and would save the 16-bit input as well.
        if args:
            args = (args[0].to(dtype), *args[1:])
        else:
            name, input = next(iter(kwargs.items()))
            kwargs = {**kwargs, name: input.to(dtype)}
    return cast_where(_is_float32, dtype, original(*args, **kwargs))


def _normalize(norm: nn.Module, dtype: torch.dtype, input: Tensor) -> Tensor:
    if isinstance(norm, nn.RMSNorm):
        eps = _EPS if norm.eps is None else norm.eps
        return F.rms_norm(input.to(dtype), norm.normalized_shape, _cast(norm.weight, dtype), eps)
    assert isinstance(norm, nn.LayerNorm)
    # The CPU's kernel takes float32 gains, and then has float32 statistics, as CUDA's always has; not under torch.func.
    gains_dtype = torch.float32 if input.device.type == "cpu" and not _is_transformed() else dtype
    weight, bias = _cast(norm.weight, gains_dtype), _cast(norm.bias, gains_dtype)
    return F.layer_norm(input.to(dtype), norm.normalized_shape, weight, bias, norm.eps)


def _cast(gain: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if gain is None else gain.to(dtype)


def _is_castable(device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether autocast applies to a call: not to float64 and other devices."""
    input = next(iter((*args, *kwargs.values())), None)
    return (
        torch.is_autocast_enabled(device_type)
        and isinstance(input, Tensor)
        and input.device.type == device_type
        and input.dtype in _CASTABLE
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # it compiles once for each stack
def _is_transformed() -> bool:
    return is_in_transform()
