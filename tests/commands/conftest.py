"""Commands run in a folder of their own; one that must fail says one line."""

import sys
from collections.abc import Callable

import pytest

from lightning_vram.cli import main


@pytest.fixture(autouse=True)
def in_tmp_path(monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-vram"])  # LightningCLI warns about arguments of pytest's


@pytest.fixture
def fail(capsys) -> Callable[..., str]:
    """``fail(*arguments, exit_code=2)``: run a command that must fail; returns the one line it says."""

    def run(*arguments: str, exit_code: int = 2) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main([*arguments])
        assert caught.value.code == exit_code
        start = "lightning-vram: error: "
        (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith(start))
        return line.removeprefix(start).removesuffix(" (LIGHTNING_VRAM_DEBUG=1 shows where)")

    return run
