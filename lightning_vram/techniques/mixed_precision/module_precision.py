"""Run some modules in float32 while the rest of the model runs under autocast.

For what 16 bits break: a router's softmax, a physics term, a head whose logits overflow in float16. What comes in is
cast to float32, autocast is off inside, what goes out is cast back. It costs the 16-bit speed and the memory of those
modules: their activations take twice the bytes. What autocast runs in float32 anyway (losses, softmax and norms on
CUDA) needs no island. What ``forward`` writes into a list, dict or dataclass that holds 16-bit tensors, or into such a
tensor, its caller does not see.

In compiled code the backward runs under autocast like the forward around it, islands included: so torch has it
unless ``torch._functorch.config.backward_pass_autocast`` is ``"off"``.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_vram.core.patching import Run, has_own_forward, plain_class_forward, restore_class, swap_class
from lightning_vram.core.tensors.properties import cast_where, iterate_leaves
from lightning_vram.private_names.torch import LossBase, is_in_transform

# Let modules compute in another precision, by their class, in copies too, and for several who ask for it.
#
# In which precision a module computes goes along with it, unlike what other techniques do: the copy that an average of
# the weights runs, and the file that is loaded to predict, compute as the module did. Loading such a pickle takes this
# package.


@dataclass(frozen=True)
class PrecisionSwap:
    """A way to compute.

    Args:
        key: Its name: see :func:`~lightning_vram.core.patching.swap_class`.
        run: What runs in the place of ``forward``; gets a :class:`PrecisionState`.
        is_lowest: Whether it runs below what other techniques do with the module.
    """

    key: str
    run: Run
    is_lowest: bool = False


@dataclass(eq=False)
class PrecisionState:
    """What a module carries, in its ``__dict__``.

    Args:
        device_types: Whose autocast is meant, one for each who asked for it. The last one counts. In copies nobody
            takes back those that were there.
        has_run: Whether the module ran in eager mode since somebody asked last.
    """

    device_types: tuple[str, ...] = ()
    has_run: bool = False


class PrecisionSwaps:
    """Changes modules, all or none, until :meth:`remove`.

    Args:
        swaps: What each module is to do.
        device_type: Whose autocast is meant, ``"cuda"`` or ``"cpu"``.

    Raises:
        ValueError: If the class of a module cannot be changed.
    """

    def __init__(self, swaps: Mapping[nn.Module, PrecisionSwap], device_type: str) -> None:
        with ExitStack() as undo:
            for module, swap in swaps.items():
                _hold(module, swap, device_type)
                undo.callback(_release, module, swap.key, device_type)
            self._undo = undo.pop_all()
        self.num_modules = len(swaps)
        """Modules that were changed."""

    def remove(self) -> None:
        """Give every module its ``forward`` back; copies made meanwhile keep theirs. Twice does nothing."""
        self._undo.close()


def _hold(module: nn.Module, swap: PrecisionSwap, device_type: str) -> None:
    if swap.key not in vars(module):
        swap_class(module, swap.key, PrecisionState(), swap.run, in_copies=True, is_lowest=swap.is_lowest)
    state: PrecisionState = vars(module)[swap.key]
    state.device_types += (device_type,)
    state.has_run = False


def _release(module: nn.Module, key: str, device_type: str) -> None:
    state: PrecisionState | None = vars(module).get(key)
    if state is None:  # somebody has restored the class
        return
    others = list(state.device_types)
    others.remove(device_type)
    state.device_types = tuple(others)
    if not others:
        restore_class(module, key)


_KEY = "_fp32_island"
_LOW = (torch.float16, torch.bfloat16)

_compiled: set[type[nn.Module]] = set()  # classes with an island in compiled code, which does not say whose


class Float32Islands:
    """Undoes :func:`run_in_fp32`, and knows which modules it was of no use for.

    Args:
        swaps: Of all islands.
        islands: For each module that was given, those that compute for it: itself, or its members.
    """

    def __init__(self, swaps: PrecisionSwaps, islands: Mapping[nn.Module, Iterable[nn.Module]]) -> None:
        self._swaps = swaps
        self._islands = {module: {member: vars(member)[_KEY] for member in found} for module, found in islands.items()}
        self.num_modules = swaps.num_modules
        """Modules that were changed."""

    @property
    def idle(self) -> list[nn.Module]:
        """Modules that were given, and of which nothing was called so far, alone or within another island.

        Nobody calls the ``forward`` of ``nn.MultiheadAttention.out_proj``, of a ``ParameterList``, or of a head that
        has other methods: there, nothing is in float32. Islands of a class that was compiled somewhere count as called.
        """
        states = {member: state for members in self._islands.values() for member, state in members.items()}
        called = [member for member, state in states.items() if state.has_run or type(member) in _compiled]
        inside = {part for member in called for part in member.modules()}
        return [module for module, members in self._islands.items() if inside.isdisjoint((module, *members))]

    def remove(self) -> None:
        """Give every module its ``forward`` back; copies made meanwhile keep theirs. Twice does nothing."""
        self._swaps.remove()


def run_in_fp32(modules: Iterable[nn.Module], device_type: str) -> Float32Islands:
    """Let each of ``modules`` run in float32 wherever autocast is enabled when it is called.

    16-bit tensors among the arguments, in any pytree or dataclass, are cast to float32; float64 and integers stay. If
    there was one, float32 tensors of the result are cast to its dtype. Losses stay float32, be they without dimensions
    or those of ``nn.MSELoss(reduction="none")`` and its like: float16 would overflow once they are scaled. Results and
    gradients are those of the module called by hand with float32 inputs outside of autocast.

    Args:
        modules: Whatever is inside of them is in float32 as well. Of one without a ``forward`` of its own, such as a
            ``ModuleList``, each member. Parameters have to be float32 (they stay what they are).
        device_type: Whose autocast is meant, ``"cuda"`` or ``"cpu"``.

    Returns:
        The undo. Its ``idle`` tells, after a first step, which modules nobody has called.

    Raises:
        ValueError: If a module is scripted, traced or lazy, or its class cannot be changed. All are then what they
            were.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> handle = run_in_fp32([layer], "cpu")
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     print(layer(torch.ones(1, 2)).dtype)
        torch.float32
        >>> handle.idle
        []
        >>> handle.remove()
    """
    islands = {module: _find_callable(module) for module in modules}
    chosen = dict.fromkeys((member for found in islands.values() for member in found), PrecisionSwap(_KEY, _run))
    for module in chosen:
        _refuse_unchangeable(module)
    return Float32Islands(PrecisionSwaps(chosen, device_type), islands)


def list_islands(module: nn.Module) -> set[nn.Module]:
    """Return the modules in ``module`` that run in float32 now, and all inside of them."""
    return {inner for part in module.modules() if _KEY in vars(part) for inner in part.modules()}


def _run(module: nn.Module, state: PrecisionState, plain: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Stands in for ``module.forward``, which is ``plain``."""
    if torch.compiler.is_compiling():
        _note_compiled(type(module))
    else:
        state.has_run = True
    device_type = state.device_types[-1]
    if not torch.is_autocast_enabled(device_type):
        return plain(*args, **kwargs)
    given = [leaf.dtype for value in (*args, *kwargs.values()) for leaf in iterate_leaves(value) if _is_low(leaf)]
    if given:
        args = tuple(cast_where(_is_low, torch.float32, value) for value in args)
        kwargs = {name: cast_where(_is_low, torch.float32, value) for name, value in kwargs.items()}
    with torch.autocast(device_type, enabled=False):
        output = plain(*args, **kwargs)
    is_cast_back = given and not isinstance(module, LossBase)
    return cast_where(_is_wide, given[0], output) if is_cast_back else output


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _note_compiled(kind: type[nn.Module]) -> bool:
    """Called when code is compiled, not when it runs: a flag that compiled code sets is refused within checkpoints."""
    _compiled.add(kind)
    return True


