"""The pages: their code runs, their links lead somewhere, and they are as short as they promise."""

import ast
import importlib.util
import inspect
import re
import signal
import sys
from datetime import timedelta
from pathlib import PurePosixPath
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from lightning.pytorch.strategies import DDPStrategy
from support.contexts import FEATURES
from support.offload_nets import leave_group
from support.pages import (
    CONTEXTS_PAGE,
    PAGES,
    PARTS,
    README,
    SMALLER,
    anchors_in,
    code_in,
    figures_hold,
    links_in,
    page_of,
    pairs_with_a_limit,
    section,
    shown,
    shown_by,
    symptoms,
    title,
)
from support.parts import ROOT

import lightning_vram
from lightning_vram.cli import main
from lightning_vram.demos import ByteGPT, SourceText

ALL = [README, *PAGES]
SET_BY_THE_TRAINER = {"accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"}


def _is_large(path):
    """Most guides have models of real size, on fake tensors: minutes."""
    return path.parent.name == "situations" and path.name not in SMALLER


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield tmp_path
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    leave_group()


@pytest.mark.quick_sample(2)
@pytest.mark.filterwarnings("ignore:Starting from v1.9.0, `tensorboardX`")  # Lightning, of its default logger
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
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
    names = ROOT / "lightning_vram" / "private_names" / "README.md"  # a table row for each name
    limits = {README: 2050, CONTEXTS_PAGE: 1400, page_of("FSDPOffloadStrategy"): 1200, names: 8000}
    developers = {path: 1200 for path in PAGES if "tests" in path.parts}
    long = {title(path): len(path.read_text().split()) for path in ALL}
    assert {name: n for name, n in long.items() if n > (developers | limits).get(ROOT / name, 700)} == {}
    lines = {title(path): len(path.read_text().splitlines()) for path in ALL}
    most = {README: 160, page_of("FSDPOffloadStrategy"): 130, names: 450}
    assert {name: n for name, n in lines.items() if n > most.get(ROOT / name, 120)} == {}
    first_screen = README.read_text().partition("\n## Try it")[0]
    assert len(first_screen.splitlines()) <= 34


def test_the_lines_to_paste_are_arguments_of_a_trainer():
    names = {name: getattr(lightning_vram, name) for name in lightning_vram.__all__} | {"DDPStrategy": DDPStrategy}
    for row in symptoms():
        line = row[2].partition("` ")[0].strip("`")
        if line.endswith(")") and "=" not in line.partition("(")[0]:
            assert callable(eval(line.removesuffix("()"), names)), line  # a function, called before CUDA starts
            continue
        arguments = eval(f"dict({line})", names)
        assert pl.Trainer(**arguments, accelerator="cpu", devices=1, logger=False, enable_model_summary=False)


def test_rows_of_the_table_of_symptoms_stand_alone_and_are_short():
    assert [cell for row in symptoms() for cell in row if len(shown(cell).split()) > 15] == []
    seen = [row[0] for row in symptoms()]
    assert len(set(seen)) == len(seen)
    assert [row[0] for row in symptoms() if not row[5].startswith(("exact", "lossless", "approximate"))] == []


def test_the_change_that_the_first_screen_shows_runs(elsewhere):
    (diff,) = code_in(README, "diff")
    lines = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    code = "\n".join(lines).replace("max_steps=1000", "max_steps=1, limit_val_batches=0, logger=False")
    model, data = ByteGPT(num_layers=1, width=16, sequence_length=32), SourceText(batch_size=2, sequence_length=32)
    exec(code, {"pl": pl, "model": model, "datamodule": data})


def test_pairs_are_sorted_and_one_of_the_pages_names_the_other():
    pairs = pairs_with_a_limit()
    assert len(pairs) == section(CONTEXTS_PAGE, "Pairs with a limit").count("\n- ")
    assert {name for pair in pairs for name in pair} <= FEATURES.keys()
    order = {name: place for place, name in enumerate(FEATURES)}
    assert pairs == sorted(pairs, key=lambda pair: [order[name] for name in pair])
    for one, other in pairs:
        limits = {name: section(page_of(name), "Compatibility") for name in (one, other)}
        named = {
            name: name in text or f"{page_of(name).parent.name}/README.md" in text
            for name, text in ((other, limits[one]), (one, limits[other]))
        }
        assert any(named.values()), (one, other)


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


# --- the documentation site; CI builds it in strict mode: no link is broken

SITE = yaml.safe_load((ROOT / ".docs" / "mkdocs.yml").read_text())
HIDDEN_PAGES = [title(path) for path in (ROOT / ".github").glob("*.md")]


def entries(nav: Any) -> list[str]:
    """Return the pages of a navigation, or of a part of it, in order."""
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in entries(entry)]


IN_NAVIGATION = entries(SITE["nav"])


def test_every_page_is_in_the_navigation_once():
    shown = [page for page in IN_NAVIGATION if not page.startswith("api/") and page.endswith(".md")]
    expected = [title(README), "CHANGELOG.md", *map(title, PAGES), *HIDDEN_PAGES, "examples/quickstart.ipynb.md"]
    assert sorted(shown) == sorted(expected)


def test_every_public_name_has_a_page_of_the_api_reference():
    names = [PurePosixPath(page).stem for page in IN_NAVIGATION if page.startswith("api/")]
    assert sorted(names) == sorted(["README", *lightning_vram.__all__])
