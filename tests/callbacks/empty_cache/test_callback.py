"""EmptyCache: when it releases, what it refuses, what it warns about."""

from unittest.mock import Mock

import pytest
import torch
from support.devices import ACCELERATOR, DEVICE, device_module
from support.helpers import LitTiny, TinyCNN

from lightning_vram import EmptyCache
from lightning_vram.memory.device.accelerators import AllocatorBytes
from lightning_vram.memory.units import GIB, MIB

EPOCHS, BATCHES = 2, 3  # as set in make_trainer and LitTiny
MODULE = "lightning_vram.callbacks.empty_cache.callback"


def make_model() -> LitTiny:
    return LitTiny(TinyCNN())


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Stand in for a GPU's allocator, so that the timing is tested on any machine."""
    release = Mock(return_value=0)
    monkeypatch.setattr(f"{MODULE}.has_cache", lambda device: True)
    monkeypatch.setattr(f"{MODULE}.empty_cache", release)
    return release


def set_fragmentation(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    reading = AllocatorBytes(0, num_bytes, 0, num_bytes)
    monkeypatch.setattr(f"{MODULE}.read_allocator", lambda device: reading)


@pytest.mark.parametrize(
    ("every_n_batches", "during_training"),
    [
        pytest.param(None, 0, id="validation only"),
        pytest.param(1, BATCHES, id="each batch"),
        pytest.param(2, 1, id="rest of the epoch dropped"),
        pytest.param(BATCHES, 1, id="last batch counts"),
        pytest.param(BATCHES + 1, 0, id="longer than the epoch"),
    ],
)
def test_release_count(make_trainer, release, every_n_batches, during_training):
    trainer = make_trainer(callbacks=[EmptyCache(every_n_batches)], accumulate_grad_batches=3)
    trainer.fit(make_model())
    around_validation = 2
    assert release.call_count == EPOCHS * (during_training + around_validation)
    release.assert_called_with(trainer.strategy.root_device)


def test_releases_before_and_after_validation(make_trainer, release):
    model, releases_so_far = make_model(), []
    model.on_validation_batch_end = lambda *_: releases_so_far.append(release.call_count)
    make_trainer(max_epochs=1, callbacks=[EmptyCache()]).fit(model)
    assert releases_so_far == [1]  # the second release comes after the last batch
    assert release.call_count == 2


@pytest.mark.parametrize(("fragmentation_bytes", "is_released"), [(GIB - 1, False), (GIB, True)])
def test_fragmentation_decides(make_trainer, release, monkeypatch, fragmentation_bytes, is_released):
    set_fragmentation(monkeypatch, fragmentation_bytes)
    make_trainer(callbacks=[EmptyCache(min_fragmentation_bytes="1GiB")]).fit(make_model())
    assert release.call_count == (2 * EPOCHS if is_released else 0)


def test_one_fragmented_rank_is_enough(make_trainer, release, monkeypatch):
    set_fragmentation(monkeypatch, 0)
    trainer = make_trainer(max_epochs=1, callbacks=[EmptyCache(min_fragmentation_bytes=1)])
    votes = []
    monkeypatch.setattr(
        trainer.strategy, "reduce_boolean_decision", lambda vote, all: votes.append((vote, all)) or True
    )
    trainer.fit(make_model())
    assert votes == [(False, False)] * 2  # any rank, not all
    assert release.call_count == 2


@pytest.mark.parametrize("gc_collect", [False, True])
def test_collects_garbage_first_if_asked(make_trainer, release, monkeypatch, gc_collect):
    collect = Mock()
    monkeypatch.setattr(f"{MODULE}.gc.collect", collect)
    make_trainer(max_epochs=1, callbacks=[EmptyCache(gc_collect=gc_collect)]).fit(make_model())
    assert (collect.call_count >= 2) == gc_collect


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"every_n_batches": 0}, ValueError, r"every_n_batches\) must be at least 1, got 0\.$"),
        ({"every_n_batches": True}, TypeError, r"every_n_batches\) must be an int, got True of type bool\.$"),
        (
            {"min_fragmentation_bytes": "much"},
            ValueError,
            r"min_fragmentation_bytes\) must be a number .*, got 'much'\.$",
        ),
        ({"gc_collect": 1}, TypeError, r"gc_collect\) must be True or False, got 1 of type int\.$"),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=rf"^EmptyCache\({message}"):
        EmptyCache(**arguments)


def test_says_where_there_is_no_cache_and_warns_of_nothing(make_trainer, caplog):
    with caplog.at_level("INFO"):
        make_trainer(callbacks=[EmptyCache()]).fit(make_model())  # a warning would be an error here
    assert "EmptyCache has no effect on device 'cpu': it has no cache." in caplog.messages


@pytest.mark.device
def test_validation_does_not_inherit_the_cache(make_trainer):
    block_bytes = 256 * MIB

    def hoard(*_):  # allocate and free at once: the block stays in the cache
        torch.empty(block_bytes, dtype=torch.uint8, device=DEVICE)

    def reserved_when_validation_starts(callbacks):
        model, reserved_bytes = make_model(), []
        model.on_train_batch_end = hoard
        model.on_validation_start = lambda: reserved_bytes.append(device_module().memory_reserved())
        make_trainer(accelerator=ACCELERATOR, devices=1, callbacks=callbacks).fit(model)
        return min(reserved_bytes), max(reserved_bytes)

    least_without, _ = reserved_when_validation_starts([])
    _, most_with = reserved_when_validation_starts([EmptyCache()])
    assert most_with < block_bytes <= least_without
