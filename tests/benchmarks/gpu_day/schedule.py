"""Runs items within the minutes of a call; the next call continues.

Items that measure time have the machine to themselves. Items that share run next to each other, up to
``MAX_SHARING`` at once.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.benchmarks.gpu_day import results
from tests.benchmarks.gpu_day.items import Item, Job, open_device
from tests.benchmarks.gpu_day.worker import start
from tests.benchmarks.measure import Row, read_driver

HOST_RESERVE = 1 / 32  # of the host's memory: below that the kernel kills a process of its own choice
MAX_SHARING = 14  # a core each
NUM_LOG_LINES = 25
NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED
_PARENT, _SESSION = 1, 3  # fields of /proc/PID/stat after the name


def run_items(items: Iterable[Item], job: Job, minutes: float, begin: float | None = None) -> list[str]:
    """Run items in their order, except those that are done or too long for the time left.

    Args:
        items: In the order of their worth.
        job: How they are run.
        minutes: Length of the call.
        begin: Start of the call by ``time.monotonic()``; now if ``None``.

    Returns:
        Names of items that found no time.
    """
    begin = time.monotonic() if begin is None else begin
    if not job.is_fresh and _is_cuda_initialized():
        print("an import has opened the driver: processes start anew instead of forking")
        job = replace(job, is_fresh=True)
    if job.device == "sim":
        begin += _build_simulated_device()
    late = []
    with tempfile.TemporaryDirectory() as folder, _open_driver(job):
        call = _Call(job, begin, begin + 60 * minutes, Path(folder))
        for item in items:
            result = results.read(job.folder, item.name)
            if result is not None and result["status"] in results.FINAL:
                continue
            call.wait_for_room(item)
            if not job.is_tiny and (missing := item.host_bytes - read_host_bytes("MemAvailable")) > 0:
                print(f"{item.name}: not run, {missing >> 30} GiB of host memory are missing", flush=True)
            elif time.monotonic() + item.estimate > call.end:
                late.append(item.name)
            else:
                call.start(item)
        call.wait_for_all()
    return late


def _build_simulated_device() -> float:
    """Let a compiler build it before items start, whose limits know nothing of compilers; return the seconds."""
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        open_device("sim")
        os._exit(0)
    os.waitpid(pid, 0)
    return time.monotonic() - start


@contextlib.contextmanager
def _open_driver(job: Job) -> Iterator[None]:
    """Keep the driver open between items: without a process that uses it, each one would load it again."""
    if job.device != "cuda":
        yield
        return
    read_driver()  # once for all items, which inherit it
    watcher = None
    with contextlib.suppress(OSError):
        watcher = subprocess.Popen(["nvidia-smi", "dmon", "-d", "60"], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        if watcher is not None:
            watcher.kill()
            watcher.wait()


@dataclass
class _Running:
    item: Item
    pid: int
    begin: float
    limit: float
    log: Path
    num_rows: int = -1  # when the process before this one died


class _Call:
    """The items that run now."""

    def __init__(self, job: Job, begin: float, end: float, logs: Path) -> None:
        self.end = end
        self._job, self._begin, self._logs = job, begin, logs
        self._running: list[_Running] = []

    def wait_for_room(self, item: Item) -> None:
        """Wait until ``item`` may start: alone, or next to others that share."""
        while self._running and not (
            item.shares and len(self._running) < MAX_SHARING and all(one.item.shares for one in self._running)
        ):
            self._look()

    def wait_for_all(self) -> None:
        while self._running:
            self._look()

    def start(self, item: Item) -> None:
        begin, log = time.monotonic(), self._logs / str(time.monotonic_ns())
        limit = min(begin + self._job.limit_of(item), self.end)
        self._running.append(_Running(item, start(item, self._job, log), begin, limit, log))

    def _look(self) -> None:
        """Look after each process once; where one dies, another continues after the row that killed it."""
        for one in tuple(self._running):
            is_over, reason = self._watch(one)
            if not is_over:
                continue
            result = results.read(self._job.folder, one.item.name) or {"status": "running", "rows": [], "at": None}
            if reason is not None:
                _note_death(result, reason, one.log)
                results.write(self._job.folder, one.item.name, result)
                if result["status"] != "cut" and len(result["rows"]) > one.num_rows and time.monotonic() < one.limit:
                    one.num_rows = len(result["rows"])
                    one.pid = start(one.item, self._job, one.log)
                    continue
            self._running.remove(one)
            self._finish(one, result)
        time.sleep(0.02)

    def _watch(self, one: _Running) -> tuple[bool, str | None]:
        """Return whether a process is over, and why it died; ``None`` if it ended well."""
        done, status = os.waitpid(one.pid, os.WNOHANG)
        if done:
            _end(_family(one.pid))
            return True, None if status == 0 else _describe_status(status)
        if time.monotonic() > one.limit:
            _kill(one.pid)
            return True, "end of the call" if one.limit >= self.end else "time limit"
        if read_host_bytes("MemAvailable") < HOST_RESERVE * read_host_bytes("MemTotal"):
            _kill(one.pid)
            return True, "out of host memory"
        return False, None

    def _finish(self, one: _Running, result: results.Result) -> None:
        now, num_errors = time.monotonic(), sum("error" in row for row in result["rows"])
        print(
            f"{now - self._begin:4.0f} s  {one.item.name}: {result['status']}, {num_errors} errors, "
            f"{now - one.begin:.0f} s of {one.item.estimate:.0f} s",
            flush=True,
        )
        if self._job.gathered is not None:
            results.gather(self._job.folder, self._job.gathered)


def _note_death(result: results.Result, reason: str, log: Path) -> None:
    """Record how the process ended: in the row it was at, or for the whole item."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    if any(line.startswith("Timeout (") for line in lines):  # to print where threads are can itself end in a crash
        reason = f"time limit of a row ({reason})"
    what: Row = {"error": reason, "traceback": [line[:300] for line in _last_words(lines)]}
    if reason == "end of the call":
        result |= {"status": "cut", "at": None}
    elif result.get("at"):
        result["rows"].append({"name": result["at"], **what})
        result |= {"status": "killed", "at": None}
    else:
        result |= {"status": "killed", **what}


def _last_words(lines: list[str]) -> list[str]:
    """The end of the output; where Python was stopped, the innermost calls, which it prints first."""
    stops = [number for number, line in enumerate(lines) if line.startswith(("Fatal Python error", "Timeout ("))]
    return lines[stops[-1] :][:NUM_LOG_LINES] if stops else lines[-NUM_LOG_LINES:]


def _describe_status(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _kill(pid: int) -> None:
    """End a process and everything it started; first it may print where it was."""
    family = _family(pid)
    os.kill(pid, signal.SIGABRT)
    for _ in range(40):
        if os.waitpid(pid, os.WNOHANG)[0]:
            break
        time.sleep(0.05)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    _end(family | _family(pid))


def _family(pid: int) -> set[int]:
    """Return the processes that ``pid`` started, directly or not, and all others of its session.

    Compilers have process groups of their own (ninja makes one for each), and outlive their parents.
    """
    parents, sessions = {}, {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[_PARENT])
            sessions[int(file.parent.name)] = int(fields[_SESSION])
    family = {pid, *(one for one, session in sessions.items() if session == pid)}
    while more := {one for one, parent in parents.items() if parent in family} - family:
        family |= more
    return family - {pid}


def _end(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def read_host_bytes(name: str) -> int:
    """A line of ``/proc/meminfo``: ``MemTotal``, or ``MemAvailable``, which can be taken without paging."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/meminfo has no {name}")


def _is_cuda_initialized() -> bool:
    """Whether this process has opened the driver, which its forks could not use."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED
