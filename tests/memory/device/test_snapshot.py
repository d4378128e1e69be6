import pickle

import torch

from lightning_vram.memory.device import out_of_memory
from lightning_vram.memory.device.out_of_memory import annotate, write_snapshot


def blocks():
    return [
        {"address": 64, "size": 512, "state": "active_allocated", "frames": []},
        {"address": 576, "size": 512, "state": "inactive", "frames": []},
        {"size": 1024, "state": "active_allocated"},
    ]


def test_blocks_are_named():
    taken = {"segments": [{"address": 64, "blocks": blocks()}]}
    annotate(taken, {64: "parameters: head.weight", 576: "freed since"})
    first, free, other = taken["segments"][0]["blocks"]
    assert first["frames"][0]["name"] == "parameters: head.weight"
    assert free["frames"] == []
    assert other["frames"][0]["name"] == "activations, temporaries and other tensors"


def test_it_is_written_by_the_address_of_storages(tmp_path, monkeypatch):
    tensor = torch.ones(8)
    segment = {"address": tensor.untyped_storage().data_ptr(), "blocks": blocks()[:1]}
    del segment["blocks"][0]["address"]
    monkeypatch.setattr(out_of_memory, "read_snapshot", lambda: {"segments": [segment]})
    assert write_snapshot(tmp_path / "out.pickle", [("buffers: mean", tensor[2:])])
    read = pickle.loads((tmp_path / "out.pickle").read_bytes())
    assert read["segments"][0]["blocks"][0]["frames"][0]["name"] == "buffers: mean"


def test_without_cuda_there_is_none(tmp_path):
    if not torch.cuda.is_initialized():
        assert not write_snapshot(tmp_path / "out.pickle", [])
        assert not (tmp_path / "out.pickle").exists()
