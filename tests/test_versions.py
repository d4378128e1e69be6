"""What is too old is refused; what ``.ci/versions`` measured last is what README.md says, complete and green."""

import json
import re
import runpy
import tomllib
from pathlib import Path

import pytest

from lightning_vram.early_versions import OLDEST, refuse_old_versions

ROOT = Path(__file__).parents[1]
RESULTS = json.loads((ROOT / "tests" / "versions.json").read_text())


def minors(name: str, **like: object) -> set[str]:
    chosen = [result for result in RESULTS if all(result[key] == value for key, value in like.items())]
    return {".".join(result[name].split(".")[:2]) for result in chosen}


def test_the_table_in_the_readme_is_that_of_the_results():
    table = runpy.run_path(str(ROOT / ".ci" / "versions"))["table"]
    assert table(RESULTS) in (ROOT / "README.md").read_text()


def test_each_version_was_tested_and_nothing_failed():
    assert [result for result in RESULTS if result["failed"]] == []
    assert all(result["passed"] > 1500 for result in RESULTS)
    assert minors("torch") == {"2.11", "2.12", "2.13", "2.14", "2.15"}
    assert minors("torch", quick=False) == {"2.11", "2.13", "2.15"}
    assert minors("python") == {"3.11", "3.12", "3.13"}
    assert {result["lightning"] for result in RESULTS} >= {"2.6.4", "2.6.6"}


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
    monkeypatch.setattr("lightning_vram.early_versions.version", versions.__getitem__)
    with pytest.raises(ImportError, match=f"^{re.escape('lightning_vram ' + message)}$"):
        refuse_old_versions()


@pytest.mark.parametrize("torch", ["2.11.0", "2.13.0a0+git1234", "3.0"])
def test_newer_versions_are_not_refused(monkeypatch, torch):
    versions = {"torch": torch, "lightning": "2.6.4"}
    monkeypatch.setattr("lightning_vram.early_versions.version", versions.__getitem__)
    refuse_old_versions()
