"""What stays of a layer's arguments until it runs again."""

import copy
from collections.abc import Sequence
from enum import Enum
from typing import Any

from torch import Tensor, nn

from lightning_vram.core.hooks.saved_output import SavedOutput
from lightning_vram.core.rollback.buffer_copies import differs
from lightning_vram.core.tensors.parameter_classes import PLAIN_TYPES
from lightning_vram.core.tensors.versions import version_of


def keep_argument(leaf: Any, overwrites_inputs: bool | None) -> Any:  # noqa: FBT001 - three states
    """Return what stands for an argument in the checkpoint.

    Args:
        leaf: The argument.
        overwrites_inputs: Whether the layer writes to its inputs; ``None`` before its first call.
    """
    if not isinstance(leaf, Tensor):
        return _copy_object(leaf)
    if leaf.is_inference():
        return _Held(leaf)  # cannot be saved for a backward, and cannot change
    if overwrites_inputs is None:
        return FirstInput(leaf)
    return _copy_tensor(leaf) if overwrites_inputs else leaf


def give_argument(leaf: Any, *, is_overwritten: bool | None) -> Any:
    """Return what the second run gets: it must not overwrite what is kept, a retained graph needs it again."""
    tensor = leaf.read() if isinstance(leaf, FirstInput | _Held) else leaf
    if not isinstance(tensor, Tensor):
        return _copy_object(tensor)
    return tensor.clone() if is_overwritten else tensor


def keep_attributes(leaves: Sequence[Any]) -> list[dict[str, Any]]:
    """Return what the caller has put on each argument that is a tensor, as ``tensor.name = ...`` does."""
    return [dict(vars(leaf)) if type(leaf) in PLAIN_TYPES else {} for leaf in leaves]


def give_attributes(leaf: Any, attributes: dict[str, Any]) -> Any:
    """Return ``leaf``, with its attributes if it is a new object: a copy, or what saved-tensor hooks gave back."""
    if attributes and not vars(leaf):
        vars(leaf).update(attributes)
    return leaf


class _Held:
    """A tensor that the checkpoint does not see as one."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def read(self) -> Tensor:
        return self._tensor


class FirstInput:
    """A tensor in a layer's first call, which may overwrite it: an in-place activation comes first in some layers.

    Neither the tensor nor a copy alone will do: the tensor may be gone after the call, and copies of all inputs of all
    layers may not fit. So both are kept while the layer runs, and the one that is needed from then on.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor
        self._version = version_of(tensor)
        self._copy: Tensor | None = _copy_tensor(tensor)  # what the layer found
        self._shape, self._requires_grad = tensor.shape, tensor.requires_grad
        self._saved: SavedOutput | None = None

    def is_overwritten(self) -> bool:
        """Whether it was written to since."""
        return version_of(self._now) != self._version or differs(self._now, self._copy)

    def settle(self) -> None:
        """Call after the layer's forward: keeps what the second run needs, under the hooks that are set."""
        needed = self._copy if self._copy is not None and self.is_overwritten() else self._now
        self._saved = SavedOutput(needed.detach())
        self._tensor = self._copy = None

    def read(self) -> Tensor:
        """Return what the layer found. Raises ``RuntimeError``, as autograd does, if it was overwritten since."""
        tensor = self._saved.give() if self._saved is not None else self._now
        if tensor is None:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"an input of shape {list(self._shape)} of a layer that is recomputed."
            )
        return tensor.detach().requires_grad_(self._requires_grad)

    @property
    def _now(self) -> Tensor:
        assert self._tensor is not None
        return self._tensor


def _copy_tensor(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _copy_object(leaf: Any) -> Any:
    """A shallow copy of an object that carries data, such as a graph or a dataclass; anything else as it is."""
    is_data = (
        hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor | nn.Module | type | Enum) and not callable(leaf)
    )
    if not is_data:
        return leaf
    try:
        return copy.copy(leaf)
    except Exception:  # an object that cannot be copied is used as it is
        return leaf
