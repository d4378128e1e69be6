"""The search on a model of a step: what it needs falls with what is kept, and its time rises."""

from dataclasses import replace
from itertools import product

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_vram.estimation.step_time import StepTime
from lightning_vram.memory.units import GIB, MIB, parse_bytes
from lightning_vram.planner.plan import describe_minimum
from lightning_vram.planner.scheme import Exactness, Found, Measured, Part, Scheme, Workload
from lightning_vram.planner.search import (
    CHECKPOINTING,
    CHUNKED_LOSS,
    EARLY_RELEASE,
    FUSION,
    IN_BACKWARD,
    IN_PARTS,
    LOW_BIT,
    LOWER_BIT,
    MOMENTS,
    OFFLOAD,
    OPTIMIZER_ON_HOST,
    QUANTIZED,
    TOKEN_TILING,
    Remedies,
    leaner_on_host,
    remedies_for,
    search,
)

ON_HOST = Scheme((OPTIMIZER_ON_HOST,))
WEIGHTS, ACTIVATIONS, LEAST, BATCH_SIZE = 4 * GIB, 8 * GIB, GIB, 64
STEP = 8 * MIB  # what is kept comes in


class Steps:
    """Weights, and activations of which checkpointing keeps what it may; offloading takes the weights away."""

    def __init__(self, *, overhead=0, refused=(), seconds_on_host=0.5):
        self.overhead = overhead  # that the budget of activations does not cover
        self.refused = refused
        self.seconds_on_host = seconds_on_host
        self.schemes = []

    def __call__(self, scheme):
        self.schemes.append(str(scheme))
        parts = {part.class_path: part for part in scheme.parts}
        if any(part.name in self.refused for part in scheme.parts):
            return None
        arguments = parts[CHECKPOINTING.class_path].init_args if CHECKPOINTING.class_path in parts else None
        kept, overhead = ACTIVATIONS, 0
        if arguments is not None:
            asked = parse_bytes(arguments.get("budget", LEAST))
            kept = min(max(LEAST, asked // STEP * STEP), ACTIVATIONS)
            overhead = self.overhead if "budget" in arguments else 0
        seconds = 1.0 + (ACTIVATIONS - kept) / ACTIVATIONS / 3
        if FUSION.class_path in parts:
            kept, seconds = kept * 3 // 4, seconds + 0.05
        if IN_PARTS.class_path in parts:
            num_parts = -(-BATCH_SIZE // parts[IN_PARTS.class_path].init_args["size"])
            kept, seconds = kept // num_parts, seconds + 0.01 * num_parts
        is_on_host = OPTIMIZER_ON_HOST.class_path in parts
        needed = (0 if is_on_host else WEIGHTS) + kept + overhead
        return Measured(scheme, needed, kept, StepTime(seconds + self.seconds_on_host * is_on_host))


def found_for(budget, *, steps=None, **remedies) -> Found:
    chosen = Remedies(**{"states": (Scheme(), ON_HOST)} | remedies)
    return search(steps or Steps(), Workload(budget, BATCH_SIZE), chosen)


def names(measured) -> list[str]:
    return [part.name for part in measured.scheme.parts]


def test_what_fits_is_left_as_it_is():
    steps = Steps()
    found = found_for(12 * GIB, steps=steps)
    assert found.best is found.plain
    assert steps.schemes == ["baseline"]


@pytest.mark.parametrize("overhead", [0, 300 * MIB])
@pytest.mark.parametrize("budget", [11 * GIB, 8 * GIB, 6 * GIB])
def test_layers_keep_as_much_as_fits(budget, overhead):
    steps = Steps(overhead=overhead)
    found = found_for(budget, steps=steps)
    assert 0.99 * budget <= found.best.needed_bytes <= budget
    assert found.best.seconds == min(one.seconds for one in found.tried if one.needed_bytes <= budget)
    assert len(steps.schemes) <= 6


def test_compiled_modules_get_no_activation_budget():
    module = pl.LightningModule()
    module.layer = torch.nn.Linear(2, 2)
    assert remedies_for({}, Exactness.ANY, may_offload=False, module=module).budgets
    module.layer.compile(backend="eager")  # copies for traces are not compiled, and do not refuse
    assert not remedies_for({}, Exactness.ANY, may_offload=False, module=module).budgets
    from_compiled = pl.utilities.compile.from_compiled(torch.compile(module, backend="eager"))
    remedies = remedies_for({}, Exactness.ANY, may_offload=True, module=from_compiled)
    steps = Steps()
    search(steps, Workload(8 * GIB, BATCH_SIZE), remedies)
    assert any(CHECKPOINTING.name in scheme for scheme in steps.schemes)
    assert not any("budget" in scheme for scheme in steps.schemes)


def test_states_are_taken_first_where_they_are_faster():
    found = found_for(8 * GIB, steps=Steps(seconds_on_host=0.01))
    assert found.best.scheme == ON_HOST


def test_remedies_are_not_tried_on_what_is_slower_already():
    steps = Steps(seconds_on_host=2.0)
    found_for(6 * GIB, steps=steps)
    assert not [scheme for scheme in steps.schemes if OPTIMIZER_ON_HOST.name in scheme and "Checkpointing" in scheme]


@pytest.mark.parametrize("refused", [(), (CHECKPOINTING.name,), (FUSION.name,)])
@pytest.mark.parametrize("budget", [GIB // 2, 4 * GIB + 50 * MIB, 9 * GIB])
def test_no_set_of_parts_is_leaner_or_faster_than_what_is_found(budget, refused):
    found = found_for(budget, steps=Steps(refused=refused), singles=(FUSION,), cuts=True)
    some = [Steps(refused=refused)(scheme) for scheme in every_scheme()]
    measured = [one for one in some if one is not None]
    fitting = [one.seconds for one in measured if one.needed_bytes <= budget]
    if found.best is None:
        assert not fitting
        assert found.least.needed_bytes == min(one.needed_bytes for one in measured)
    else:
        assert found.best.seconds <= 1.05 * min(fitting)


def every_scheme():
    """All sets of parts: with each number of samples, and each budget of layers in steps of 256 MiB."""
    budgets = [{}, *({"budget": f"{size}MiB"} for size in range(1024, 8193, 256))]
    checkpoints = [(), *((Part(CHECKPOINTING.class_path, arguments),) for arguments in budgets)]
    cuts = [(), *((Part(IN_PARTS.class_path, {"size": size}),) for size in range(1, BATCH_SIZE))]
    for states, fusion, layers, cut in product((Scheme(), ON_HOST), ((), (FUSION,)), checkpoints, cuts):
        yield Scheme((*states.parts, *fusion, *layers, *cut))


class StepsWithFree(Steps):
    """``EarlyRelease`` and ``ChunkedLoss`` each take away what it says, at no price."""

    def __init__(self, saved, **arguments):
        super().__init__(**arguments)
        self.saved = saved

    def __call__(self, scheme):
        measured = super().__call__(scheme)
        saved = self.saved * sum(part in (EARLY_RELEASE, CHUNKED_LOSS) for part in scheme.parts)
        return measured and replace(measured, needed_bytes=measured.needed_bytes - saved)


def test_what_is_free_is_enough_or_goes_with_everything_else():
    free = {"free": (EARLY_RELEASE,)}
    assert found_for(11 * GIB, steps=StepsWithFree(GIB), **free).best.scheme == Scheme((EARLY_RELEASE,))
    found = found_for(8 * GIB, steps=StepsWithFree(GIB), **free)
    assert names(found.best) == ["EarlyRelease", "ActivationCheckpointing"]
    assert 0.99 * 8 * GIB <= found.best.needed_bytes <= 8 * GIB
    on_host = found_for(3 * GIB, steps=StepsWithFree(GIB), **free).best  # a strategy has gradients elsewhere
    assert names(on_host) == ["FSDPOffloadStrategy", "ActivationCheckpointing"]
    both, steps = {"free": (EARLY_RELEASE, CHUNKED_LOSS)}, StepsWithFree(GIB)
    assert found_for(11 * GIB, steps=steps, **both).best.scheme == Scheme((EARLY_RELEASE,))
    assert steps.schemes == ["baseline", "EarlyRelease"]
    assert found_for(10 * GIB, steps=steps, **both).best.scheme == Scheme((EARLY_RELEASE, CHUNKED_LOSS))
    on_host = found_for(2 * GIB, steps=steps, **both).best  # chunks stay
    assert names(on_host) == ["ChunkedLoss", "FSDPOffloadStrategy", "ActivationCheckpointing"]


@pytest.mark.parametrize("steps", [StepsWithFree(0), StepsWithFree(GIB, refused=("EarlyRelease",))])
def test_what_is_free_and_does_not_help_is_left_out(steps):
    best = found_for(8 * GIB, steps=steps, free=(EARLY_RELEASE,)).best
    assert names(best) == ["ActivationCheckpointing"]


class StepsInTiles(Steps):
    """Of layers that keep nothing tiles take a part away, and offload a quarter; both take time."""

    def __init__(self, tile_bytes=LEAST // 2, **arguments):
        super().__init__(**arguments)
        self.tile_bytes = tile_bytes

    def __call__(self, scheme):
        measured = super().__call__(scheme)
        names = [part.name for part in scheme.parts]
        if measured is None or CHECKPOINTING not in scheme.parts:
            return measured
        saved, seconds = self.tile_bytes * (TOKEN_TILING.name in names), 0.1 * (TOKEN_TILING.name in names)
        saved, seconds = saved + LEAST // 4 * (OFFLOAD.name in names), seconds + 0.5 * (OFFLOAD.name in names)
        if IN_PARTS.name in names:
            saved = saved * measured.activation_bytes // LEAST
        time = StepTime(measured.seconds + seconds)
        kept, needed = measured.activation_bytes - saved, measured.needed_bytes - saved
        return replace(measured, needed_bytes=needed, activation_bytes=kept, time=time)


LAYERS, TILES, TO_HOST = CHECKPOINTING.name, TOKEN_TILING.name, OFFLOAD.name
BOTH = [LAYERS, TILES, TO_HOST]


@pytest.mark.parametrize(
    ("budget", "remedies", "tried", "best"),
    [
        (5 * GIB, {}, [[LAYERS], [LAYERS]], [LAYERS]),
        (4.8 * GIB, {"offloads": True}, [[LAYERS], [LAYERS, TO_HOST], [LAYERS, TILES]], [LAYERS, TILES]),  # faster
        (4.6 * GIB, {}, [[LAYERS], [LAYERS, TILES]], [LAYERS, TILES]),
        (4.3 * GIB, {"offloads": True}, [[LAYERS], [LAYERS, TO_HOST], [LAYERS, TILES], BOTH], BOTH),
        (4.6 * GIB, {"checkpoints": False}, [[TILES]], None),  # the user checkpoints layers himself
    ],
)
def test_mlps_run_in_tiles_where_layers_that_keep_nothing_are_too_large(budget, remedies, tried, best):
    found = found_for(int(budget), steps=StepsInTiles(), states=(Scheme(),), tiles=True, **remedies)
    assert [names(one) for one in found.tried] == [[], *tried]
    assert (found.best and names(found.best)) == best


def test_tiles_go_with_parts_of_a_batch_and_are_asked_for_once_where_they_do_not_help():
    found = found_for(int(4.01 * GIB), steps=StepsInTiles(), states=(Scheme(),), tiles=True, cuts=True)
    assert names(found.best) == [LAYERS, TILES, IN_PARTS.name]
    assert found_for(GIB // 4, steps=StepsInTiles(), tiles=True).least.scheme == ON_HOST + CHECKPOINTING + TOKEN_TILING
    steps = StepsInTiles(tile_bytes=0)
    found_for(int(4.3 * GIB), steps=steps, states=(Scheme(), Scheme((IN_BACKWARD,))), tiles=True)
    assert [scheme for scheme in steps.schemes if TILES in scheme] == [f"{LAYERS} + {TILES}"]


def test_a_users_own_parts_are_kept():
    class ActivationCheckpointing:
        pass

    own = {"callbacks": [ActivationCheckpointing()], "strategy": "fsdp", "precision": "bf16-mixed"}
    remedies = remedies_for(own, Exactness.ANY, may_offload=True)
    assert not remedies.checkpoints
    assert not remedies.offloads
    assert {part.place for scheme in remedies.states for part in scheme.parts} == {"plugins", "callbacks"}


def test_results_are_as_true_as_was_asked_for():
    for level in Exactness:
        remedies = remedies_for({"precision": "bf16-mixed"}, level, may_offload=True)
        parts = [*remedies.singles, *(part for scheme in remedies.states for part in scheme.parts)]
        assert max(part.exactness for part in parts) == level
        assert remedies.cuts == remedies.tiles == (level >= Exactness.LOSSLESS)
        chunked = [CHUNKED_LOSS] if level >= Exactness.LOSSLESS else []
        assert list(remedies.free) == [EARLY_RELEASE, *chunked]
        frozen = nn.Linear(9, 9).requires_grad_(False)
        for module, quantized in ((nn.Linear(9, 9), ()), (frozen, QUANTIZED)):
            sets = [(), (IN_BACKWARD,)]
            if level == Exactness.ANY:
                sets += [(one,) for one in (*quantized, MOMENTS, LOW_BIT)]
                sets += [(IN_BACKWARD, LOW_BIT), (IN_BACKWARD, LOWER_BIT)]
            found = remedies_for({}, level, may_offload=False, module=module)
            assert found.states == tuple(map(Scheme, sets))


class StepsOfStates(Steps):
    """Of 16 bytes for each weight gradients are 4 and moments 8; what narrows them takes time."""

    def __call__(self, scheme):
        if super().__call__(scheme) is None:
            return None
        names = {part.name: part.init_args.get("bits") for part in scheme.parts}
        moments = {None: 8, 8: 2, 4: 1}[names.get("LowBitOptimizer")] - 4 * ("MomentsInBF16" in names)
        needed = 4 + 4 * ("OptimizerInBackward" not in names) + moments
        return Measured(scheme, needed * GIB, 0, StepTime(1 + 0.2 * len(names)))


ALONE = ["OptimizerInBackward", "MomentsInBF16", "LowBitOptimizer(bits=8)"]


@pytest.mark.parametrize(
    ("budget", "refused", "asked"),
    [
        (12, (), ALONE),
        (6, (), [*ALONE, "OptimizerInBackward + LowBitOptimizer(bits=8)"]),
        (5, (), [*ALONE, *(f"OptimizerInBackward + LowBitOptimizer(bits={bits})" for bits in (8, 4))]),
        (9, (IN_BACKWARD.name,), [*ALONE, "LowBitOptimizer(bits=4)"]),
        (12, (IN_BACKWARD.name, LOW_BIT.name), [*ALONE, "LowBitOptimizer(bits=4)"]),
    ],
)
def test_a_set_is_not_run_where_less_of_it_is_enough_and_goes_without_what_is_refused(budget, refused, asked):
    steps, states = StepsOfStates(refused=refused), remedies_for({}, Exactness.ANY, may_offload=False).states
    found = search(steps, Workload(budget * GIB), Remedies(states, checkpoints=False))
    assert steps.schemes == ["baseline", *asked]
    assert found.best is not None


class StepsOnHost(Steps):
    """What is on the host takes 18 bytes there, or less."""

    def __call__(self, scheme):
        measured = super().__call__(scheme)
        arguments = scheme.parts[0].init_args if scheme.parts and scheme.parts[0].place == "strategy" else None
        if arguments is None:
            return measured
        size = 18 - 4 * ("master" in arguments) - {None: 0, "bf16": 4, "8bit": 6}[arguments.get("host_state")]
        return replace(measured, needed_bytes=measured.activation_bytes, host_bytes=size * GIB)


@pytest.mark.parametrize(
    ("room", "found", "num_strategies"),
    [
        (None, {"offload": "optimizer"}, 1),
        (19, {"offload": "optimizer"}, 1),
        (18, {"offload": "optimizer", "master": "split"}, 2),
        (14, {"offload": "optimizer", "master": "split", "host_state": "bf16"}, 3),
        (9, {"offload": "optimizer", "master": "split", "host_state": "8bit"}, 4),
    ],
)
def test_a_host_that_is_too_small_has_less_there(room, found, num_strategies):
    """A GiB must stay free beside what is there."""
    own, steps = {"precision": "bf16-mixed"}, StepsOnHost()
    states = (Scheme(), *(Scheme((one,)) for one in (OPTIMIZER_ON_HOST, *leaner_on_host(OPTIMIZER_ON_HOST, own))))
    workload = Workload(9 * GIB, BATCH_SIZE, host_bytes=None if room is None else room * GIB)
    best = search(steps, workload, Remedies(states, checkpoints=False)).best
    assert best.scheme.parts[0].init_args == found
    assert sum("FSDPOffloadStrategy" in scheme for scheme in steps.schemes) == num_strategies


def test_a_host_that_is_too_small_for_all_is_what_is_told():
    own, steps = {}, StepsOnHost()
    states = (Scheme(), *(Scheme((one,)) for one in (OPTIMIZER_ON_HOST, *leaner_on_host(OPTIMIZER_ON_HOST, own))))
    workload = Workload(9 * GIB, BATCH_SIZE, host_bytes=12 * GIB)
    found = search(steps, workload, Remedies(states, checkpoints=False, singles=(FUSION,)))
    assert found.best is None
    least = found.least_of(workload)
    assert least.host_bytes == 12 * GIB
    assert describe_minimum(least, workload, Exactness.LOSSLESS, 2**40, may_choose_strategy=True) == (
        "No plan fits 12.00 GiB of host memory. The minimum found is 12.00 GiB, with FSDPOffloadStrategy("
        "offload=optimizer, host_state=8bit), in addition to 1.00 GiB that must stay free. What helps: "
        "host_memory='13.00GiB', FSDPOffloadStrategy(nvme_path='/a/fast/disk'), which keeps optimizer state on disk, "
        "or perhaps allow='any'."
    )
