"""The figures of each card as tables in Markdown, ready to paste into a page."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lightning_vram.memory.units import GIB, MIB, format_bytes
from tests.benchmarks.gpu_day import results
from tests.benchmarks.measure import Row

BASELINE, AGAIN, MIXED = "plain", "plain, again", 'precision="bf16-mixed"'
KEPT, PEAK, RESERVED = "kept_bytes", "max_memory_allocated_bytes", "max_memory_reserved_bytes"
UNINITIALIZED = "vit, 16-mixed"  # its gradients overflow in every step
ACCURATE = 0.001
LOOSE = 1.0  # a tolerance that compares nothing: controls, other dropout masks
Column = tuple[str, Callable[[Row, Row], str]]
Items = dict[str, list[Row]]


def print_figures(folder: Path) -> None:
    """Print the tables of each gathered file in ``folder``; tables and rows without figures are left out."""
    for path in sorted(folder.glob("*.json")):
        card: Any = results.read(folder, path.stem)
        if not isinstance(card, dict) or not isinstance(card.get("items"), dict):
            continue
        machine = card.get("machine") or {}
        versions = [f"{key} {machine[key]}" for key in ("driver", "torch", "lightning") if key in machine]
        print(f"# {', '.join([machine.get('device', path.stem), *versions, *filter(None, [card.get('date')])])}\n")
        items = {name: _valid(item.get("rows", [])) for name, item in card["items"].items()}
        speed, losses, steps = (partial(_variants, group) for group in ("speed", "losses", "steps"))
        for make in (speed, _sharded, losses, steps, _optimizers, _auto, _peaks, _smoke, _host):
            for block in make(items):
                print(block + "\n")


def _valid(rows: list[Row]) -> list[Row]:
    return [row for row in rows if "name" in row and "error" not in row and "skipped" not in row]


def _group(items: Items, group: str) -> list[tuple[str, list[Row]]]:
    return [(name, rows) for name, rows in sorted(items.items()) if name.split(".")[0] == group and rows]


def _find(rows: Iterable[Row], name: str) -> Row:
    return next((row for row in rows if row["name"] == name), {})


def _markdown(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table; columns of numbers are aligned to the right."""
    is_number = [all(not line[i] or line[i].lstrip("+-")[:1].isdigit() for line in lines) for i in range(len(columns))]
    rules = ["---:" if right else "---" for right in is_number]
    return "\n".join("| " + " | ".join(line) + " |" for line in (columns, rules, *lines))


def _table(columns: Sequence[Column], rows: Iterable[Row], base: Row | Callable[[Row], Row]) -> str:
    """Return a line for each row; ``base`` is the row, or gives the row, that ratios refer to."""
    base_of = base if callable(base) else lambda row: base
    return _markdown([heading for heading, _ in columns], [[cell(r, base_of(r)) for _, cell in columns] for r in rows])


def _name(row: Row, base: Row) -> str:
    name = row["name"]
    if name in (BASELINE, MIXED):
        return "baseline" if name == BASELINE else f"baseline, `{name}`"
    owner = row.get("by")
    if owner is None:
        return name
    return f"`{name}`" if owner in ("ours", "plain") else f"{owner}'s `{name}`"


def _size(heading: str, key: str) -> Column:
    return _number(f"{heading}, GiB", key, ",.2f", 1 / GIB)


def _number(heading: str, key: str, form: str, scale: float = 1.0) -> Column:
    return heading, lambda row, base: format(row[key] * scale, form) if key in row else ""


def _next_to_baseline(column: Column, key: str) -> Column:
    """Return the column with the ratio to the baseline in parentheses."""
    heading, cell = column

    def cell_with_ratio(row: Row, base: Row) -> str:
        return f"{cell(row, base)} ({row[key] / base[key]:.2f})" if key in row and base.get(key) else cell(row, base)

    return f"{heading} (of baseline)", cell_with_ratio


_VARIANT: Column = ("variant", _name)
_PEAK, _RESERVED = _size("peak allocated", PEAK), _size("peak reserved", RESERVED)
_MS = _number("step, ms", "seconds_per_step", ".0f", 1000)
_SAVED = _next_to_baseline(_size("saved for backward", KEPT), KEPT)
_PEAK_OF, _MS_OF = _next_to_baseline(_PEAK, PEAK), _next_to_baseline(_MS, "seconds_per_step")


def _variants(group: str, items: Items) -> Iterator[str]:
    for item, rows in _group(items, group):
        base, again = _find(rows, BASELINE), _find(rows, AGAIN)
        yield f"**`{item}`**: {base.get('workload', '')}"
        yield _table([_VARIANT, _SAVED, _PEAK_OF, _MS_OF], [row for row in rows if row is not again], base)
        if base.get("seconds_per_step") and "seconds_per_step" in again:
            ratio = again["seconds_per_step"] / base["seconds_per_step"]
            yield f"The baseline, run again after all variants, took {ratio:.3f} of its first time."


def _sharded(items: Items) -> Iterator[str]:
    """One table for all items of a shape."""
    rows = [row for _, found in _group(items, "sharded") for row in found]
    columns = [_VARIANT, _PEAK, _RESERVED, _size("host memory", "host_peak_bytes")]
    throughput = _number("tokens/s", "tokens_per_second", ",.0f")
    columns += [_number("step, s", "seconds_per_step", ".2f"), _next_to_baseline(throughput, "tokens_per_second")]
    for shape in dict.fromkeys(row.get("shape", "") for row in rows):
        chosen = sorted((row for row in rows if row.get("shape", "") == shape), key=lambda row: row["name"] != BASELINE)
        yield f"**`sharded`**: {shape}"
        yield _table(columns, chosen, _find(chosen, BASELINE))


