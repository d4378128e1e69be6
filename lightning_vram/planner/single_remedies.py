"""What would help after OOM: each feature alone, the best combination, or a smaller evaluation."""

from collections.abc import Sequence
from dataclasses import replace

from lightning_vram.planner.measured import Measured, Workload, find_measured
from lightning_vram.planner.parts import Exactness, Part
from lightning_vram.planner.remedies import CHECKPOINTING, IN_PARTS, TOKEN_TILING, Remedies
from lightning_vram.planner.scheme import Scheme
from lightning_vram.planner.search import search
from lightning_vram.planner.traced_steps import TracedSteps


def measure_singles(steps: TracedSteps, exact: Remedies, every: Remedies, budget_bytes: int | None) -> None:
    """Search for the fastest exact scheme for a budget, if any, and trace each part alone.

    The best part comes before the search, which may take all the time. ``steps.tried`` has the results, the baseline
    first, also after an interrupt.
    """

    def measure(scheme: Scheme) -> Measured | None:
        return find_measured(scheme, steps.tried) or steps(scheme)

    measure(Scheme())
    singles = _singles(steps, every)
    for scheme in singles[:1]:
        measure(scheme)
    if budget_bytes is not None:
        search(measure, Workload(budget_bytes, steps.batch_size, steps.travel_bytes), exact)
    for scheme in singles[1:]:
        measure(scheme)


def _singles(steps: TracedSteps, remedies: Remedies) -> list[Scheme]:
    """Return each part alone: first those for the larger share of the peak, cheap to trace first."""
    parts = [CHECKPOINTING] if remedies.checkpoints else []
    if remedies.cuts and steps.batch_size > 1:
        parts.append(replace(IN_PARTS, init_args={"size": -(-steps.batch_size // 2)}))
    parts += [*remedies.free, *([TOKEN_TILING] if remedies.tiles else []), *remedies.singles]
    activations = [Scheme((part,)) for part in parts]
    states = [scheme for scheme in remedies.states if len(scheme.parts) == 1]
    baseline = steps.tried[0]
    return states + activations if baseline.states_bytes > baseline.activation_bytes else activations + states


def as_code(parts: Sequence[Part]) -> str:
    """Return arguments of a Trainer in Python.

    Example:
        >>> as_code([Part("lightning_vram.MicroBatching", {"size": 4})])
        'callbacks=[MicroBatching(size=4)]'
    """
    places: dict[str, list[str]] = {}
    for part in parts:
        arguments = ", ".join(f"{name}={value!r}" for name, value in part.init_args.items())
        places.setdefault(part.place, []).append(f"{part.name}({arguments})")
    texts = [f"{name}=None" for part in parts for name in part.replaces]
    texts += [
        f"{place}={made[0]}" if place == "strategy" else f"{place}=[{', '.join(made)}]"
        for place, made in places.items()
    ]
    return ", ".join(texts)


def results_of(exactness: Exactness) -> str:
    """Return how results compare with the baseline."""
    return ("exact", "lossless", "approximate")[exactness]
