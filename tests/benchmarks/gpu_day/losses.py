"""The head of a language model and its loss, beside others' losses."""

from tests.benchmarks.compare import measure_ways
from tests.benchmarks.gpu_day.items import Item, Setting
from tests.benchmarks.gpu_day.results import Report
from tests.benchmarks.gpu_day.speed import measure_each
from tests.benchmarks.suites import head_loss


def run_once(setting: Setting, report: Report) -> None:
    """Add a row for each way at one shape, one turn of each."""
    shape = (head_loss.TINY if setting.is_tiny else head_loss.GPU)[0]
    workload = head_loss.workload_of(shape, setting.device)
    measure_each(setting, report, workload, (*head_loss.WAYS, *head_loss.PEERS), steps=5)


def run(setting: Setting, report: Report) -> None:
    """Add a row for each shape and each way that can run there."""
    ways = [way for way in (*head_loss.WAYS, *head_loss.PEERS) if way.why_not(setting.device) is None]
    turns = {"repeats": 1, "steps": 1} if setting.is_tiny else {"repeats": 5, "steps": 5}
    for shape in head_loss.TINY if setting.is_tiny else head_loss.GPU:
        workload = head_loss.workload_of(shape, setting.device)
        rows = measure_ways(workload, ways, setting.device, **turns)
        report.add(*({"name": f"{row['workload']}, {row['variant']}", **row} for row in rows))


FIRST = Item("losses.128k", 12, run_once, row_seconds=30)
ITEMS = (Item("losses.head", 90, run),)
