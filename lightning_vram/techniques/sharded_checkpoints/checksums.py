"""Checksums of a checkpoint, so that bytes that a disk or a copy has changed are not trained on.

A sharded one has them in a file of its own, made as the bytes are written: CRC-32, a third of a second for each GiB.
A full one has those of its zip archive. To check means to read once more, before anything is loaded; the ranks share
that. Neither keeps anybody from changing a checkpoint on purpose.
"""

import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_vram.core.processes.rank_errors import CheckpointError

CHECKSUM_FILE = "checksums.json"
_CHUNK_BYTES = 2**23
_WAY_OUT = "Resume from another checkpoint, or load this one without the check: verify=False."


@dataclass
class Checksum:
    """Of a file, or of what there is of it yet."""

    num_bytes: int = 0
    crc32: int = 0

    def add(self, data: bytes | memoryview) -> None:
        """Go on with the bytes that follow."""
        self.num_bytes += memoryview(data).nbytes
        self.crc32 = zlib.crc32(data, self.crc32)


def write_checksums(folder: Path, checksums: Mapping[str, Checksum]) -> None:
    """Write down what the files of a sharded checkpoint have to be."""
    (folder / CHECKSUM_FILE).write_text(json.dumps({name: asdict(each) for name, each in sorted(checksums.items())}))


def check_folder(folder: Path, part: int = 0, num_parts: int = 1) -> None:
    """Compare a sharded checkpoint with what was written down; one without checksums is taken as it is.

    Args:
        folder: It.
        part: Which share of the files to read, of ``num_parts``: a rank.
        num_parts: How many shares there are.

    Raises:
        CheckpointError: If a file is not what was written.
    """
    if not (folder / CHECKSUM_FILE).is_file():
        return
    try:
        written = {
            str(name): Checksum(**each)
            for name, each in json.loads((folder / CHECKSUM_FILE).read_text(encoding="utf-8")).items()
        }
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{CHECKSUM_FILE} is damaged. {_WAY_OUT}") from error
    for name in sorted(written, key=lambda name: (-written[name].num_bytes, name))[part::num_parts]:
        _check_file(folder / name, written[name])


def check_archive(path: Path, part: int = 0, num_parts: int = 1) -> None:
    """Compare the entries of a file of ``torch.save`` with their checksums; an older kind of file has none.

    Args:
        path: The file.
        part: Which share of the entries to read, of ``num_parts``: a rank.
        num_parts: How many shares there are.

    Raises:
        CheckpointError: If an entry is not what was written.
    """
    if not is_archive(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: (-entry.file_size, entry.filename))
            for entry in entries[part::num_parts]:
                with archive.open(entry) as file:
                    while file.read(_CHUNK_BYTES):
                        pass
    except OSError:
        raise
    except Exception as error:  # of zipfile, zlib or struct, as it happens
        raise CheckpointError(f"{path.name} is damaged ({error}). {_WAY_OUT}") from error


def is_archive(path: Path) -> bool:
    """Whether a file is of the kind that ``torch.save`` writes, which can be mapped into memory."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _check_file(path: Path, written: Checksum) -> None:
    if not path.is_file():
        raise CheckpointError(f"its file {path.name} is missing. Resume from another checkpoint.")
    size = path.stat().st_size
    if size != written.num_bytes:
        raise CheckpointError(f"{path.name} is damaged: it has {size} bytes instead of {written.num_bytes}. {_WAY_OUT}")
    found = Checksum()
    with path.open("rb", buffering=0) as file:
        while data := file.read(_CHUNK_BYTES):
            found.add(data)
    if found != written:
        raise CheckpointError(f"{path.name} is damaged: its checksum differs. {_WAY_OUT}")