def _is_low(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype in _LOW


def _is_wide(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.dtype == torch.float32 and leaf.dim() > 0


def _find_callable(module: nn.Module) -> list[nn.Module]:
    """The module, or in the place of one that is never called itself, its members."""
    if plain_class_forward(module) is not nn.Module.forward or has_own_forward(module):
        return [module]
    return [member for child in module.children() for member in _find_callable(child)]


def _refuse_unchangeable(module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):  # traced ones too
        name = getattr(module, "original_name", type(module).__name__)
        raise ValueError(
            f"module {name} cannot change its precision: it is scripted or traced. Script or trace it afterwards."
        )
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():  # it changes its class by itself
        raise ValueError(
            f"module {type(module).__name__} cannot change its precision before it knows its sizes: run the model on "
            "one batch first."
        )


# Keep the outputs of LayerNorm and RMSNorm in 16 bit under autocast.
#
# Autocast runs them in float32: the float32 input of each stays alive until backward, and what follows casts the output
# to 16 bit, each reader its own copy. Here input and output are 16 bit, while the kernels still sum in float32
# (MosaicML Composer's "Low Precision LayerNorm"). A pre-norm transformer block saves 4 bytes per element of B*T*D, 2
# for each norm, and 2 more for each further layer that reads a norm's output.
#
# The input is rounded before the statistics are taken: outputs differ by about the rounding of the dtype. Where norms
# come last (BERT), their output is the residual stream, which then is 16 bit as well. In float16 an input above 65504
# becomes infinite and the output NaN: run such a norm in float32.
#
# Measured on a CPU, whose RMSNorm is composed of several operators, and computes in float32 copies that it saves. A
# CPU's LayerNorm of a 16-bit input stays 16 bit under plain autocast, too; on CUDA it becomes float32.

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
