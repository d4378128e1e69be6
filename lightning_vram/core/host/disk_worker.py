"""The thread that writes offloaded tensors to a file and reads them back.

It does jobs in the order in which they came, needs nobody to get on with them, and holds no reference to who asked,
who may go away at any time. What goes wrong in it is raised by whoever asks next.
"""

import ctypes
import os
import queue
import threading
from collections.abc import Callable
from typing import BinaryIO

import torch
from torch import Tensor

from lightning_vram.core.host.arena import make_host_bytes
from lightning_vram.core.host.errors import OffloadError
from lightning_vram.core.host.transfers import Copies
from lightning_vram.private_names.torch.dispatch import without_dispatch

Job = Callable[[], None]


class DiskWorker:
    """The thread, and all it touches. It is started by the first job.

    Args:
        folder: Where the file is, for messages.
        file: Closed with the worker.
    """

    def __init__(self, folder: str, file: BinaryIO) -> None:
        self._folder = folder
        self._file = file
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_stopped = False
        self._copies: dict[Callable[[], Copies], Copies] = {}
        self._buffer: Tensor | None = None

    @property
    def has_buffer(self) -> bool:
        """Whether it took host memory."""
        return self._buffer is not None

    def submit(self, job: Job) -> None:
        """Do ``job`` after all that were submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="lightning_vram disk_path", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def fail(self, error: BaseException) -> None:
        """Note what went wrong; the first counts."""
        self._error = self._error or error

    def check_error(self) -> None:
        """Raise what went wrong in the thread."""
        if self._error is not None:
            raise OffloadError(
                f"disk_path={self._folder!r}: offloaded activations could not be written or read ({self._error}). "
                "This step is lost, and so is each further one until it is closed; name a folder on another disk."
            ) from self._error

    def check(self) -> None:
        """Raise what went wrong in the thread, or that it is gone."""
        self.check_error()
        if self._is_stopped or (self._thread is not None and not self._thread.is_alive()):
            raise OffloadError(f"disk_path={self._folder!r}: closed already, what was offloaded there is gone.")

    def stop(self, *, wait: bool = True) -> None:
        """End the thread and close the file. What is not written yet will not be.

        Args:
            wait: Whether to return when that is done. Not in a finalizer: the garbage collector calls it in the midst
                of anything, even of what a thread does with the lock that waiting needs.
        """
        if not self._is_stopped:
            self._is_stopped = True
            if self._thread is None or not self._thread.is_alive():
                self._clean_up()
            else:
                self._jobs.put(None)
        if wait and self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def copies(self, make: Callable[[], Copies]) -> Copies:
        """Return the thread's own copies for what ``make`` stands for, a device.

        Those of the training step are not made for two threads.
        """
        if make not in self._copies:
            self._copies[make] = make()
        return self._copies[make]

    def buffer(self, size: int, *, pin_memory: bool) -> Tensor:
        """Return the thread's own staging buffer: it never waits for one of the others."""
        if self._buffer is None:
            self._buffer = make_staging(size, pin_memory=pin_memory)
        return self._buffer

    def write(self, buffer: Tensor, length: int, position: int) -> None:
        """Write the first bytes of ``buffer``."""
        view = _memory(buffer, length)
        while view and not self._is_stopped:  # a closed file is not worth the wait
            written = os.pwrite(self._file.fileno(), view, position)
            if written == 0:
                raise OSError(f"nothing can be written at byte {position}")
            view, position = view[written:], position + written

    def read(self, buffer: Tensor, length: int, position: int) -> None:
        """Read into the first bytes of ``buffer``."""
        view = _memory(buffer, length)
        while view:
            num_read = os.preadv(self._file.fileno(), [view], position) if not self._is_stopped else 0
            if num_read == 0:
                raise OSError(f"the file ends at byte {position}")
            view, position = view[num_read:], position + num_read

    def _serve(self) -> None:
        try:
            with torch.no_grad():
                while (job := self._jobs.get()) is not None:
                    try:
                        job()
                    except BaseException as error:
                        self.fail(error)
                    del job
        finally:
            self._clean_up()  # here: a file that is closed under a write may have become another one

    def _clean_up(self) -> None:
        self._buffer = None
        self._copies.clear()
        self._file.close()


def make_staging(size: int, *, pin_memory: bool) -> Tensor:
    """Return a staging buffer, which nobody counts as memory of the device."""
    with without_dispatch():
        return make_host_bytes(size, pin_memory=pin_memory)


def _memory(buffer: Tensor, length: int) -> memoryview:
    """Return the bytes of ``buffer`` without NumPy."""
    return memoryview((ctypes.c_char * length).from_address(buffer.data_ptr())).cast("B")
