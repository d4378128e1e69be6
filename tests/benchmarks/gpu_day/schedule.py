"""Runs items one after the other, as long as they fit into the time of a call; the next call goes on."""

import contextlib
import ctypes
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from tests.benchmarks.gpu_day import results
from tests.benchmarks.gpu_day.items import Item, Job
from tests.benchmarks.gpu_day.worker import start
from tests.benchmarks.measure import Row

HOST_RESERVE_BYTES = 4 << 30  # less than that, and the machine ends a process of its own choice
NUM_LOG_LINES = 25
NOT_INITIALIZED = 3  # CUDA_ERROR_NOT_INITIALIZED


def run_items(items: Iterable[Item], job: Job, minutes: float, is_wanted: Callable[[Item], bool]) -> list[str]:
    """Run items in their order, and leave out those that are done, not wanted, or too long for what is left.

    Args:
        items: In the order of their worth.
        job: How they are run.
        minutes: Length of the call.
        is_wanted: Asked right before an item would start.

    Returns:
        Names of those that found no time.
    """
    end = time.monotonic() + 60 * minutes
    late = []
    if not job.is_fresh and _is_cuda_initialized():
        print("an import has opened the driver: processes start anew instead of forking")
        job = replace(job, is_fresh=True)
    for item in items:
        result = results.read(job.folder, item.name)
        if (result is not None and result["status"] in results.FINAL) or not is_wanted(item):
            continue
        if not job.is_tiny and (missing := item.host_bytes - _read_available_bytes()) > 0:
            print(f"{item.name}: not run, {missing >> 30} GiB of host memory are missing", flush=True)
        elif time.monotonic() + item.estimate > end:
            late.append(item.name)
        else:
            run_item(item, job, end)
            if job.gathered is not None:
                results.gather(job.folder, job.gathered)
    return late


def run_item(item: Item, job: Job, end: float) -> results.Result:
    """Run one item; where its process dies, another goes on behind the row that killed it.

    Args:
        item: What is run.
        job: How.
        end: When the call is over, by ``time.monotonic()``.
    """
    begin, num_rows = time.monotonic(), -1
    limit = min(begin + item.limit, end)
    print(f"{item.name}: about {item.estimate:.0f} s", end="", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log")
        while True:
            reason = _wait(start(item, job, log), limit, end)
            result = results.read(job.folder, item.name) or {"status": "running", "rows": [], "at": None}
            if reason is None:
                break
            _note_death(result, reason, log)
            is_over = result["status"] == "cut" or len(result["rows"]) <= num_rows or time.monotonic() > limit
            num_rows = len(result["rows"])
            results.write(job.folder, item.name, result)
            if is_over:
                break
    num_errors = sum("error" in row for row in result["rows"])
    print(f", {time.monotonic() - begin:.0f} s: {result['status']}, {num_errors} errors", flush=True)
    return result


def _note_death(result: results.Result, reason: str, log: Path) -> None:
    """Write down how the process ended: in the row that it was at, or for the item."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
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


def _wait(pid: int, limit: float, end: float) -> str | None:
    """Wait for a process until ``limit``; return why it died, or ``None`` if it ended by itself and well."""
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return None if status == 0 else _describe_status(status)
        if time.monotonic() > limit:
            _kill(pid)
            return "end of the call" if limit >= end else "time limit"
        if _read_available_bytes() < HOST_RESERVE_BYTES:
            _kill(pid)
            return "out of host memory"
        time.sleep(0.05)


def _describe_status(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _kill(pid: int) -> None:
    """End a process and those that it started; it may say first where it was."""
    os.kill(pid, signal.SIGABRT)
    for _ in range(40):
        if os.waitpid(pid, os.WNOHANG)[0]:
            break
        time.sleep(0.05)
    else:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError):  # nobody is left
        os.killpg(pid, signal.SIGKILL)


def _read_available_bytes() -> int:
    """Host memory that can be taken without paging."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/meminfo has no MemAvailable")


def _is_cuda_initialized() -> bool:
    """Whether this process has opened the driver, which its forks could not use."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED
