import copy
import io
import pickle
import random

import numpy
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_vram.core.random_state import read_state, write_state
from lightning_vram.techniques.exact_resume import (
    can_be_stateful,
    load_loader_state,
    loader_state,
    make_stateful,
    remove_state,
)

NUM_SAMPLES, SAVED_AFTER = 22, 3


class Numbers(Dataset):
    """Sample ``i`` is ``i``, and what was loaded is known."""

    def __init__(self):
        self.loaded = []

    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        self.loaded.append(index)
        return index


class EagerBatches:
    """A batch sampler of no class in particular, which draws in iter()."""

    def __init__(self):
        self.generator = seeded()

    def __len__(self):
        return 6

    def __iter__(self):
        order = numpy.random.permutation(NUM_SAMPLES).tolist()
        random.shuffle(order)
        order = torch.tensor(order)[torch.randperm(NUM_SAMPLES, generator=self.generator)]
        order = order[torch.randperm(NUM_SAMPLES)].tolist()
        return iter([order[start : start + 4] for start in range(0, NUM_SAMPLES, 4)])


class LateBatches(EagerBatches):
    """The same at the first next()."""

    def __iter__(self):
        yield from super().__iter__()


class Eager:
    """A sampler of no class in particular, within a BatchSampler."""

    def __len__(self):
        return NUM_SAMPLES

    def __iter__(self):
        return iter(numpy.random.permutation(NUM_SAMPLES).tolist())


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def distributed(**arguments):
    return DistributedSampler(range(NUM_SAMPLES), num_replicas=2, rank=1, **arguments)


def sampled(make_sampler, batch_size=4):
    return lambda **w: DataLoader(Numbers(), batch_size, sampler=make_sampler(), **w)


def with_replacement():
    return RandomSampler(range(NUM_SAMPLES), replacement=True, num_samples=70, generator=seeded())


def with_generator_within():
    within = RandomSampler(range(NUM_SAMPLES), generator=seeded())
    return DistributedSamplerWrapper(within, num_replicas=2, rank=1)


LOADERS = {
    "in order": lambda **w: DataLoader(Numbers(), 4, **w),
    "shuffled": lambda **w: DataLoader(Numbers(), 4, shuffle=True, **w),
    "shuffled, generator": lambda **w: DataLoader(Numbers(), 4, shuffle=True, generator=seeded(), **w),
    "replacement, generator": sampled(with_replacement),
    "subset": sampled(lambda: SubsetRandomSampler(range(1, 20))),
    "weighted": sampled(lambda: WeightedRandomSampler([1.0, 2.0] * 11, 20)),
    "distributed": sampled(lambda: DistributedSampler(range(NUM_SAMPLES), num_replicas=2, rank=1), 2),
    "distributed, generator within": sampled(with_generator_within, 2),
    "no batches": lambda **w: DataLoader(Numbers(), None, shuffle=True, **w),
    "eager": lambda **w: DataLoader(Numbers(), batch_sampler=EagerBatches(), **w),
    "late": lambda **w: DataLoader(Numbers(), batch_sampler=LateBatches(), **w),
    "within": sampled(Eager),
}
WORKERS = {
    "no workers": {},
    "workers": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}


def seed_all(seed):
    torch.manual_seed(seed)
    numpy.random.seed(seed)
    random.seed(seed)


def global_states():
    return [torch.get_rng_state().tolist(), numpy.random.get_state()[1].tolist(), random.getstate()]


def draw():
    """What a training step draws."""
    return [torch.rand(()).item(), numpy.random.rand(), random.random()]


def as_list(batch):
    return batch.tolist() if isinstance(batch, torch.Tensor) else [batch]


def stateful(make, **arguments):
    loader = make(**arguments)
    make_stateful(loader)
    return loader


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def set_epoch(loader, epoch):
    if hasattr(loader.sampler, "set_epoch"):
        loader.sampler.set_epoch(epoch)


def train(loader, num_epochs, first=0, on_batch=lambda epoch, index: None):
    """As Lightning does. Returns the batches of each epoch, and what the steps drew from the global generators."""
    epochs = []
    for epoch in range(first, num_epochs):
        set_epoch(loader, epoch)  # after iter() in the first epoch of a run only
        iterator = iter(loader)
        batches = []
        for index, batch in enumerate(iterator):
            batches.append((as_list(batch), draw()))
            on_batch(epoch, index)
        epochs.append(batches)
    return epochs


BREAKS = [
    *((name, "no workers") for name in LOADERS),
    pytest.param("late", "workers", marks=pytest.mark.slow),
    ("shuffled", "workers"),
    ("shuffled, generator", "persistent"),
]


@pytest.mark.parametrize(("name", "workers"), BREAKS)
def test_the_rest_of_an_epoch_and_the_next_are_those_of_a_run_without_a_break(name, workers):
    make, arguments = LOADERS[name], WORKERS[workers]
    saved, generators = {}, []

    def save(epoch, index):
        if (epoch, index) == (1, SAVED_AFTER - 1):
            saved.update(through_file(loader_state(loader)))
            generators.extend([torch.get_rng_state(), numpy.random.get_state(), random.getstate()])

    seed_all(1)
    loader = stateful(make, **arguments)
    whole = train(loader, 3, on_batch=save)
    if name not in ("eager", "within"):  # which draw later than in a plain loader
        seed_all(1)
        assert whole == train(make(**arguments), 3)

    seed_all(7)
    resumed = stateful(make, **arguments)
    load_loader_state(resumed, saved)
    iterator = iter(resumed)
    # What a trainer restores, after the seed of the workers was drawn as at any iter().
    torch.set_rng_state(generators[0])
    numpy.random.set_state(generators[1])
    random.setstate(generators[2])
    set_epoch(resumed, 1)
    rest = [(as_list(batch), draw()) for batch in iterator]
    assert rest == whole[1][SAVED_AFTER:]
    assert train(resumed, 3, first=2) == whole[2:]
    if not arguments:
        assert resumed.dataset.loaded[: len(rest[0][0])] == rest[0][0]  # what is skipped is not loaded


@pytest.mark.parametrize("num_workers", [0, 2])
def test_drawing_the_skipped_indices_leaves_the_global_generators_alone(num_workers):
    loader = stateful(LOADERS["late"], num_workers=num_workers)
    next(iterator := iter(loader))
    state = loader_state(loader)
    del iterator
    resumed, plain = stateful(LOADERS["late"], num_workers=num_workers), LOADERS["in order"](num_workers=num_workers)
    load_loader_state(resumed, state)
    streams = []
    for each in (resumed, plain):
        seed_all(3)
        list(iter(each))
        streams.append(global_states())
    assert streams[0] == streams[1]  # but for the seed of the workers, which every loader draws


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("workers", WORKERS)
def test_a_second_break_in_the_same_epoch_and_one_before_its_first_batch(workers):
    arguments = WORKERS[workers]
    make = LOADERS["shuffled, generator"]
    whole = train(make(**arguments), 1)[0]
    loader, batches = stateful(make, **arguments), []
    for num_batches in (0, 2, 0, 3):
        state, loader = through_file(loader_state(loader)), stateful(make, **arguments)
        load_loader_state(loader, state)
        assert loader_state(loader)["num_batches"] == state["num_batches"]  # saved again before it iterates
        iterator = iter(loader)
        batches += [as_list(next(iterator)) for _ in range(num_batches)]
    assert loader_state(loader)["num_batches"] == 5
    assert batches == [batch for batch, _ in whole[:5]]


@pytest.mark.parametrize(("num_workers", "epoch_has_ended"), [(0, True), (0, False), (1, False)])
def test_after_the_last_batch_comes_the_end_unless_told_and_then_the_next_order(num_workers, epoch_has_ended):
    make = LOADERS["shuffled, generator"]
    whole = train(make(num_workers=num_workers), 2)
    loader = stateful(make, num_workers=num_workers)
    iterator = iter(loader)
    for _ in range(len(loader)):  # and not once more, as in Lightning
        next(iterator)
    state = through_file(loader_state(loader, epoch_has_ended=epoch_has_ended))
    resumed = stateful(make, num_workers=num_workers)
    load_loader_state(resumed, state)
    assert epoch_has_ended or list(resumed) == []
    assert [batch for batch, _ in train(resumed, 1)[0]] == [batch for batch, _ in whole[1]]


def test_an_epoch_that_ends_early_is_forgotten_if_told_and_else_is_gone_on_with():
    loader = stateful(LOADERS["shuffled"])
    iterator = iter(loader)
    next(iterator)
    del iterator
    assert loader_state(loader)["num_batches"] == 1  # also when its iterator is gone
    assert loader_state(loader, epoch_has_ended=True)["num_batches"] == 0
    assert len(list(loader)) == len(loader)


