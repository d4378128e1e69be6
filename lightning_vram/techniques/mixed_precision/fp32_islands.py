"""Run some modules in float32 while the rest of the model runs under autocast.

For what 16 bits break: a router's softmax, a physics term, a head whose logits overflow in float16. What comes in is
cast to float32, autocast is off inside, what goes out is cast back. It costs the 16-bit speed and the memory of those
modules: their activations take twice the bytes. What autocast runs in float32 anyway (losses, softmax and norms on
CUDA) needs no island. What ``forward`` writes into a list, dict or dataclass that holds 16-bit tensors, or into such a
tensor, its caller does not see.

In compiled code the backward runs under autocast like the forward around it, islands included: so torch has it
unless ``torch._functorch.config.backward_pass_autocast`` is ``"off"``.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from lightning_vram.core.surgery.class_swap import has_own_forward, plain_class_forward
from lightning_vram.core.tensors.nests import cast_where, iterate_leaves
from lightning_vram.private_names.torch.modules import LossBase
from lightning_vram.techniques.mixed_precision.precision_swaps import PrecisionState, PrecisionSwap, PrecisionSwaps

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
