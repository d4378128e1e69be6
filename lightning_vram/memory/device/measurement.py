"""One reading of memory during a run, as it is logged, written to a file and reported."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_vram.memory.tracking.timeline import Category, MemoryTimeline, Phase

NUM_MODULES = 8  # the largest, in a file that has a line per reading


@dataclass(frozen=True)
class Measurement:
    """Memory around one batch. ``None`` means that the source does not tell."""

    stage: str  # ``"train"``, ``"validate"``, ``"test"`` or ``"predict"``
    epoch: int  # epoch of the batch
    batch_idx: int  # index of the batch in its epoch
    step: int  # optimizer steps done when the batch ended
    device: str  # device that the bytes lie on
    source: str  # ``"allocator"`` (what the device's allocator counts) or ``"tracker"`` (live bytes of tensors)
    allocated_bytes: int  # in tensors at the end of the batch
    peak_allocated_bytes: int  # most bytes in tensors at once
    reserved_bytes: int | None = None  # taken from the driver at the end of the batch
    peak_reserved_bytes: int | None = None  # most bytes taken from the driver at once
    host_peak_bytes: int | None = None  # most bytes in host tensors at once, where the device is not the host (tracker)
    saved_for_backward_bytes: int | None = None  # kept by the forward for the backward (tracker)
    peak_by_phase: Mapping[str, int] = field(default_factory=dict)  # most bytes in tensors at once, for each phase
    peak_by_category: Mapping[str, int] = field(default_factory=dict)  # bytes of each category at the peak (tracker)
    peak_by_module: Mapping[str, int] = field(default_factory=dict)  # of the largest modules at the peak (tracker)
    seconds_per_batch: float | None = None  # median over the latest training batches that were not tracked

    def with_timeline(self, timeline: MemoryTimeline) -> "Measurement":
        """Add what only a tracker knows."""
        return replace(
            self,
            host_peak_bytes=timeline.host_peak_bytes,
            saved_for_backward_bytes=timeline.saved_for_backward_bytes,
            peak_by_category={str(category): timeline.peak_by_category[category] for category in Category},
            peak_by_module=dict(list(timeline.peak_by_module.items())[:NUM_MODULES]),
        )

    def sizes(self) -> dict[str, int]:
        """All sizes in bytes under the names they are logged by, ``peak_by_module`` left out: its names vary."""
        sizes = {name: getattr(self, name) for name in _PLAIN_SIZES}
        sizes |= {name: self.peak_by_phase.get(phase) for phase, name in _PHASE_SIZES.items()}
        sizes |= {name: self.peak_by_category.get(category) for category, name in _CATEGORY_SIZES.items()}
        return {name: size for name, size in sizes.items() if size is not None}

    def with_sizes(self, sizes: Mapping[str, int]) -> "Measurement":
        """The same measurement with other numbers, named as :meth:`sizes` names them."""
        changes: dict[str, Any] = {name: sizes.get(name) for name in _PLAIN_SIZES}
        phases = {str(phase): sizes[name] for phase, name in _PHASE_SIZES.items() if name in sizes}
        categories = {str(category): sizes[name] for category, name in _CATEGORY_SIZES.items() if name in sizes}
        return replace(self, **changes, peak_by_phase=phases, peak_by_category=categories)


_PLAIN_SIZES = (
    *("allocated_bytes", "peak_allocated_bytes", "reserved_bytes", "peak_reserved_bytes"),
    *("host_peak_bytes", "saved_for_backward_bytes"),
)
_PHASE_SIZES = {phase: f"{phase}/peak_allocated_bytes" for phase in Phase}
_CATEGORY_SIZES = {category: f"{category}_bytes" for category in Category}
SIZE_NAMES = (*_PLAIN_SIZES, *_PHASE_SIZES.values(), *_CATEGORY_SIZES.values())


def write_measurement(path: Path, measurement: Measurement) -> None:
    """Append ``measurement`` to a JSON Lines file; folders are made as needed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(measurement)) + "\n")


def read_measurements(path: str | Path) -> list[Measurement]:
    """Read what :func:`write_measurement` wrote, in order."""
    measurements = []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a VRAMMonitor file: it is not text.") from None
    # not splitlines(), for which a line ends at characters that may stand in a name
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else [], start=1):
        try:
            measurements.append(Measurement(**json.loads(line)))
        except (json.JSONDecodeError, RecursionError, TypeError) as error:
            raise ValueError(f"{path}, line {number} is not a VRAMMonitor measurement: {error}") from None
    if not measurements:
        raise ValueError(f"{path} contains no measurements.")
    return measurements


def largest(measurements: Iterable[Measurement]) -> Measurement:
    """The measurement with the highest peak; of equals the first."""
    return max(measurements, key=lambda measurement: measurement.peak_allocated_bytes)
