"""A plan as text."""

from collections.abc import Iterator

from lightning_vram.memory.units import format_bytes
from lightning_vram.techniques.activation_checkpointing.budget.plan import CheckpointPlan, LayerChoice

_NAME_WIDTH = 29
_SAVED_WIDTH = 24
_HEADINGS = ("layers", "saved for backward", "each layer", "recomputed")


def format_table(plan: CheckpointPlan) -> str:
    """Write the plan as text of at most 80 columns; one sentence where the budget changes nothing.

    Neighbours with equal cells share a line. Recomputation is a share of the layer's forward.
    """
    if plan.peak_bytes == plan.plain_peak_bytes and not plan.recompute_cost and not plan.offloaded_bytes:
        sizes = f"{format_bytes(plan.peak_bytes)}, are within the budget of {format_bytes(plan.budget_bytes)}"
        return f"All activations, {sizes}: nothing is recomputed."
    rows = [_HEADINGS, *_rows(plan)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {saved:<{widths[1]}}  {size:>{widths[2]}}  {again:>{widths[3]}}".rstrip()
        for name, saved, size, again in rows
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
    size = format_bytes(choice.kept_bytes) if choice.kept_bytes else ""
    if choice.kind == "plain":
        return "all activations", size, "nothing"
    again = _format_share(_share(choice.recompute_cost, cost)) if choice.recompute_cost else "nothing"
    return _saved(choice) if choice.operators else "inputs only", size, again


def _saved(choice: LayerChoice) -> str:
    names = [(f"{count} x " if count > 1 else "") + name.removeprefix("aten.") for name, count in choice.operators]
    listed = f"outputs of {', '.join(names)}"
    num_outputs = sum(count for _, count in choice.operators)
    return listed if len(listed) <= _SAVED_WIDTH else f"{num_outputs} intermediate output{'s' * (num_outputs > 1)}"


def _name_run(names: list[str]) -> str:
    first, last = names[0], names[-1]
    if len(names) == 1:
        return _shorten(first, _NAME_WIDTH)
    count = f" ({len(names)})"
    parent, _, own = last.rpartition(".")
    whole = f"{first} ... {own if parent == first.rpartition('.')[0] else last}{count}"
    if len(whole) <= _NAME_WIDTH:
        return whole
    each = (_NAME_WIDTH - len(count) - len(" ... ")) // 2
    return f"{_shorten(first, each)} ... {_shorten(last, each)}{count}"


def _shorten(name: str, width: int) -> str:
    """Keep the end: it tells layers apart."""
    return name if len(name) <= width else ".." + name[2 - width :]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _format_share(share: float) -> str:
    return "< 0.1%" if 0 < share < 0.0005 else f"{share:.1%}"
