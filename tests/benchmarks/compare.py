"""Ways to train a workload side by side: their steps take turns, and one step of each is tracked."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch

from tests.benchmarks.cases import FROZEN_WORKLOADS, QUICK_FROZEN_WORKLOADS, QUICK_WORKLOADS, WORKLOADS, Workload
from tests.benchmarks.measure import NUM_WARM_UP, Now, Row, compare_seconds, error_row, give_back, take_turn, track_step
from tests.benchmarks.ways import PLAIN, PLAIN_TRAINER, Suite, Way
from tests.benchmarks.whole_runs import Steps, Tracked, run_whole


@dataclass(frozen=True)
class Options:
    """What the command line asks of a measurement.

    Args:
        device: Of the models.
        only: Part of a workload's name, or of what else a measurement goes through.
        ways: Part of a way's name; what others are compared with is always there.
        is_quick: Small workloads, few repeats.
        has_peers: Whether others' ways are measured as well.
        settings: The measurement's own, by name.
    """

    device: torch.device
    only: str = ""
    ways: str = ""
    is_quick: bool = False
    has_peers: bool = False
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.settings[name]

    @property
    def turns(self) -> dict[str, int]:
        """Repeats and steps, as :func:`measure_ways` takes them."""
        return {name: self.settings[name] for name in ("repeats", "steps")}

    def workloads(self, *, is_frozen: bool = False) -> Iterator[Workload]:
        """Those for the device, or small ones; those that train adapters alone are asked for."""
        is_cpu = self.device.type == "cpu"
        quick, full = (QUICK_FROZEN_WORKLOADS, FROZEN_WORKLOADS) if is_frozen else (QUICK_WORKLOADS, WORKLOADS)
        for workload in quick if self.is_quick else full:
            if self.only in workload.name and not (is_cpu and workload.needs_gpu):
                yield workload

    def pairs(self, suite: Suite, ways: Sequence[Way]) -> Iterator[tuple[Workload, list[Way]]]:
        """Workloads with these ways, and those that train adapters alone with the ways for that."""
        from tests.benchmarks.ours import FROZEN  # it imports much

        yield from ((workload, self.choose(suite, ways)) for workload in self.workloads())
        yield from ((workload, self.choose("frozen", FROZEN)) for workload in self.workloads(is_frozen=True))

    def choose(self, suite: Suite, ways: Sequence[Way]) -> list[Way]:
        """Return the ways of a suite, those of peers among them; plain ones come first, and are always there."""
        others = [*ways, *(peers_of(suite) if self.has_peers else ())]
        plain = [way for way in others if way.by == "plain"] or [PLAIN]
        chosen = [way for way in others if way.by != "plain" and self.ways in way.name]
        if any(way.is_whole for way in chosen) and not any(way.is_whole for way in plain):
            plain.append(PLAIN_TRAINER)
        return [*plain, *chosen]


def peers_of(suite: Suite) -> Sequence[Way]:
    """Return others' ways to the same end."""
    from tests.benchmarks.peers import PEERS  # it imports much

    ways: Sequence[Way] = PEERS.get(suite, ())
    return ways


def measure_ways(
    workload: Workload,
    ways: Sequence[Way],
    device: torch.device,
    *,
    repeats: int,
    steps: int,
    is_tracked: bool = True,
    now: Now = time.perf_counter,
    is_first_counted: bool = False,
) -> list[Row]:
    """Time ways in turn, several times, so that a drifting machine hits them alike, and track a step of each.

    Args:
        workload: What is trained.
        ways: Each is compared with the first of its kind: plain loops, or whole runs of a Trainer.
        device: Where.
        repeats: Turns of each way; each draws weights and data anew.
        steps: Timed steps in each turn.
        is_tracked: Whether the bytes of a step are tracked.
        now: Clock of a host.
        is_first_counted: Peaks of whole runs are those of all steps, with the ones that parts look at.

    Returns:
        A row for each way; one that cannot run, or fails, for want of memory say, has an error in its place, and others
        go on.
    """
    attempts = _Attempts(device, {way.name: {"error": why} for way in ways if (why := way.why_not(device)) is not None})
    tracked: dict[str, Row] = {}
    for way in (way for way in ways if is_tracked and way.is_trackable and way.name not in attempts.errors):
        tracked[way.name] = attempts.run(way, partial(_track, workload, way, device)) or {}
        if repeats and way.name in attempts.errors:  # it may run where nobody looks
            tracked[way.name] = {"not_tracked": attempts.errors.pop(way.name)["error"]}
    turns: dict[str, list[Row]] = {way.name: [] for way in ways}
    for seed in range(repeats):
        for way in ways:
            meter = Steps(steps, now, is_first_counted=is_first_counted)
            whole = partial(run_whole, workload, way, device, meter, NUM_WARM_UP + steps, seed)
            loop = partial(take_turn, workload, way, device, steps, seed, now)
            row = attempts.run(way, whole if way.is_whole else loop)
            turns[way.name] += [row] if row is not None else []
    firsts = {way.is_whole: way.name for way in reversed(ways)}
    rows = []
    for way in ways:
        first = firsts[way.is_whole]
        found = {**tracked.get(way.name, {}), **sum_up(turns[way.name], turns[first])}
        if "peak_bytes" in found and "peak_bytes" in tracked.get(first, {}):
            found["peak_of_first"] = found["peak_bytes"] / tracked[first]["peak_bytes"]
        row = {"workload": workload.name, "variant": way.name, "by": way.by}
        rows.append({**row, **attempts.errors.get(way.name, found)})
    return rows


@dataclass
class _Attempts:
    """Runs of ways on a device, and what went wrong, by the way's name; such a way does not run again."""

    device: torch.device
    errors: dict[str, Row]

    def run(self, way: Way, function: Callable[[], Row]) -> Row | None:
        if way.name in self.errors:
            return None
        try:
            return function()
        except Exception as error:
            self.errors[way.name] = error_row(error)
        finally:
            give_back(self.device)
        return None


def _track(workload: Workload, way: Way, device: torch.device) -> Row:
    return run_whole(workload, way, device, Tracked(), 2) if way.is_whole else track_step(workload, way, device)


def sum_up(turns: Sequence[Row], firsts: Sequence[Row]) -> Row:
    """Return medians of all turns, and the highest peaks."""
    if not turns:
        return {}
    medians, others = ([median(turn["seconds"]) for turn in one] for one in (turns, firsts))
    return {
        **compare_seconds(medians, others),
        "wall_seconds_per_step": median([turn["wall_seconds_per_step"] for turn in turns]),
        "all_seconds_per_step": [[round(seconds, 6) for seconds in turn["seconds"]] for turn in turns],
        **{name: max(turn[name] for turn in turns) for name in turns[0] if name.endswith("_bytes")},
    }
