"""Bytes come back from disk, space is used again, errors reach the user, and nothing hangs."""

import errno
import gc
import os
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lightning_vram.core.host import disk
from lightning_vram.core.host.disk import DiskBlock, DiskRing
from lightning_vram.core.host.memory import OffloadError
from lightning_vram.core.host.transfers import Copies
from lightning_vram.memory.units import GIB, MIB

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def ring(tmp_path):
    ring = DiskRing(tmp_path, pin_memory=False, staging_bytes=MIB)
    yield ring
    ring.close()


def write(ring: DiskRing, num_bytes: int, seed: int = 0) -> tuple[DiskBlock, Tensor]:
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return ring.write(source, Copies(), 0), source


def read(block: DiskBlock, num_bytes: int) -> Tensor:
    target = torch.empty(num_bytes, dtype=torch.uint8)
    block.read(target, Copies, None).wait(target)
    return target


@pytest.mark.parametrize("num_bytes", [1, 1000, 7 * MIB + 13])
def test_bytes_come_back_from_a_file_without_a_name(ring, tmp_path, num_bytes: int) -> None:
    block, source = write(ring, num_bytes)
    for _ in range(2):
        assert torch.equal(read(block, num_bytes), source)
    assert list(tmp_path.iterdir()) == []


def test_space_is_used_again_and_staging_is_bounded(ring) -> None:
    for step in range(10):
        written = [write(ring, MIB + 7 * number, step + number) for number in range(6)]
        arrivals = []
        for block, source in reversed(written):
            target = torch.empty(source.numel(), dtype=torch.uint8)
            arrivals.append((block.read(target, Copies, None), target, source))
        del written, block  # the reads go on
        for arrival, target, source in arrivals:
            arrival.wait(target)
            assert torch.equal(target, source)
        assert ring.num_blocks == 0
        assert ring.total_bytes == 7 * MIB
        assert ring.staging_bytes <= 5 * MIB


def test_a_folder_that_is_none_or_cannot_be_written_to_is_refused(tmp_path, monkeypatch) -> None:
    def refuse(**_):
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(ValueError, match=r"^disk_path must be an existing folder, got '.*'\.$"):
        DiskRing(tmp_path / "missing", pin_memory=False)
    monkeypatch.setattr(disk.tempfile, "TemporaryFile", refuse)  # root may write anywhere
    with pytest.raises(RuntimeError) as error:
        DiskRing(tmp_path, pin_memory=False)
    assert str(error.value) == (
        f"disk_path='{tmp_path}': cannot create a file there ([Errno 13] Permission denied). Name a writable folder."
    )


def test_a_full_disk_is_refused_before_anything_is_written(ring, tmp_path, monkeypatch) -> None:
    block, source = write(ring, 1000)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(free=MIB))
    with pytest.raises(RuntimeError) as error:
        write(ring, 2 * MIB)
    assert str(error.value) == (
        f"disk_path='{tmp_path}' needs 2.00 MiB in addition to 1.00 MiB, but 1.00 MiB are free. Free some "
        'space, name a folder on another disk, set compress="bf16", or use a smaller batch.'
    )
    monkeypatch.undo()
    assert torch.equal(read(block, 1000), source)
    block, source = write(ring, 2 * MIB)
    assert torch.equal(read(block, 2 * MIB), source)


def test_a_disk_that_cannot_reserve_space_is_refused_or_believed(ring, monkeypatch) -> None:
    code = errno.ENOSPC

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk.os, "posix_fallocate", refuse, raising=False)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(free=GIB))
    with pytest.raises(RuntimeError, match=r"but 1\.00 GiB are free\."):
        write(ring, 1000)
    code = errno.EOPNOTSUPP
    block, source = write(ring, 1000)
    assert torch.equal(read(block, 1000), source)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_what_goes_wrong_in_the_thread_is_raised_at_the_next_call(ring, tmp_path, monkeypatch, call: str) -> None:
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    block, _ = write(ring, 1000)
    monkeypatch.setattr(disk.os, call, fail)

    def use() -> None:
        for seed in range(20):  # more than there are buffers
            write(ring, MIB, seed)
            read(block, 1000)

    with pytest.raises(RuntimeError) as error:
        use()
    assert str(error.value) == (
        f"disk_path='{tmp_path}': offloaded activations could not be written or read ([Errno 5] "
        f"Input/output error). This step and all further steps of the run fail; name a folder on another "
        f"disk."
    )
    for again in (lambda: write(ring, 1), lambda: read(block, 1000)):
        with pytest.raises(RuntimeError, match="could not be written or read"):
            again()


def test_short_writes_and_reads_go_on_unless_nothing_is_written(ring, monkeypatch) -> None:
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(disk.os, "pwritev", lambda file, views, at: pwritev(file, [views[0][:1000]], at))
    monkeypatch.setattr(disk.os, "preadv", lambda file, views, at: preadv(file, [views[0][:777]], at))
    block, source = write(ring, 50_000)
    assert torch.equal(read(block, 50_000), source)
    monkeypatch.setattr(disk.os, "pwritev", lambda *_: 0)
    block, _ = write(ring, 1000)
    with pytest.raises(OffloadError, match="cannot read or write at byte"):
        read(block, 1000)


def test_closed_it_says_so_and_its_thread_is_gone(ring, tmp_path) -> None:
    block, _ = write(ring, 1000)
    thread = ring._worker._thread
    ring.close()
    ring.close()
    for call in (lambda: write(ring, 1), lambda: read(block, 1000)):
        with pytest.raises(RuntimeError) as error:
            call()
        assert str(error.value) == f"disk_path='{tmp_path}': already closed; the offloaded activations are gone."
    assert not thread.is_alive()


def test_forgotten_it_closes_itself_and_waits_for_no_thread(tmp_path, monkeypatch) -> None:
    """The garbage collector runs in the midst of anything, even of what holds a lock that waiting needs."""
    gc.disable()
    ring = DiskRing(tmp_path, pin_memory=False, staging_bytes=MIB)
    written = write(ring, 3 * MIB)
    thread = ring._worker._thread
    file, joined = ring._file._file, []
    monkeypatch.setattr(threading.Thread, "join", lambda thread, timeout=None: joined.append(thread))
    del ring, written
    gc.enable()
    monkeypatch.undo()
    assert joined == []
    thread.join(30)
    assert not thread.is_alive()
    assert file.closed


def test_staging_buffers_are_not_lost(ring, monkeypatch) -> None:
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Copies, "send", fail)
    for _ in range(5):
        with pytest.raises(KeyboardInterrupt):
            write(ring, 1000)
    monkeypatch.undo()
    block, source = write(ring, 5 * MIB)
    assert torch.equal(read(block, 5 * MIB), source)
    assert ring.staging_bytes <= 5 * MIB
