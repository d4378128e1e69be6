"""Versions that are too old are refused at import, in one line."""

import re
import tomllib
from pathlib import Path

import pytest

from lightning_vram.startup import OLDEST, refuse_old_versions

ROOT = Path(__file__).parents[1]


def test_the_oldest_versions_are_those_of_the_project():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    floors = dict(re.match(r"(\w+)>=([\d.]+)", line).groups() for line in dependencies if re.match(r"\w+>=", line))
    assert {name: ".".join(map(str, oldest)) for name, oldest in OLDEST.items()} == {n: floors[n] for n in OLDEST}


@pytest.mark.parametrize(
    ("name", "installed", "message"),
    [
        ("torch", "2.10.1", "needs torch 2.11 or newer, found 2.10.1: pip install 'torch>=2.11'"),
        ("lightning", "2.6.3", "needs lightning 2.6.4 or newer, found 2.6.3: pip install 'lightning>=2.6.4'"),
    ],
)
def test_an_older_version_is_refused_in_one_line(monkeypatch, name, installed, message):
    versions = {"torch": "2.11.0+cu130", "lightning": "2.6.4", name: installed}
    monkeypatch.setattr("lightning_vram.startup.version", versions.__getitem__)
    with pytest.raises(ImportError, match=f"^{re.escape('lightning_vram ' + message)}$"):
        refuse_old_versions()


@pytest.mark.parametrize("torch", ["2.11.0", "2.13.0a0+git1234", "3.0"])
def test_newer_versions_are_not_refused(monkeypatch, torch):
    versions = {"torch": torch, "lightning": "2.6.4"}
    monkeypatch.setattr("lightning_vram.startup.version", versions.__getitem__)
    refuse_old_versions()
