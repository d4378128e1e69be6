"""A plan as text for people."""

from collections.abc import Iterator

from lightning_vram.memory.units import format_bytes
from lightning_vram.techniques.activation_checkpointing.budget.plan import CheckpointPlan, LayerChoice

_NAME_WIDTH = 40
_KEPT_WIDTH = 32


def format_table(plan: CheckpointPlan) -> str:
    """Write the plan as text of at most 100 columns.

    Equal neighbours share a line. Bytes are of one layer, recomputation is a share of its forward.
    """
    rows = [("layers", "saves", "bytes each", "recomputes"), *_rows(plan)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {keeps:<{widths[1]}}  {size:>{widths[2]}}  {again:>{widths[3]}}".rstrip()
        for name, keeps, size, again in rows
    ]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:], rule, *_totals(plan)])


def _rows(plan: CheckpointPlan) -> Iterator[tuple[str, str, str, str]]:
    costs = [layer.cost for layer in plan.profile.layers]
    runs: list[list[tuple[LayerChoice, tuple[str, str, str]]]] = []
    for choice, cost in zip(plan.choices, costs, strict=True):
        entry = (choice, _cells(choice, cost))
        if runs and runs[-1][0][1] == entry[1]:
            runs[-1].append(entry)
        else:
            runs.append([entry])
    for run in runs:
        keeps, size, again = run[0][1]
        yield _name_run([choice.name for choice, _ in run]), keeps, size, again


def _totals(plan: CheckpointPlan) -> Iterator[str]:
    yield f"budget          {format_bytes(plan.budget_bytes)}"
    used = f" ({_share(plan.peak_bytes, plan.budget_bytes):.1%} of the budget)"
    yield f"predicted peak  {format_bytes(plan.peak_bytes)}{used}"
    yield f"baseline peak   {format_bytes(plan.plain_peak_bytes)}"
    yield f"minimum         {format_bytes(plan.minimum_bytes)}"
    if plan.offloaded_bytes:
        yield f"offloaded       {format_bytes(plan.offloaded_bytes)} of each forward"
    again = f"extra compute   {_format_share(plan.recompute_share)} of the forward"
    if not plan.is_proven_best:
        least = _share(plan.least_recompute_cost, plan.profile.cost)
        again += f" (the best plan may need as little as {_format_share(least)})"
    yield again


def _cells(choice: LayerChoice, cost: float) -> tuple[str, str, str]:
    size = format_bytes(choice.kept_bytes)
    if choice.kind == "plain":
        return "everything", size, "-"
    names = [f"{count} x {name}" if count > 1 else name for name, count in choice.operators]
    return _shorten_list(names) or "inputs only", size, _format_share(_share(choice.recompute_cost, cost))


def _shorten_list(names: list[str]) -> str:
    for shown in range(len(names), 0, -1):
        text = ", ".join(names[:shown]) + (f", {len(names) - shown} more" if shown < len(names) else "")
        if len(text) <= _KEPT_WIDTH:
            return text
    return (
        f"{len(names)} kinds of results" if len(names) > 1 else "".join(_shorten(name, _KEPT_WIDTH) for name in names)
    )


def _name_run(names: list[str]) -> str:
    if len(names) == 1:
        return _shorten(names[0], _NAME_WIDTH)
    count = f" ({len(names)})"
    whole = f"{names[0]} ... {names[-1]}{count}"
    if len(whole) <= _NAME_WIDTH:
        return whole
    each = (_NAME_WIDTH - len(count) - len(" ... ")) // 2
    return f"{_shorten(names[0], each)} ... {_shorten(names[-1], each)}{count}"


def _shorten(name: str, width: int) -> str:
    """Keep the end: it tells layers apart."""
    return name if len(name) <= width else ".." + name[2 - width :]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _format_share(share: float) -> str:
    return f"{share:.1%}"
