"""The process of one item: forked, with its output in a file, and gone when the item is done."""

import faulthandler
import gc
import os
import resource
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

import torch

from tests.benchmarks.gpu_day.items import Item, Job, Setting, open_device
from tests.benchmarks.gpu_day.results import DeviceLostError, Report
from tests.benchmarks.measure import describe_error, describe_machine

DEVICE_LOST = 3


def start(item: Item, job: Job, log: Path) -> int:
    """Begin the item in another process; return its id, which is that of its session as well."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _become(item, job, log)
    return pid


def _become(item: Item, job: Job, log: Path) -> NoReturn:
    try:
        os.setsid()  # what it starts can be found by its session
        with log.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if job.is_fresh:
            tiny = ["--dry-run"] if job.is_tiny else []
            options = ["--device", job.device, "--output", str(job.folder), *tiny, "--work", item.name]
            os.execv(sys.executable, [sys.executable, "-m", "tests.benchmarks.gpu_day", *options])
        work(item, job)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def work(item: Item, job: Job) -> NoReturn:
    """Run the item in this process and end it: no destructor of a library can hang."""
    faulthandler.enable(2)  # a signal from the parent shows where all threads are
    warnings.simplefilter("ignore")
    # for results to the bit; read when the device is seen for the first time
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for backend in ("GLOO", "NCCL"):  # one process, perhaps on a machine without network
        os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo")
    if item.shares:  # its neighbours need the cores
        torch.set_num_threads(1)
    setting = Setting(open_device(job.device), job.is_tiny)
    gc.freeze()  # what is imported stays: each collection would walk through it for a quarter of a second
    report = Report(job.folder, item.name, setting.device, item.row_seconds)
    start = time.perf_counter()
    code = 0
    try:
        report.set(group=item.group, is_tiny=job.is_tiny, machine=describe_machine(setting.device))
        item.run(setting, report)
        report.set(status="done", seconds=round(time.perf_counter() - start, 1))
    except DeviceLostError:
        code = DEVICE_LOST
    except Exception as error:
        report.set(status="failed", **describe_error(error))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
