"""The largest batch, and the largest model, that trains two steps within a budget: plain, as peers do it, and ours.

On a GPU the process is given no more than the budget, and what does not fit runs out of memory. On the CPU the peak of
both steps is tracked, and the search begins where a line through two smaller sizes meets the budget.
"""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_vram import AutoVRAM, MicroBatching, plan_memory, track_memory
from lightning_vram.memory.units import parse_bytes
from tests.benchmarks.cases import GPU_WORKLOADS, QUICK_WORKLOADS, WORKLOADS, Workload
from tests.benchmarks.compare import Options
from tests.benchmarks.measure import Row, describe_timeline, error_row, give_back, read_peaks
from tests.benchmarks.ours import find_way
from tests.benchmarks.peers import PEERS as ALL_PEERS
from tests.benchmarks.peers import lightning_alone, pytorch, torchtune
from tests.benchmarks.peers.installed import on_host_alone
from tests.benchmarks.peers.lightning_alone import find_batch_size
from tests.benchmarks.sizes import Growth, grow_batch, grow_layers, largest_that
from tests.benchmarks.suites import strategies
from tests.benchmarks.ways import PLAIN, Way, with_callbacks
from tests.benchmarks.whole_runs import LitWorkload, Tracked, fit

NUM_STEPS = 2
SETTINGS: dict[str, Any] = {"budget": ""}  # of the device; else what two plain steps take at the size of other suites
QUICK: dict[str, Any] = {}


