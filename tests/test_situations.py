"""The pages by situation: commands run and print what is shown, lines are arguments of a Trainer, names are right."""

import inspect
import json
import re
import shlex
import sys

import lightning.pytorch as pl
import pytest
import transformers
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from support.pages import code_in, commands_in, figures_hold, links_in, rows_of, section, title
from support.parts import ROOT

import lightning_vram
from lightning_vram.cli import main
from tests.benchmarks.suites.tokens import STEP, needed_bytes

FOLDER = ROOT / "examples" / "situations"
INDEX = FOLDER / "README.md"
SITUATIONS = sorted(set(FOLDER.glob("*.md")) - {INDEX})
ARGUMENTS = re.compile(r"`((?:callbacks|plugins|strategy|precision|accumulate_grad_batches)=[^`]*)`")
NAMES = {name: getattr(lightning_vram, name) for name in lightning_vram.__all__} | {"DDPStrategy": DDPStrategy}


def lines_to_paste(path):
    """Arguments of a Trainer, as they stand in tables and sentences; in ``coming_from.md`` those on our side."""
    text = path.read_text()
    return ARGUMENTS.findall(re.sub(r"^\|[^|]*", "", text, flags=re.MULTILINE) if "| There |" in text else text)


@pytest.mark.parametrize("path", SITUATIONS, ids=title)
def test_each_page_is_in_the_index_and_begins_with_lines_to_paste(path):
    assert path.name in links_in(INDEX.read_text())
    first_screen = "\n".join(path.read_text().splitlines()[:25])
    assert ARGUMENTS.search(first_screen) or "```" in first_screen


@pytest.mark.parametrize("path", [path for path in SITUATIONS if lines_to_paste(path)], ids=title)
def test_lines_are_arguments_of_a_trainer(path):
    for line in lines_to_paste(path):
        arguments = eval(f"dict({line})", NAMES)
        pl.Trainer(**arguments, accelerator="cpu", devices=1, logger=False, enable_model_summary=False)


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Lightning's FSDP", inspect.signature(FSDPStrategy).parameters),
        ("HF Trainer", transformers.TrainingArguments.__dataclass_fields__),
    ],
)
def test_the_switches_of_the_others_that_are_installed_exist(heading, names):
    for there, _ in rows_of(section(FOLDER / "coming_from.md", heading))[1:]:
        switches = re.findall(r"`(\w+)[=`]", there)
        assert switches
        assert set(switches) <= set(names)


def test_jobs_are_those_that_the_tests_of_slurm_run():
    scripts = re.findall(r"sbatch (\S+)", "".join(code_in(FOLDER / "slurm.md", "bash")))
    tested = "".join(path.read_text() for path in (ROOT / "tests" / "slurm").rglob("*.py"))
    assert len(scripts) == 2
    for script in scripts:
        assert (ROOT / script).is_file()
        assert script.rpartition("/")[2] in tested


@pytest.mark.slow
@pytest.mark.parametrize("way", ["tokens_as_it_is", "tokens"])
def test_tokens_that_fit_are_those_of_the_estimator(way):
    rows = json.loads((ROOT / "tests" / "benchmarks" / "results" / "tokens_cpu.json").read_text())["rows"]
    (_, *shapes), *lines = rows_of(section(FOLDER / "long_context.md", "Tokens that fit, by card"))
    shown = {(line[0], shape): cell for line in lines for shape, cell in zip(shapes, line[1:], strict=True)}
    assert shown == {
        (f"{row['variant']}, {row['memory_bytes'] / 2**30:.1f} GiB", row["workload"]): (
            f"{row['tokens_as_it_is']:,} / {row['tokens']:,}"
        )
        for row in rows
        if (row["variant"], row["workload"])
        in {(line[0].rpartition(", ")[0], shape) for line in lines for shape in shapes}
    }
    if figures_hold():
        least, more = (needed_bytes(rows[0]["workload"], way, rows[0][way] + extra) for extra in (0, STEP))
        assert least <= rows[0]["memory_bytes"] < more


OF_MINUTES = {"one_24gb_card": pytest.mark.minutes}
WITH_COMMANDS = [pytest.param(p, marks=OF_MINUTES.get(p.stem, ()), id=title(p)) for p in SITUATIONS if commands_in(p)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # LightningCLI's
@pytest.mark.parametrize("path", WITH_COMMANDS)
def test_commands_run_and_print_what_is_shown(path, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-vram"])  # LightningCLI warns about arguments of pytest's
    for name, value in {"COLUMNS": "100", "LINES": "40", "FORCE_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)  # as in a terminal of that size, without colours
    for command, shown in commands_in(path):
        _, *arguments = shlex.split(command.replace("configs/", f"{ROOT}/configs/"))
        capsys.readouterr()
        if arguments[0] == "fit":  # hours: the command takes it, the presets have tests of their own
            with pytest.raises(SystemExit, match="0"):
                main([*arguments, "--print_config"])
        else:
            main(arguments)
        if figures_hold():
            printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
            assert [line for line in shown.splitlines() if line not in printed] == []