def test_an_epoch_that_was_set_after_iter_is_kept():
    loader = stateful(LOADERS["distributed"])
    iterator = iter(loader)
    loader.sampler.set_epoch(3)
    next(iterator)
    resumed = stateful(LOADERS["distributed"])
    load_loader_state(resumed, loader_state(loader))
    assert [as_list(batch) for batch in resumed] == [as_list(batch) for batch in iterator]


def test_the_loader_is_what_it_was():
    loader = DataLoader(Numbers(), 4)
    make_stateful(loader)
    assert isinstance(loader, DataLoader)
    assert repr(type(loader)) == repr(DataLoader)
    assert len(loader) == 6
    with pytest.raises(ValueError, match=r"^batch_size attribute should not be set after DataLoader is"):
        loader.batch_size = 3
    next(iter(loader))
    for again in (copy.copy(loader), copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert type(again) is DataLoader
        assert vars(again).keys() == vars(DataLoader(Numbers(), 4)).keys()
        assert len(list(again)) == 6
    made_anew = type(loader)(Numbers(), 4)  # as Lightning does
    assert loader_state(made_anew)["num_batches"] == 0
    remove_state(loader)
    remove_state(loader)
    assert type(loader) is DataLoader
    assert vars(loader).keys() == vars(again).keys()


def test_persistent_workers_outlive_the_end_of_the_state():
    loader = stateful(LOADERS["shuffled"], **WORKERS["persistent"])
    list(loader)
    workers = loader._iterator._workers
    remove_state(loader)
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(NUM_SAMPLES))
    assert loader._iterator._workers is workers
    assert can_be_stateful(loader) == "its workers are already running (persistent_workers)"


class Endless(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class OwnIteration(DataLoader):
    def __iter__(self):
        yield from super().__iter__()


class OwnState(DataLoader):
    def state_dict(self):
        return {}


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Endless()), "its dataset is an IterableDataset, which has no positions"),
        (OwnState(Numbers()), "it has its own state_dict"),
        (OwnIteration(Numbers()), "its class defines its own iteration"),
        (DataLoader(Numbers(), sampler=Endless()), "its sampler has no length"),
        (DataLoader(Numbers(), num_workers=1, in_order=False), "in_order=False yields batches in any order"),
        ([], "it is not a DataLoader"),
    ],
)
def test_what_has_no_place_to_go_to_is_refused(loader, reason):
    kind = type(loader)
    assert can_be_stateful(loader) == reason
    with pytest.raises(ValueError, match=rf"^loader \w+ cannot be made stateful: {reason.replace('(', '[(]')}\.$"):
        make_stateful(loader)
    assert type(loader) is kind


def test_a_sampler_with_a_generator_of_another_kind_is_refused():
    sampler = Eager()
    sampler.own = random.Random(0)
    message = (
        r"^A run with the sampler Eager cannot be resumed exactly: it draws from a Random of its own\. Use a "
        r"torch\.Generator, or the global generator, in its place\.$"
    )
    with pytest.raises(ValueError, match=message):
        make_stateful(DataLoader(Numbers(), 4, sampler=sampler))


NUMPY_GENERATORS = ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"]


@pytest.mark.parametrize("kind", ["torch", "Random", "RandomState", *NUMPY_GENERATORS])
def test_a_generator_goes_on_from_its_state(kind):
    if kind in NUMPY_GENERATORS:
        generator = numpy.random.Generator(getattr(numpy.random, kind)(0))
    else:
        generator = {"torch": seeded, "Random": random.Random, "RandomState": numpy.random.RandomState}[kind](0)

    def numbers():
        if kind == "torch":
            return torch.randn(3, generator=generator).tolist()
        normal = generator.gauss if kind == "Random" else generator.normal
        return [normal(0, 1) for _ in range(3)]  # an odd number: some keep the second of two

    numbers()
    state = through_file(read_state(generator))
    expected = numbers()
    assert numbers() != expected
    write_state(generator, state)
    assert numbers() == expected


def test_a_state_of_another_loader_is_refused():
    loader = stateful(LOADERS["shuffled, generator"])
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader_state(loader)
    others = DataLoader(Numbers(), 16, generator=seeded()), LOADERS["shuffled"]()
    for other, found in zip(others, ("2 with 1", "6 with 0"), strict=True):
        make_stateful(other)
        with pytest.raises(ValueError, match=r"^load_loader_state\(") as caught:
            load_loader_state(other, state)
        assert str(caught.value) == (
            "load_loader_state(loader, state) begins after 3 batches with 1 generators, the loader has "
            f"{found}. Create the loader as it was when the state was saved."
        )