def train(workload: Workload, way: Way, device: torch.device) -> Row:
    """Take two steps, and return the tracked peaks of both together.

    Args:
        workload: What is trained.
        way: How.
        device: Where.
    """
    if way.make_trainer_options is not None:
        options = way.make_trainer_options(workload)
        steps = Tracked(first=0)
        fit(workload, [steps, *options.pop("callbacks", [])], NUM_STEPS, device, **options)
        return _peaks_of(steps.row)
    torch.manual_seed(0)
    with device:
        model, batch = workload.make_model(), workload.make_batch()
    around: Any = way.change(model)
    around = around if hasattr(around, "__enter__") else contextlib.nullcontext()
    optimizer = way.make_optimizer(model.parameters())
    autocast = torch.autocast(device.type, workload.autocast, enabled=workload.autocast is not None)
    with track_memory(model, optimizers=[optimizer], inputs=batch) as tracker:
        for _ in range(NUM_STEPS):
            with autocast, around:
                loss = workload.compute_loss(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
    row = _peaks_of(describe_timeline(tracker.timeline))
    report = getattr(around, "report", None)  # host memory of ours is reported by itself: no operator makes it
    return {**row, "host_peak_bytes": report.host_bytes} if hasattr(report, "host_bytes") else row


def _peaks_of(row: Row) -> Row:
    return {name: size for name, size in row.items() if name in ("peak_bytes", "host_peak_bytes")}


PEERS = (*pytorch.ACTIVATIONS, *torchtune.ACTIVATIONS)
"""Those that save memory exactly; what makes another network, or other steps, is left to its own suite."""

FINDER = next(way for way in lightning_alone.BATCHES if way.make_trainer_options is find_batch_size)
IN_PARTS = tuple(way for way in lightning_alone.BATCHES if way is not FINDER)


def beside_a_host(way: Way) -> Way:
    """Return a way to offload, which on the CPU has nowhere to offload to."""
    alone = on_host_alone()
    return replace(way, why_not=lambda device: alone(device) or way.why_not(device))


OFFLOAD = tuple(beside_a_host(way) for way in (*strategies.MODES, *strategies.LESS_ON_HOST))
OFFLOAD_PEERS = tuple(map(beside_a_host, ALL_PEERS["offload"]))
OURS = tuple(
    map(
        find_way,
        (
            "ActivationCheckpointing()",
            'ActivationCheckpointing(save="matmuls")',
            "InPlaceFusion()",
            'ActivationOffload("64KiB")',
            'ActivationCheckpointing(), ActivationOffload("64KiB")',
        ),
    )
)


def _in_quarters(workload: Workload) -> dict[str, Any]:
    return {"callbacks": [MicroBatching(-(-len(workload.make_batch()[0]) // lightning_alone.NUM_PARTS))]}


QUARTERS = Way("MicroBatching(size // 4)", "ours", make_trainer_options=_in_quarters)
AUTO_VRAM = "AutoVRAM(budget)"


def auto_vram(budget_bytes: int) -> Way:
    """Return the way that makes a budget of all parts together."""
    return with_callbacks(AUTO_VRAM, lambda: [AutoVRAM(f"{budget_bytes}B", cache=False)])


def _is_planned(workload: Workload, device: torch.device, budget_bytes: int) -> bool:
    """Whether a plan fits, as ``AutoVRAM`` makes it before the run; nothing is trained."""
    with torch.device("meta"):
        module = LitWorkload(workload, 1)
    try:
        plan_memory(module, module.batch, device=device.type, budget=f"{budget_bytes}B")
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def limited(device: torch.device, budget_bytes: int) -> Iterator[None]:
    """Let this process have no more of an accelerator inside; the CPU has no such limit."""
    if device.type == "cpu":
        yield
        return
    module = torch.get_device_module(device)
    give_back(device)
    module.set_per_process_memory_fraction(budget_bytes / module.get_device_properties(0).total_memory)
    try:
        yield
    finally:
        module.set_per_process_memory_fraction(1.0)
        give_back(device)


class Search:
    """For the largest size that trains in a way."""

    def __init__(self, growth: Growth, way: Way, device: torch.device, budget_bytes: int) -> None:
        self._growth, self._way, self._device, self._budget_bytes = growth, way, device, budget_bytes
        self._rows: dict[int, Row] = {}

    def run(self, start: int) -> Row:
        """Return what stands in a row: the largest size, and the bytes there."""
        if self._device.type != "cpu":
            largest = largest_that(self._trains, start)
        elif self._way.name == AUTO_VRAM:
            largest = largest_that(self._is_planned, start)
            while largest > 0 and not self._trains(largest):
                largest -= 1
        else:
            largest = largest_that(self._trains, self._guess())
        return {"largest": largest, **self._rows.get(largest, {})}

    def _guess(self) -> int:
        """By a line through two sizes."""
        sizes = (self._growth.size, self._growth.size + 1)  # of one layer "auto" finds nothing to checkpoint
        one, other = (train(self._growth.make(size), self._way, self._device)["peak_bytes"] for size in sizes)
        return max(1, sizes[0] + (self._budget_bytes - one) // max(1, other - one))

    def _is_planned(self, size: int) -> bool:
        return _is_planned(self._growth.make(size), self._device, self._budget_bytes)

    def _trains(self, size: int) -> bool:
        if size not in self._rows:
            try:
                with limited(self._device, self._budget_bytes):
                    row = train(self._growth.make(size), self._way, self._device)
                    self._rows[size] = {**row, **read_peaks(self._device)}
            except (torch.OutOfMemoryError, MisconfigurationException):
                return False
        return self._device.type != "cpu" or self._rows[size]["peak_bytes"] <= self._budget_bytes


def run_finder(growth: Growth, device: torch.device, budget_bytes: int) -> Row:
    """Return what Lightning's ``BatchSizeFinder`` finds when memory runs out at the budget, and the bytes there."""
    options = find_batch_size(growth.make(growth.size))
    (finder,) = options.pop("callbacks")
    with limited(device, budget_bytes):
        fit(growth.make(1), [finder], NUM_STEPS, device, **options)
        largest = finder.optimal_batch_size
        give_back(device)
        return {"largest": largest, **train(growth.make(largest), PLAIN, device), **read_peaks(device)}


def growths(device: torch.device, *, is_quick: bool) -> list[Growth]:
    """Return what grows on a device."""
    if device.type == "cuda" and not is_quick:
        batches, layers = ("resnet50_bf16", "gpt2_small"), ("gpt2_xl",)
        return [
            *(grow_batch(GPU_WORKLOADS[name]) for name in batches),
            *(grow_layers(GPU_WORKLOADS[name]) for name in layers),
        ]
    workloads = WORKLOADS[1:2] if is_quick else (QUICK_WORKLOADS[0], WORKLOADS[1])  # each is tracked a hundred times
    return [grow(workload) for workload in workloads for grow in (grow_batch, grow_layers)]


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each workload and way."""
    device = options.device
    for growth in growths(device, is_quick=options.is_quick):
        if options.only in growth.name:
            budget_bytes = parse_bytes(options["budget"]) if options["budget"] else _plain_peak(growth, device)
            ways = ways_for(growth, budget_bytes, has_peers=options.has_peers)
            chosen = [way for way in ways if way is PLAIN or options.ways in way.name]
            yield from measure_growth(growth, chosen, device, budget_bytes)


def ways_for(growth: Growth, budget_bytes: int, *, has_peers: bool) -> list[Way]:
    """Return plain, others' and ours."""
    if growth.what == "batch size":
        peers, ours = (
            (*PEERS, *IN_PARTS, FINDER),
            (*OURS, QUARTERS),
        )
    else:
        peers, ours = (*PEERS, *OFFLOAD_PEERS), (*OURS, *OFFLOAD)
    return [PLAIN, *(peers if has_peers else ()), *ours, auto_vram(budget_bytes)]


def measure_growth(growth: Growth, ways: Sequence[Way], device: torch.device, budget_bytes: int) -> Iterator[Row]:
    """Return a row for each way; ``budget_bytes`` is of the device."""
    start = 1
    for way in ways:
        try:
            why = way.why_not(device)
            if why is not None:
                found: Row = {"error": why}
            elif way is FINDER:
                found = run_finder(growth, device, budget_bytes)
            else:
                found = Search(growth, way, device, budget_bytes).run(start)
                start = max(start, found["largest"])
        except Exception as error:
            found = error_row(error)
        row = {"workload": growth.name, "variant": way.name, "by": way.by, "what": growth.what}
        yield {**row, "budget_bytes": budget_bytes, **found}


def _plain_peak(growth: Growth, device: torch.device) -> int:
    give_back(device)
    row = {**train(growth.make(growth.size), PLAIN, device), **read_peaks(device)}
    give_back(device)
    return int(row.get("max_memory_reserved_bytes", row["peak_bytes"]))
