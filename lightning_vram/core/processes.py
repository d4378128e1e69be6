"""This process in a job: a clean exit, the NUMA node of its device, and the signals by which it is stopped.

Python runs a handler between two bytecodes of the main thread, which may hold locks or be within a collective: to wait
for another rank there can hang the job (Lightning#21406). So handlers only record the signal, and code that can act on
it asks for it. May import: core.ranks and what is below it, memory.
"""

import atexit
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_vram.core.ranks import RankAgreement, gather_objects
from lightning_vram.memory import host
from lightning_vram.memory.device.accelerators import pci_address
from lightning_vram.private_names.torch import bind_threads

# Destroying a group does not join gloo's threads while anybody (a wrapper, a mesh) still refers to it. One that drops
# a tensor and asks for the interpreter's lock when Python is already ending would abort the process; torch has no call
# that waits for them, and a barrier at exit would wait for peers that are gone.
_SETTLE_SECONDS = 0.1


def leave_group_at_exit() -> None:
    """Destroy the process group when Python ends: else a process that has finished may abort, and fail the job."""
    atexit.unregister(leave_group)
    atexit.register(leave_group)


def leave_group() -> None:
    """Destroy the process group and all groups made from it. Does nothing if there is none; no collective."""
    atexit.unregister(leave_group)
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(_SETTLE_SECONDS)


@dataclass(frozen=True)
class NumaBinding:
    """All threads of this process, bound to the NUMA node of its device until :meth:`undo`."""

    cores_before: frozenset[int]
    num_threads: int  # that this rank can keep busy while the other ranks of the machine do the same
    description: str

    def undo(self) -> None:
        """Let the threads run where they ran before."""
        bind_threads(logical_cpu_indices=set(self.cores_before))


def bind_to_node_of(
    device: torch.device, local_world_size: int, *, idle_nodes_ok: bool = False, root: Path = Path("/")
) -> NumaBinding | None:
    """Bind the threads of this rank, and the host memory that they write to first, to its device's node. A collective.

    ``None`` if nothing has changed: there is one node, the device does not name its own, no core there may be used, the
    process is bound already, or a node has no rank and ``idle_nodes_ok`` is false: its cores and memory bandwidth would
    be idle. ``root`` is where ``proc`` and ``sys`` are mounted.
    """
    own, address = host.own_cores(), pci_address(device)
    usable: dict[int | None, frozenset[int]] = {node: cores & own for node, cores in host.cores_by_node(root).items()}
    node = host.node_of_pci_device(address, root) if address is not None else None
    cores = usable.get(node) or own
    claims = [claim for claim in gather_objects((host.machine_name(), node, cores)) if claim[0] == host.machine_name()]
    nodes = [other for _, other, _ in claims]
    is_idle = any(of_node and each not in nodes for each, of_node in usable.items())
    if cores == own or (is_idle and not idle_nodes_ok):
        return None
    num_sharing = sum(not cores.isdisjoint(of_rank) for _, _, of_rank in claims)
    num_threads = host.cores_of_rank(local_world_size, root)  # before: then it counts those of all nodes
    try:
        bind_threads(logical_cpu_indices=set(cores))
    except OSError:
        return None
    text = "Threads and host memory of each rank are bound to the NUMA node of its device"
    num_threads = max(1, min(num_threads, len(cores) // num_sharing))
    return NumaBinding(own, num_threads, f"{text}: the ranks of this machine to {', '.join(map(str, nodes))}.")


# Of this process, so that the next run acts on what arrived before it began.
_arrived: set[int] = set()
_handlers_before: dict[signal.Signals, Callable[[int, Any], Any] | int | None] = {}


def note_signal(number: int, frame: Any = None) -> None:
    """The handler."""
    _arrived.add(number)


class StopSignals:
    """Records which of ``signals`` (the least important first) arrive while they are installed."""

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self.signals = tuple(signals)

    @property
    def strongest(self) -> int:
        """The place in ``signals``, from 1, of the most important that arrived; 0 if there was none."""
        return max((place for place, one in enumerate(self.signals, 1) if one in _arrived), default=0)

    def install(self) -> bool:
        """Record signals from now on, also blocked ones; return success: only the main thread can."""
        if threading.current_thread() is not threading.main_thread():
            return False
        for one in self.signals:
            if one not in _handlers_before:
                _handlers_before[one] = signal.signal(one, note_signal)
        self.unblock()
        return True

    def unblock(self) -> None:
        """Unblock the signals in this thread."""
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals)

    def remove(self, harmless: Sequence[signal.Signals] = ()) -> None:
        """Put the previous handlers back. Calling it again does nothing.

        ``harmless`` signals stay recorded if no handler is left: they would end the process.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for one, handler in list(_handlers_before.items()):
            if one in harmless and handler == signal.SIG_DFL:
                continue
            if signal.getsignal(one) == note_signal:
                signal.signal(one, signal.SIG_DFL if handler is None else handler)
            del _handlers_before[one]


class StopVote:
    """Votes on stop signals that all ranks take in step: sent when a batch begins, read when the next one does."""

    def __init__(self, agreement: RankAgreement, signals: StopSignals) -> None:
        self._agreement, self._signals = agreement, signals
        self._pending: Callable[[], tuple[int, ...]] | None = None
        self._strongest = 0
        self._num_left: float = 0

    @property
    def name(self) -> str:
        """The name of the signal that all ranks know of."""
        return self._signals.signals[self._strongest - 1].name

    def exchange(self) -> bool:
        """End the last vote, begin the next; return whether all ranks know of a signal. To be called equally often."""
        if self._agreement.is_alone:
            self._strongest = max(self._strongest, self._signals.strongest)
        elif not self._strongest:
            if self._pending is not None:
                (self._strongest,) = self._pending()
            self._pending = None if self._strongest else self._agreement.begin_largest(self._signals.strongest)
        return self._strongest > 0

    def limit(self, num_batches: float) -> None:
        """Agree on how often :meth:`exchange_limited` votes; infinity if the number of batches is unknown here."""
        if self._agreement.is_alone:
            self._num_left = math.inf
        else:
            (negative,) = self._agreement.largest(0 if math.isinf(num_batches) else -int(num_batches))
            self._num_left = -negative

    def exchange_limited(self) -> bool:
        """Vote as :meth:`exchange`, as long as all ranks come; then ``False``."""
        self._num_left -= 1
        return self._num_left >= 0 and self.exchange()


@contextmanager
def shielded_daemons(signals: Sequence[int]) -> Iterator[None]:
    """Let daemons of ``multiprocessing`` start with ``signals`` blocked; those of a fork server only if it starts now.

    A data loader worker that dies of a signal would end the training. Python ends daemons by SIGTERM: here SIGKILL.
    """
    start: Any = BaseProcess.start

    def start_shielded(process: Any) -> None:
        if not process.daemon:
            start(process)
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            if getattr(process, "_start_method", None) != "fork":
                resource_tracker.ensure_running()  # Python 3.11 would start it meanwhile, and unblock SIGTERM by that
            signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # a process begins with what its parent has blocked
            start(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        process._popen.terminate = process._popen.kill

    if hasattr(signal, "pthread_sigmask"):
        BaseProcess.start = start_shielded  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        BaseProcess.start = start  # type: ignore[method-assign]