def _optimizers(items: Items) -> Iterator[str]:
    """Rows of this package run in a Trainer, those of other libraries in a loop: each has a baseline of its own."""
    for item, rows in _group(items, "optimizers"):
        loop, trainer = _find(rows, BASELINE), _find(rows, MIXED)
        yield f"**`{item}`**: {loop.get('workload', '')}"
        columns = [_VARIANT, _PEAK_OF, _MS_OF]
        yield _table(columns, rows, lambda row: trainer if row.get("by") == "ours" or row is trainer else loop)  # noqa: B023


def _auto(items: Items) -> Iterator[str]:
    for item, rows in _group(items, "auto"):
        baseline = _find(rows, "baseline")
        columns: list[Column] = [
            _size("limit", "limit_bytes"),
            ("plan", lambda row, base: row.get("scheme", "")),
            *(_size(*pair) for pair in (("predicted", "predicted_bytes"), ("allocated", PEAK), ("reserved", RESERVED))),
            ("planning, s", lambda row, base: f"{row['seconds_with_plan'] - base.get('row_seconds', 0):.0f}"),
            ("step, ms", lambda row, base: f"{median(row['seconds']) * 1000:.0f}" if row.get("seconds") else ""),
        ]
        planned = [row for row in rows if "seconds_with_plan" in row]
        if planned:
            is_out = baseline.get("is_out_of_memory")
            yield f"**`{item}`**" + (": OOM of the baseline at this limit" if is_out else "")
            yield _table(columns, planned, baseline)


def _peaks(items: Items) -> Iterator[str]:
    rows = [row for _, found in _group(items, "peaks") for row in found if "allocated_error" in row]
    if not rows:
        return
    yield "**`peaks`**: peak memory of CUDA's caching allocator, compared with `estimate_memory`"
    keys = (("allocated, MiB", "allocated_bytes"), ("estimated, MiB", "estimated_allocated_bytes"))
    sizes = [_number(heading, key, ",.2f", 1 / MIB) for heading, key in keys]
    errors_of = [_number("error", "allocated_error", "+.2%"), _number("reserved error", "reserved_error", "+.2%")]
    yield _table([("case", _name), *sizes, *errors_of], rows, {})
    counted = [row for row in rows if row["name"] != UNINITIALIZED]
    errors = [abs(row["allocated_error"]) for row in counted]
    if errors:
        reserved = [abs(row["reserved_error"]) for row in counted if "reserved_error" in row] or [0.0]
        accurate = sum(error <= ACCURATE for error in errors)
        yield (
            f"Allocated: {accurate} of {len(errors)} cases within 0.1 %, mean error {fmean(errors):.2%}, worst "
            f"{max(errors):.2%}; reserved: mean {fmean(reserved):.2%}, worst {max(reserved):.2%}."
        )
    if left := _find(rows, UNINITIALIZED):
        state_bytes = left.get("estimated_allocated_bytes", 0) - left.get("allocated_bytes", 0)
        yield (
            f"`{UNINITIALIZED}` is not counted: its weights are not initialized, so the gradient scaler skipped every "
            f"step and AdamW created no state: {format_bytes(state_bytes)}, the whole difference."
        )


def _smoke(items: Items) -> Iterator[str]:
    lines, notes = [], []
    for item, rows in _group(items, "smoke"):
        again = _find(rows, "plain again")
        if again:
            notes.append(f"{item}, the baseline twice: {'' if again.get('is_equal') else 'not '}bitwise identical")
        features = [row for row in rows if row is not again and "the control" not in row["name"]]
        promised = [row for row in features if row.get("tolerance") == 0]
        near = [row for row in features if row.get("is_met") and 0 < row.get("tolerance", 0) < LOOSE]
        counts = (len(features), len(promised), sum(bool(row.get("is_equal")) for row in promised), len(near))
        lines.append([f"`{item}`", *map(str, counts)])
        for row in rows:
            bound = row.get("tolerance", 0.0)
            if "relative_difference" in row and (bound >= LOOSE or not row.get("is_met", True)):
                limit = "no tolerance" if bound >= LOOSE else f"more than the tolerance, {bound:.0e}"
                difference = f"{row['relative_difference']:.1e} of what training changed"
                notes.append(f"{item}, {row['name']}: differs by {difference}; {limit}")
    if lines:
        columns = ("item", "runs", "promise exact results", "bitwise identical", "others, within tolerance")
        yield "**`smoke`**: weights after four steps, compared with the baseline on this GPU"
        yield _markdown(columns, lines)
        yield "\n".join(f"- {note}" for note in notes)


def _host(items: Items) -> Iterator[str]:
    rate = _number("GB/s", "bytes_per_s", ".1f", 1e-9)
    for item, columns in (
        ("probe", (rate, _number("fork, s", "fork_seconds", ".3f"))),
        ("host_adamw", (_MS, _number("GB/s", "gb_per_second", ".0f"), _number("of `add_`", "rate_of_add", ".2f"))),
    ):
        if rows := items.get(item):
            yield f"**`{item}`**"
            case = ("case", lambda row, base: "PCIe copy" if row["name"] == "bus" else row["name"])
            yield _table([case, *columns], rows, {})
