"""Tell an activation that what it gets has been activated already, by the norm before it."""

from dataclasses import dataclass, field

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass
class Handover:
    """Outputs on their way from norms to one activation. By storage, not tensor: FSDP2 hands on an alias."""

    _under_way: list[StorageWeakRef] = field(default_factory=list)
    _lost: bool = False

    def give(self, output: Tensor) -> None:
        """Note that ``output`` is activated."""
        self._forget_expired()
        self._under_way.append(_refer_to(output))

    def take(self, input: Tensor) -> bool:
        """Whether ``input`` was given, once."""
        if not self._under_way:
            return False
        storage = _refer_to(input)
        if storage in self._under_way:
            self._under_way.remove(storage)
            return True
        self._forget_expired()
        return False

    def end_step(self) -> bool:
        """Forget what is under way. Returns whether an output was given and never taken."""
        was_lost, self._under_way = self._lost or bool(self._under_way), []
        self._lost = False
        return was_lost

    @property
    def is_pending(self) -> bool:
        """Whether an output is alive that never arrived."""
        return bool(self._under_way)

    def _forget_expired(self) -> None:
        """Forget outputs that never arrived, because a forward was interrupted."""
        self._lost = self._lost or any(storage.expired() for storage in self._under_way)  # type: ignore[no-untyped-call]
        self._under_way = [storage for storage in self._under_way if not storage.expired()]  # type: ignore[no-untyped-call]


def _refer_to(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
