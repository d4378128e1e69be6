"""What one operator returned, kept until its layer runs again."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_vram.core.hooks.saved_output import SavedOutput
from lightning_vram.core.tensors.nests import Rebuild, flatten_output
from lightning_vram.core.tensors.versions import alias, storage_address, version_of


class KeptResult:
    """The result of one call of an operator; one that is not kept has to be computed again."""

    __slots__ = (
        *("_kept", "_leaves", "_num_saves", "_random_states", "_rebuild", "_watched"),
        *("addresses", "function", "signature"),
    )

    def __init__(self, function: Any, signature: Any, num_saves: int) -> None:
        self.function = function
        self.signature = signature
        self.addresses: set[int] = set()
        self._num_saves = num_saves  # tensors that autograd had saved in the layer before it ran
        self._leaves: list[Any] | None = None
        self._watched: list[tuple[Tensor, int]] = []  # other tensors on its memory, with their versions
        self._kept: list[Any] | None = None  # from the end of the first run on: a backward inside of it finds nothing
        self._rebuild: Rebuild = list
        self._random_states: list[tuple[Callable[[Any], Any], Any]] = []

    def keep(self, output: Any, random_states: list[tuple[Callable[[Any], Any], Any]]) -> None:
        """Keep ``output``, and where generators stood after it."""
        leaves, self._rebuild = flatten_output(output)
        self._leaves = [alias(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._random_states = random_states
        self.addresses = {storage_address(leaf) for leaf in leaves if isinstance(leaf, Tensor)} - {0}
        for leaf in self._leaves:
            if isinstance(leaf, Tensor):
                self._watched.append((leaf, version_of(leaf)))

    def watch(self, tensor: Tensor) -> None:
        """Give it up as soon as ``tensor``, which shares its memory, is written to."""
        self._watched.append((alias(tensor), version_of(tensor)))

    def give_up(self) -> None:
        """Do not keep it: it was overwritten, and is made and overwritten again in the second run."""
        self._leaves = None
        self._watched = []

    def settle(self, num_saves: int) -> bool:
        """Save it, unless the layer wrote to it or saved nothing after it: the second run ends before then."""
        leaves, self._leaves = self._leaves, None
        watched, self._watched = self._watched, []
        is_intact = all(version_of(tensor) == version for tensor, version in watched)
        if leaves is None or self._num_saves == num_saves or not is_intact:
            return False
        others = [tensor for tensor, _ in watched]
        self._kept = [SavedOutput(leaf, others) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return True

    def forget(self) -> None:
        """Do not keep it any longer: if it is wanted once more, it has to be computed again."""
        self._kept, self._random_states = None, []

    def give(self) -> tuple[Any] | None:
        """Return what the operator returned, in a tuple; ``None`` if it has to run again."""
        if self._kept is None:
            return None
        leaves = []
        for kept in self._kept:
            leaf = kept.give() if isinstance(kept, SavedOutput) else kept
            if leaf is None and isinstance(kept, SavedOutput):
                return None  # overwritten after the layer: as if it had not been kept
            leaves.append(alias(leaf) if isinstance(leaf, Tensor) else leaf)
        for write, state in self._random_states:
            write(state)
        return (self._rebuild(leaves),)
