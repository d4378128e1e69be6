import pickle

import torch

from lightning_vram.memory.device import out_of_memory
from lightning_vram.memory.device.out_of_memory import write_snapshot


def test_the_blocks_of_the_allocator_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(out_of_memory, "read_snapshot", lambda: {"segments": [{"address": 64}]})
    assert write_snapshot(tmp_path / "out.pickle")
    assert pickle.loads((tmp_path / "out.pickle").read_bytes()) == {"segments": [{"address": 64}]}


def test_without_cuda_there_is_none(tmp_path):
    if not torch.cuda.is_initialized():
        assert not write_snapshot(tmp_path / "out.pickle")
        assert not (tmp_path / "out.pickle").exists()
