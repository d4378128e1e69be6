"""Ranks of a new attempt meet where nothing of the old one is left."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, HashStore, Store

from lightning_vram.core.ranks import attempt_store

LONG = timedelta(seconds=60)
SHORT = timedelta(milliseconds=100)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    """Such as an agent keeps over its restarts."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return HashStore()


def meet(store: Store, world_size: int) -> list[Store]:
    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(lambda rank: attempt_store(store, rank, world_size, LONG), range(world_size)))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_ranks_see_the_same_keys(store: HashStore, world_size: int):
    views = meet(store, world_size)
    views[0].set("address", "10.0.0.1")
    assert {view.get("address") for view in views} == {b"10.0.0.1"}


@pytest.mark.parametrize("sizes", [(2, 2), (4, 2), (2, 4), (1, 1)])
def test_a_later_attempt_sees_nothing_of_an_earlier_one(store: HashStore, sizes: tuple[int, int]):
    before, after = sizes
    meet(store, before)[0].set("address", "of the dead")
    assert not any(view.check(["address"]) for view in meet(store, after))


def test_a_rank_whose_number_was_of_the_dead_is_answered_again(store: HashStore):
    store.set("lightning_vram/1", "dead")
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(attempt_store, store, 0, 2, LONG)
        store.wait(["dead"], LONG)  # rank 0 took it for the living one
        second = threads.submit(attempt_store, store, 1, 2, LONG)
        first.result().set("address", "10.0.0.1")
        assert second.result().get("address") == b"10.0.0.1"


def test_rank_0_does_not_go_on_before_a_rank_that_is_alive_answers(store: HashStore):
    with pytest.raises(DistStoreError, match="timeout"):
        attempt_store(store, 0, 3, SHORT)
    for rank in (1, 2):
        store.set(f"lightning_vram/{rank}", "dead")
    with pytest.raises(DistStoreError, match=r"^wait timeout after 0\.1 s, keys: \['lightning_vram/1', "):
        attempt_store(store, 0, 3, SHORT)


def test_a_rank_does_not_wait_for_rank_0_for_ever(store: HashStore):
    meet(store, 2)
    with pytest.raises(DistStoreError, match="timeout"):
        attempt_store(store, 1, 2, SHORT)


def test_a_store_that_no_agent_keeps_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    fresh = HashStore()
    assert attempt_store(fresh, 0, 2, SHORT) is fresh
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert attempt_store(fresh, 1, 2, SHORT) is fresh
