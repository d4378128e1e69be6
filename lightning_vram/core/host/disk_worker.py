"""The thread that writes offloaded tensors to a file and reads them back."""

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_vram.core.host.arena import OffloadError, make_host_bytes
from lightning_vram.core.host.disk_file import DiskFile, bytes_of
from lightning_vram.core.host.transfers import Copies
from lightning_vram.core.host.worker import HostWorker, Ticket
from lightning_vram.private_names.torch.dispatch import without_dispatch


class DiskWorker(HostWorker):
    """The thread, and all that it uses; it closes the file when it ends, and holds no reference to its callers."""

    def __init__(self, file: DiskFile) -> None:
        self._file = file
        self._is_stopped = False
        self._copies: dict[Callable[[], Copies], Copies] = {}
        self.staging_buffer: Tensor | None = None
        super().__init__("lightning_vram disk_path", on_end=self._clean_up)

    def submit(self, job: Callable[[], None]) -> Ticket:
        """Run without gradients; raises ``OffloadError`` after an error, or when it is stopped."""
        self.check_alive()
        return super().submit(torch.no_grad()(job))

    def check(self) -> None:
        """Raise what went wrong in the thread."""
        if self._errors:
            raise OffloadError(
                f"{self._file.name}: offloaded activations could not be written or read ({self._errors[0]}). "
                "This step and all further steps of the run fail; name a folder on another disk."
            ) from self._errors[0]

    def check_alive(self) -> None:
        """Raise what went wrong in the thread, or that it is gone."""
        self.check()
        if self._is_stopped or (self._thread.ident is not None and not self._thread.is_alive()):
            raise OffloadError(f"{self._file.name}: already closed; the offloaded activations are gone.")

    def stop(self, *, wait: bool = True) -> None:
        """Stop; what is not written yet will not be."""
        self._is_stopped = True
        super().stop(wait=wait)

    def copies(self, make: Callable[[], Copies]) -> Copies:
        """Return the thread's own copies for the device of ``make``: those of the training step are not thread-safe."""
        if make not in self._copies:
            self._copies[make] = make()
        return self._copies[make]

    def buffer(self, size: int, *, pin_memory: bool) -> Tensor:
        """Return the thread's own staging buffer: it never waits for one of the others."""
        if self.staging_buffer is None:
            self.staging_buffer = make_staging(size, pin_memory=pin_memory)
        return self.staging_buffer

    def write(self, buffer: Tensor, length: int, position: int) -> None:
        """Write the first bytes of ``buffer``."""
        if not self._is_stopped:  # a closed file is not worth the wait
            self._file.write(bytes_of(buffer, 0, length), position)

    def read(self, buffer: Tensor, length: int, position: int) -> None:
        """Read into the first bytes of ``buffer``."""
        if self._is_stopped:
            raise OSError(f"the file ends at byte {position}")
        self._file.read(bytes_of(buffer, 0, length), position)

    def _clean_up(self) -> None:
        self.staging_buffer = None
        self._copies.clear()
        self._file.close()  # here: a file that is closed under a write may have become another one


def make_staging(size: int, *, pin_memory: bool) -> Tensor:
    """Return a staging buffer, which does not count as memory of the device."""
    with without_dispatch():
        return make_host_bytes(size, pin_memory=pin_memory)
