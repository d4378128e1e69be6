"""Restarts by ``torchrun`` are refused where ranks would meet at the addresses of dead ones."""

import pytest

from lightning_vram.core.ranks import check_store


@pytest.mark.parametrize(
    ("shares_store", "max_restarts", "is_refused"),
    [
        ("True", "2", True),
        ("True", "0", False),
        ("False", "2", False),
    ],
)
def test_restarts_need_a_store_of_their_own(monkeypatch, shares_store, max_restarts, is_refused):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shares_store)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", max_restarts)
    if not is_refused:
        check_store()
        return
    with pytest.raises(RuntimeError, match=r"^torchrun --max-restarts would start ranks again with .*_STORE=1 in its"):
        check_store()


def test_nothing_is_refused_without_torchrun():
    check_store()
