"""What is kept for the backward: for the operators that saved it, and for recipes that end on it."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_vram.core.hooks.stage import Taken
from lightning_vram.core.tensors.mask_bits import pack_bits, unpack_bits
from lightning_vram.core.tensors.versions import check_version, version_counter
from lightning_vram.private_names.torch.tensors import num_writes


class Kept:
    """A tensor that is kept for backward: saved by autograd, or the end of somebody's recipe, or both.

    Autograd's own users see it through :meth:`restore`, with autograd's rule that it must not have been overwritten.
    Recipes see what it held when it was kept: :meth:`make_private` copies it before it is overwritten.
    """

    __slots__ = ("__weakref__", "_copy", "is_end", "is_overwritten", "num_bytes", "tensor", "version")

    holds_memory = True  # of the tensor itself

    def __init__(self, tensor: Tensor, version: int) -> None:
        self.tensor = tensor  # an alias without grad_fn: the tensor itself would be a reference cycle through its node
        self.version = version
        self.num_bytes = tensor.nbytes
        self.is_end = False  # of a recipe
        self.is_overwritten = False  # before a recipe ended on it: none will
        self._copy: Tensor | None = None

    @property
    def is_exact(self) -> bool:
        """Whether it is read to the bit."""
        return True

    def restore(self) -> Tensor:
        """Return it to the operator that saved it. Raises ``RuntimeError`` as autograd does if it was overwritten."""
        check_version(self.tensor, self.version, self.tensor.shape)
        return self.tensor

    def read(self) -> Tensor:
        """Return what it held when it was kept."""
        if self._copy is not None:
            return self._copy
        if num_writes(self.tensor) != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} was overwritten between the training step and its "
                "backward, and dropped activations are recomputed from it. "
                "Overwrite it in the training step, or after the backward."
            )
        return self.tensor

    def before_write(self) -> None:
        """Copy it for the recipes that end on it: its memory is about to be overwritten."""
        if not self.is_end or self._copy is not None:
            self.is_overwritten = not self.is_end
            return
        self.copy()

    def copy(self) -> None:
        """Let recipes read what it holds now, whatever becomes of it."""
        self._copy = _copy(self.tensor)


class KeptElsewhere(Kept):
    """A tensor that another stage took over: a snapshot, which no write reaches."""

    holds_memory = False

    __slots__ = ("_shape", "_taken")

    def __init__(self, tensor: Tensor, taken: Taken) -> None:
        super().__init__(version_counter(tensor), num_writes(tensor))
        self._taken = taken
        self._shape = tensor.shape
        self.num_bytes = taken.num_bytes

    @property
    def is_exact(self) -> bool:  # noqa: D102
        return self._taken.is_exact

    def restore(self) -> Tensor:  # noqa: D102
        check_version(self.tensor, self.version, self._shape)
        return self._taken.give()

    def read(self) -> Tensor:  # noqa: D102
        return self._taken.give()

    def before_write(self) -> None:  # noqa: D102
        if self.is_end or self._taken.is_snapshot:
            self._taken.before_write()
        else:
            self.is_overwritten = True  # by the very operator that saves it, or by a later one

    def copy(self) -> None:  # noqa: D102
        return


class KeptMask(Kept):
    """A mask that is kept as bits, by itself or by another stage."""

    holds_memory = False

    __slots__ = ("_bits", "_device", "_shape", "_strides")

    def __init__(self, mask: Tensor, hand_on: Callable[[Tensor], Taken | None]) -> None:
        super().__init__(version_counter(mask), num_writes(mask))
        bits = pack_bits(mask)
        taken = hand_on(bits)
        self._bits = taken if taken is not None else bits
        self._shape, self._strides, self._device = mask.shape, mask.stride(), mask.device
        self.num_bytes = taken.num_bytes if taken is not None else bits.nbytes

    def restore(self) -> Tensor:  # noqa: D102
        check_version(self.tensor, self.version, self._shape)
        return self.read()

    def read(self) -> Tensor:  # noqa: D102
        like = torch.empty_strided(self._shape, self._strides, dtype=self.tensor.dtype, device=self._device)
        return unpack_bits(self._bits.give() if isinstance(self._bits, Taken) else self._bits, like)

    def before_write(self) -> None:  # noqa: D102
        return  # the bits are its own


def _copy(tensor: Tensor) -> Tensor:
    """Copy values and strides: the span of memory it covers, so that overlaps stay overlaps."""
    if tensor.is_neg() or tensor.is_conj() or tensor.numel() == 0:
        return tensor.resolve_conj().resolve_neg().clone()
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    span = tensor.as_strided((extent,), (1,), tensor.storage_offset()).clone()
    return span.as_strided(tensor.shape, tensor.stride(), 0)
