"""A saved tensor that its operator may still write."""

from collections.abc import Callable

from torch import Tensor

from lightning_vram.core.hooks.stage import Taken
from lightning_vram.core.tensors.versions import alias


class LateHandle(Taken):
    """Holds a tensor until its operator has finished, then what ``take`` returns for it (``None``: it stays)."""

    __slots__ = ("_take", "_taken", "_tensor")

    def __init__(self, tensor: Tensor, take: Callable[[Tensor], Taken | None]) -> None:
        self._tensor: Tensor | None = alias(tensor)
        self._take: Callable[[Tensor], Taken | None] | None = take
        self._taken: Taken | None = None

    def finish(self) -> None:
        """Take it over now: the operator that saved it is through."""
        if self._take is not None and self._tensor is not None:
            take, self._take = self._take, None
            self._taken = take(self._tensor)
            if self._taken is not None:
                self._tensor = None

    @property
    def is_snapshot(self) -> bool:  # noqa: D102
        return self._taken is not None

    @property
    def num_bytes(self) -> int:  # noqa: D102
        return self._tensor.nbytes if self._tensor is not None else self._whole.num_bytes

    def before_write(self) -> None:  # noqa: D102
        self.finish()
        if self._taken is not None:
            self._taken.before_write()

    def give(self) -> Tensor:  # noqa: D102
        return self._tensor if self._tensor is not None else self._whole.give()

    @property
    def _whole(self) -> Taken:
        assert self._taken is not None
        return self._taken
