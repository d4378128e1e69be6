"""What is noted by storage is of one life of an address."""

import torch

from lightning_vram.memory.storages import ByStorage


def test_notes_by_storage_are_of_one_life_of_an_address() -> None:
    notes: ByStorage[str] = ByStorage()
    x = torch.ones(4)
    notes.note(x, "ones")
    assert notes.find(x[1:]) == "ones"
    assert notes.find(torch.ones(4)) is None
    notes.drop(x.view(2, 2))
    assert notes.find(x) is None
    notes.note(x, "ones")
    del x
    assert notes.find(torch.ones(4)) is None
    notes.note(torch.ones(2).to_sparse(), "sparse")
    notes.clear()
    assert not len(notes)


def test_a_death_is_reported_once_with_the_fact_and_not_after_it_was_dropped() -> None:
    dead: list[str] = []
    notes = ByStorage(dead.append)
    x, y, z = torch.ones(4), torch.ones(4), torch.ones(4)
    for tensor, fact in ((x, "before"), (x, "x"), (y, "y"), (z, "z")):
        notes.note(tensor, fact)
    view = x[1:]
    del x
    assert dead == []
    del view
    assert dead == ["x"]
    notes.drop_storage(y.untyped_storage())
    del y
    assert [(len(storage), fact) for storage, fact in notes.items()] == [(16, "z")]
    notes.clear()
    del z
    assert dead == ["x"]
