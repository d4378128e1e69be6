"""What ``estimate_memory`` says, beside the allocator of the card."""

from tests.benchmarks.estimates.cases import CASES
from tests.benchmarks.estimates.measure import measure_all
from tests.benchmarks.gpu_day.items import Item, Setting
from tests.benchmarks.gpu_day.report import Report


def run(setting: Setting, report: Report) -> None:
    """Add a row for each case, which has a process of its own."""
    for row in measure_all(CASES):
        report.add(row)


ITEMS = (Item("estimate.allocator", 500, run, needs_cuda=True),)
