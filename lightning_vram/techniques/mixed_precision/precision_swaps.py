"""Let modules compute in another precision, by their class, in copies too, and for several who ask for it.

In which precision a module computes goes along with it, unlike what other techniques do: the copy that an average of
the weights runs, and the file that is loaded to predict, compute as the module did. Loading such a pickle takes this
package.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass

from torch import nn

from lightning_vram.core.surgery.class_swap import Run, restore_class, swap_class


@dataclass(frozen=True)
class PrecisionSwap:
    """A way to compute.

    Args:
        key: Its name: see :func:`~lightning_vram.core.surgery.class_swap.swap_class`.
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
