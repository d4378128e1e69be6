"""Errors of a collective whose peer is gone."""

import logging
import re
import socket
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType

from lightning_vram.core.processes.agreement import RankAgreementError
from lightning_vram.memory.device.out_of_memory import is_out_of_memory

# Nobody answered in time: the peer may still live. Of gloo, of the store, and of NCCL's watchdog.
_SILENT = re.compile(
    r"Timed out waiting \d"  # gloo: "... 3000ms for recv operation to complete"
    r"|Timed out after \d+ seconds waiting for clients"  # TCPStore, on rank 0
    r"|timed out connecting(?!.*refused)"
    r"|Application timeout caused pair closure"  # gloo: another thread of this rank waited too long
    r"|(failed to pass|timed out in) monitoredBarrier"
    r"|wait timeout after \d+ ?ms"  # TCPStore
    r"|client socket has timed out"
    r"|Socket Timeout"
    r"|Watchdog caught collective operation timeout"
    r"|ran for \d+ milliseconds before timing out"
    r"|NCCL operations have failed or timed out",
    re.IGNORECASE,
)
# A connection broke: the process behind it is gone. Searched second, since a timeout on one pair breaks the others.
_BROKEN = re.compile(
    r"Connection (reset|closed) by (remote )?peer"
    r"|Connection refused"
    r"|Broken pipe"
    r"|Connection was likely closed"  # TCPStore: "failed to recv, got 0 bytes ..."
    r"|Socket closed"
    r"|ncclRemoteError|remote process (exited|exiting)"
    r"|NCCL communicator was aborted",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"\[([0-9a-f.:]+)\]:\d+|\b(\d+\.\d+\.\d+\.\d+)<\d+>", re.IGNORECASE)  # gloo; NCCL
_log = logging.getLogger(__name__)
_LOOK = "See the log of the rank that failed first"


class LostPeerError(RuntimeError):
    """Another rank died, hangs, or runs other collectives than this one."""


class naming_lost_peers:  # noqa: N801 - a context, used as one
    """A context in which the loss of another rank is raised, and logged, as a :class:`LostPeerError`.

    When a rank dies, its own log says why, and the log of every other rank ends in "Connection reset by peer". When one
    hangs, the others end in "Timed out waiting 1800000ms", half an hour later. Neither names a rank, a step or a cause:
    ``describe`` is called after an error and says where the run is. The backend's error stays as the cause. It has no
    state: it may be entered again and again, and nested: then the innermost one names the place. Only a
    ``RuntimeError`` with the words of a ``torch.distributed`` backend or its store is taken for a lost peer; CUDA out
    of memory, and all else, passes unchanged.

    Example:
        >>> with naming_lost_peers(0, 2, lambda: "step 12, backward", timedelta(minutes=30)):
        ...     pass
    """

    def __init__(self, rank: int, world_size: int, describe: Callable[[], str], timeout: timedelta) -> None:
        self._rank = rank
        self._world_size = world_size
        self._describe = describe
        self._timeout = timeout

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Log and raise a :class:`LostPeerError` in place of the backend's error; let any other pass."""
        if error is None or not isinstance(error, RuntimeError) or isinstance(error, LostPeerError):
            return
        text = str(error)
        if isinstance(error, RankAgreementError):  # the backend's words are what it was raised from
            text = f"{text} {error.__cause__}"
        if _SILENT.search(text):
            message = self._silent()
        elif _BROKEN.search(text):
            message = self._broken(text)
        else:
            return
        if not is_out_of_memory(error):  # NCCL, too, reports memory that ran out as a failed system call
            _log.error(message)  # at once: srun and torchrun end this process, too, maybe before Python's traceback
            raise LostPeerError(message) from error

    def _silent(self) -> str:
        return (
            f"{self._here()} waited {self._timeout.total_seconds():g} s for another rank, which did not answer: "
            f"it hangs, has died, or runs other collectives. {_LOOK}; if it is only slow, increase `timeout=`."
        )

    def _broken(self, text: str) -> str:
        found = _ADDRESS.search(text)
        peer = f"a process on {found[1] or found[2]}" if found else "another rank"
        return (
            f"{self._here()} lost {peer}: the connection broke. It failed with an error, or was killed, for example "
            f"for lack of host memory. {_LOOK}."
        )

    def _here(self) -> str:
        return f"Rank {self._rank} of {self._world_size} on {socket.gethostname()}, {self._describe()},"
