"""The pages: their code runs, their links lead somewhere, and they are as short as they promise."""

import ast
import importlib.util
import inspect
import re
import signal
import sys
from datetime import timedelta

import lightning.pytorch as pl
import pytest
import yaml
from support.offload_nets import leave_group
from support.pages import (
    MARKS,
    PAGES,
    PARTS,
    README,
    anchors_in,
    code_in,
    figures_hold,
    links_in,
    matrix,
    page_of,
    parts_table,
    rows_of,
    section,
    shown,
    shown_by,
    title,
)
from support.parts import ROOT, snake_case

import lightning_vram
from lightning_vram.cli import main

ALL = [README, *PAGES]
SET_BY_THE_TRAINER = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}


def _is_large(path):
    """The pages by situation have models of real size, on tensors without memory: minutes."""
    return path.parent.name == "situations"


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield tmp_path
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    leave_group()


@pytest.mark.quick_sample(2)
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")  # Lightning, of its default logger
@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary")  # Lightning's
@pytest.mark.parametrize("path", [path for path in ALL if code_in(path, "python") and not _is_large(path)], ids=title)
def test_the_code_on_a_page_runs_warns_of_nothing_and_prints_what_is_shown(path, elsewhere, capsys):
    for block, output in shown_by(path):
        capsys.readouterr()
        exec(compile(block, title(path), "exec"), {"__name__": "__main__"})
        assert not output or not figures_hold() or capsys.readouterr().out == output


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")  # Lightning, of any strategy with ranks
@pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary")  # Lightning's
@pytest.mark.parametrize("path", [path for path in ALL if code_in(path, "python") and _is_large(path)], ids=title)
def test_so_does_the_code_that_estimates_large_models(path, elsewhere, capsys):
    test_the_code_on_a_page_runs_warns_of_nothing_and_prints_what_is_shown(path, elsewhere, capsys)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # LightningCLI 2.6 on jsonargparse 4.53
@pytest.mark.parametrize("path", [path for path in ALL if code_in(path, "yaml")], ids=title)
def test_the_yaml_on_a_page_is_taken_by_the_command(path, elsewhere, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning-vram"])  # LightningCLI warns about arguments of pytest's
    for block in code_in(path, "yaml"):
        (elsewhere / "page.yaml").write_text(block)
        with pytest.raises(SystemExit) as caught:
            main(["fit", f"--config={ROOT / 'configs' / 'quickstart.yaml'}", "--config=page.yaml", "--print_config"])
        assert caught.value.code == 0
        result = yaml.safe_load(capsys.readouterr().out)
        for class_path in re.findall(r"lightning_vram\.\w+", block):
            assert class_path in str(result["trainer"])


@pytest.mark.parametrize("path", [*ALL, ROOT / "CHANGELOG.md"], ids=title)
def test_links_lead_to_what_exists(path):
    for target in links_in(re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        found = (path.parent / name).resolve() if name else path
        assert found.exists(), target
        assert not anchor or anchor in anchors_in(found), target


@pytest.mark.parametrize("path", ALL, ids=title)
def test_commands_and_files_that_a_page_names_exist(path):
    text = path.read_text()
    for module in re.findall(r"python -m (tests\.[\w.]+\w)", text):
        assert importlib.util.find_spec(module), module
    for name in re.findall(r"(?:configs|examples|tests|lightning_vram|\.ci)/[\w/]+\.(?:yaml|py|sbatch|md)", text):
        if f"({name}" not in text:  # links, which may be relative, have a test of their own
            assert any((folder / name).exists() for folder in (ROOT, path.parent, ROOT / "lightning_vram")), name


def test_pages_are_short():
    assert len(README.read_text().splitlines()) <= 200
    assert [title(path) for path in PAGES if len(path.read_text().splitlines()) > 120] == []


def test_the_lines_to_paste_are_arguments_of_a_trainer():
    rows = rows_of(section(README, "It runs out of memory"))[1:]
    names = {name: getattr(lightning_vram, name) for name in lightning_vram.__all__}
    for *_, line in rows:
        arguments = eval(f"dict({line.strip('`')})", names)
        assert pl.Trainer(**arguments, accelerator="cpu", devices=1, logger=False, enable_model_summary=False)
    assert {page for row in rows for page in links_in(row[1])} >= {title(page_of(part)) for part in PARTS}


def test_the_table_of_the_parts_has_them_all_in_short_cells():
    assert sorted(parts_table()) == sorted(PARTS)
    assert [cell for row in parts_table().values() for cell in row if len(shown(cell).split()) > 12] == []


def test_the_matrix_says_the_same_in_both_directions():
    cells = matrix()
    assert cells.keys() == {(one, other) for one in PARTS for other in PARTS}
    assert all(cells[one, other] == cells[other, one] for one, other in cells)
    assert cells.pop(("FSDPOffloadStrategy",) * 2) == "—"  # a Trainer has one strategy
    assert {shown(cell) for cell in cells.values()} == set(MARKS)


def test_the_page_that_a_limit_leads_to_names_the_other_part():
    for (one, other), cell in matrix().items():
        if shown(cell) not in ("limited", "refused"):
            continue
        (target,) = links_in(cell)
        (page,) = {page_of(part) for part in (one, other) if target.startswith(_from_matrix(part))}
        named = other if page == page_of(one) else one
        limits = section(page, "What goes together")
        assert named in limits or page_of(named).parent.name + "/README.md" in limits, (one, other)


def _from_matrix(part):
    elsewhere = {
        "FSDPOffloadStrategy": "../strategies/fsdp_offload/",
        "LeanMixedPrecision": "../precision/",
        "StreamedCheckpointIO": "../checkpoint_io/",
    }
    return elsewhere.get(part, f"{snake_case(part)}/")


@pytest.mark.parametrize("part", PARTS)
def test_a_page_has_all_arguments_with_their_defaults(part):
    (call, *_) = (block for block in code_in(page_of(part), "text") if block.startswith(f"{part}("))
    shown_defaults = {word.arg: ast.literal_eval(word.value) for word in ast.parse(call).body[0].value.keywords}
    parameters = inspect.signature(getattr(lightning_vram, part)).parameters
    defaults = {name: parameter.default for name, parameter in parameters.items() if name not in SET_BY_THE_TRAINER}
    assert shown_defaults == {name: _as_shown(default) for name, default in defaults.items()}


def _as_shown(default):
    if isinstance(default, timedelta):
        return default.total_seconds()
    return list(default) if isinstance(default, tuple) else default
