"""What EarlyRelease says."""

import pytest


class Told:
    """What the callback has said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.warnings: list[str] = []
        self.infos: list[str] = []
        place = "lightning_vram.callbacks.early_release.callback.rank_zero_warn"
        monkeypatch.setattr(place, lambda text, **_: self.warnings.append(text))
        place = "lightning_vram.callbacks.early_release.callback.rank_zero_info"
        monkeypatch.setattr(place, lambda text, **_: self.infos.append(text))


@pytest.fixture
def told(monkeypatch):
    return Told(monkeypatch)
