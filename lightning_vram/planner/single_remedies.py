"""What each part alone would save of a run, and what the best of them together."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lightning_vram.planner.measured import Found, Measured, Workload
from lightning_vram.planner.parts import Exactness, Part
from lightning_vram.planner.remedies import CHECKPOINTING, IN_PARTS, TOKEN_TILING, Remedies
from lightning_vram.planner.scheme import Scheme
from lightning_vram.planner.search import search
from lightning_vram.planner.traced_steps import TracedSteps


def measure_singles(steps: TracedSteps, exact: Remedies, every: Remedies, budget_bytes: int | None) -> Found:
    """Run a step with each part alone and, if there is a budget, search for the fastest exact way to keep it."""
    if budget_bytes is None:
        plain = steps(Scheme())
        assert plain is not None  # nothing refuses the user's own run
        found = Found(None, plain, (plain,))
    else:
        found = search(steps, Workload(budget_bytes, steps.batch_size, steps.travel_bytes), exact)
    tried: list[Measured] = list(found.tried)
    for scheme in _singles(steps, every):
        if all(one.scheme != scheme for one in tried):
            measured = steps(scheme)
            tried += [] if measured is None else [measured]
    return replace(found, tried=tuple(tried))


def _singles(steps: TracedSteps, remedies: Remedies) -> Iterator[Scheme]:
    yield from (scheme for scheme in remedies.states if len(scheme.parts) == 1)
    yield from (Scheme((part,)) for part in (*remedies.free, *remedies.singles))
    if remedies.checkpoints:
        yield Scheme((CHECKPOINTING,))
    if remedies.tiles:
        yield Scheme((TOKEN_TILING,))
    if remedies.cuts and steps.batch_size > 1:
        yield Scheme((replace(IN_PARTS, init_args={"size": -(-steps.batch_size // 2)}),))


def as_code(parts: Sequence[Part]) -> str:
    """Return arguments of a Trainer, as Python has them.

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
    """Say how results compare with those of the run as it is."""
    return {
        Exactness.EXACT: "exact",
        Exactness.LOSSLESS: "lossless",
        Exactness.ANY: "approximate",
    }[exactness]
