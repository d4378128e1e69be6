"""A CUDA runtime that takes notes of the memory it is told of."""

from types import SimpleNamespace

import pytest
import torch

from lightning_vram.core.host import memory


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``registered``: bytes by address; ``freed``: addresses; a ``code`` other than 0 makes it refuse."""
    noted = SimpleNamespace(registered={}, code=0, freed=[])

    def register(address: int, nbytes: int, flags: int) -> int:
        if noted.code == 0:
            noted.registered[address] = nbytes
        return noted.code

    def unregister(address: int) -> None:
        del noted.registered[address]
        noted.freed.append(address)

    fake = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(memory, "_warned", [])
    return noted
