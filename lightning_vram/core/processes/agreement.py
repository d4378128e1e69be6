"""Other ranks: small decisions that all take together on the host, and errors that all raise."""

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class RankAgreementError(RuntimeError):
    """A rank did not take part in a decision."""


class RankAgreement:
    """Agree on integers over all ranks, over gloo in a group of its own.

    So a vote blocks on no device, mixes with no collective of the training, and if a rank never comes it ends in an
    error after a timeout rather than in a hang. A vote between two processes of one machine takes some 0.1 ms. Making
    one is a collective over all ranks, and so is each call of :meth:`largest` and :meth:`smallest`: with as many values
    on every rank, in the same order. Without ``torch.distributed``, or with one rank, nothing is sent. After an error
    the group is unusable: every further call raises ``RankAgreementError`` at once, on the other ranks too.

    ``timeout=None`` waits 30 minutes for the slowest rank, as ``torch.distributed`` does: a rank may compile, or write
    a checkpoint, while the others wait.

    Example:
        >>> RankAgreement().largest(3, 1)
        (3, 1)
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        if timeout is not None and timeout <= timedelta():
            raise ValueError(f"RankAgreement(timeout) must be positive, got {timeout}.")
        self._timeout = timedelta(minutes=30) if timeout is None else timeout
        self._failure: str | None = None
        self._group: dist.ProcessGroup | None = None
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return
        try:
            self._group = dist.new_group(backend="gloo", timeout=self._timeout)
        except RuntimeError as error:
            raise self._failed(self._timeout) from error
        # A rank whose own connections are made could use and close the group while another still connects, which then
        # fails as if that rank had crashed (gloo's "connectFullMesh"). Nobody has a first result before all are there.
        self.largest(0)

    @property
    def is_alone(self) -> bool:
        """Whether there is only one rank."""
        return self._group is None and self._failure is None

    def largest(self, *values: int, timeout: timedelta | None = None) -> tuple[int, ...]:
        """Return the largest of each value (at most 64 bits) over the ranks; ``timeout`` can only be shorter."""
        return self._begin(values, dist.ReduceOp.MAX, timeout)() if not self.is_alone else values

    def smallest(self, *values: int, timeout: timedelta | None = None) -> tuple[int, ...]:
        """Find the smallest of each value over the ranks: see :meth:`largest`."""
        return self._begin(values, dist.ReduceOp.MIN, timeout)() if not self.is_alone else values

    def begin_largest(self, *values: int) -> Callable[[], tuple[int, ...]]:
        """Begin to find the largest of each value; ranks go on meanwhile. All begin and end decisions in one order.

        Returns a function that waits for the other ranks, if it has to, and returns the result of :meth:`largest`.
        """
        return self._begin(values, dist.ReduceOp.MAX, None) if not self.is_alone else lambda: values

    def gather(self, value: Any) -> list[Any]:
        """Collect one small value of each rank, which can be pickled, on all ranks, in their order."""
        if self.is_alone:
            return [value]
        if self._failure is not None or self._group is None:
            raise RankAgreementError(self._failure)
        values: list[Any] = [None] * dist.get_world_size(self._group)
        try:
            dist.all_gather_object(values, value, group=self._group)
        except RuntimeError as error:
            raise self._failed(self._timeout) from error
        return values

    def close(self) -> None:
        """Destroy the group; no collective. Calling it again does nothing."""
        group, self._group = self._group, None
        if group is None:
            return
        self._failure = self._failure or "The agreement between ranks was closed."
        if dist.is_initialized():  # else all groups are gone already
            dist.destroy_process_group(group)

    def _begin(
        self, values: tuple[int, ...], operation: "dist.ReduceOp.RedOpType", timeout: timedelta | None
    ) -> Callable[[], tuple[int, ...]]:
        if self._failure is not None or self._group is None:
            raise RankAgreementError(self._failure)
        if not values:
            return lambda: ()
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
        options = dist.AllreduceOptions()
        options.reduceOp = operation  # type: ignore[assignment]  # the stub knows the class only, not its values
        options.timeout = min(timeout or self._timeout, self._timeout)  # dist.all_reduce knows no timeout of its own
        try:
            work = self._group.allreduce([tensor], options)
        except RuntimeError as error:
            raise self._failed(options.timeout) from error
        return partial(self._end, work, tensor, options.timeout)

    def _end(self, work: "dist.Work", tensor: Tensor, timeout: timedelta) -> tuple[int, ...]:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failed(timeout) from error
        return tuple(tensor.tolist())

    def _failed(self, timeout: timedelta) -> RankAgreementError:
        self._failure = (
            f"Rank {dist.get_rank()} waited for a decision of all ranks, but another rank did not answer within "
            f"{timeout.total_seconds():g} s or has died. See the log of that rank."
        )
        return RankAgreementError(self._failure)
