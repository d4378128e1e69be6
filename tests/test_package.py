"""Promises of the package as a whole."""

import json
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import lightning_vram
from lightning_vram.startup import OLDEST, refuse_old_versions

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_public_names_exist_and_are_sorted():
    assert lightning_vram.__all__ == sorted(lightning_vram.__all__)
    assert all(getattr(lightning_vram, name).__doc__ for name in lightning_vram.__all__)


def test_classifiers_name_the_tested_versions_of_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = {row["python"].rpartition(".")[0] for row in json.loads((ROOT / "tests" / "versions.json").read_text())}
    named = {name.rpartition(" ")[2] for name in project["classifiers"] if "Python :: 3." in name}
    assert named == tested
    assert (ROOT / "lightning_vram" / "py.typed").exists()
    assert "Typing :: Typed" in project["classifiers"]
    assert {"gpu memory", "gradient checkpointing", "cuda out of memory"} <= {*project["keywords"]}


def test_the_changelog_and_the_citation_have_the_current_version():
    assert f"## [{lightning_vram.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    citation = yaml.safe_load((ROOT / ".github" / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (lightning_vram.__version__, "Apache-2.0")


@pytest.mark.slow_except("train", "track_memory", "in_place_fusion")
@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("**/*.py")), ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_examples_run(path, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(path), "--fast_dev_run"])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_the_readme_has_the_two_commands_ci_runs():
    commands = re.findall(r"^python3 -m venv .*$", README, re.MULTILINE)
    assert [command.split("&&")[-1].strip() for command in commands] == [
        ".venv/bin/lightning-vram fit --config configs/quickstart.yaml",
        ".venv/bin/pytest",
    ]


def test_the_tested_set_is_pinned():
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.!]+", pin) for pin in pins)
    assert {"torch", "lightning", "torchmetrics", "jsonargparse", "omegaconf"} <= {pin.split("==")[0] for pin in pins}


@pytest.mark.slow
def test_presets_are_in_the_wheel(tmp_path):
    """Built from a copy: a build leaves files beside its sources."""
    pytest.importorskip("setuptools", minversion="77", reason="pyproject.toml asks for it; torch 2.11 brings none")
    source = tmp_path / "source"
    for name in ("lightning_vram", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = "import setuptools.build_meta as b; print(b.build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(source / done.stdout.split()[-1]) as wheel:
        names = {name.removeprefix("lightning_vram/presets/") for name in wheel.namelist() if "/presets/" in name}
        assert names - {"README.md"} == {path.name for path in (ROOT / "configs").glob("*.yaml")}
        assert wheel.read("lightning_vram/presets/quickstart.yaml") == (ROOT / "configs/quickstart.yaml").read_bytes()


@pytest.mark.slow
def test_a_strict_type_checker_sees_the_public_names(tmp_path):
    pytest.importorskip("mypy")
    program = tmp_path / "program.py"
    names = ", ".join(lightning_vram.__all__)
    program.write_text(f"from lightning_vram import {names}\nreveal_type(AutoVRAM)\n")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file=", str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "has no attribute" not in done.stdout
    assert "AutoVRAM" in done.stdout.partition("Revealed type is")[2]


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
