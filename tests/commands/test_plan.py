"""The command ``plan``: what it makes of files and arguments, with a stand-in for the planner itself."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import yaml
from support.offload_nets import leave_group
from support.plans import FUSION, checkpointing, measured, plan_of, tried

import lightning_vram
from lightning_vram.cli import main
from lightning_vram.planner.scheme import Part

QUICKSTART = f"--config={Path(__file__).parents[2] / 'configs' / 'quickstart.yaml'}"
DEVICE = ["--device", "h100"]
MODEL = {
    "seed_everything": 1,
    "model": {
        "class_path": "lightning_vram.demos.ByteGPT",
        "init_args": {"num_layers": 2, "width": 16, "sequence_length": 32},
    },
    "data": {"class_path": "lightning_vram.demos.SourceText", "init_args": {"batch_size": 2, "sequence_length": 32}},
    "trainer": {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False},
}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


def answer(monkeypatch, plan) -> dict[str, Any]:
    """Let the planner find a plan; returns what it will be called with."""
    found: dict[str, Any] = {}

    def plan_memory(module, batch=None, **arguments):
        found.update(arguments, module=module, batch=batch)
        arguments["on_progress"]("a step with nothing", 1.0)
        return plan

    monkeypatch.setattr("lightning_vram.commands.run.plan_memory", plan_memory)
    return found


@pytest.fixture
def asked(monkeypatch) -> dict[str, Any]:
    return answer(monkeypatch, plan_of())


def write(name: str, **trainer: Any) -> str:
    Path(name).write_text(yaml.safe_dump({**MODEL, "trainer": {**MODEL["trainer"], **trainer}}))
    return f"--config={name}"


def test_it_asks_for_what_the_configuration_says(asked):
    arguments = ["--budget=2GiB", "--host_memory=64GiB", "--allow=any", "--trainer.devices=4", "--num_nodes=2"]
    arguments.append("--trainer.precision=bf16-mixed")
    main(["plan", QUICKSTART, *DEVICE, *arguments])
    assert isinstance(asked["module"], lightning_vram.demos.ByteGPT)
    assert isinstance(asked["datamodule"], lightning_vram.demos.SourceText)
    assert (asked["device"], asked["budget"], asked["allow"]) == ("h100", "2GiB", "any")
    assert asked["host_memory"] == "64GiB"
    assert (asked["devices"], asked["num_nodes"], asked["trainer"]["precision"]) == (4, 2, "bf16-mixed")
    main(["plan", QUICKSTART, *DEVICE, "--batch.shape=[4, 33]", "--batch.dtype=int64", "--budget=0.5"])
    assert (asked["budget"], asked["allow"], asked["datamodule"]) == (0.5, "exact", None)
    assert asked["batch"].shape == (4, 33)


def test_the_table_the_file_to_paste_and_how_to_run_it_are_printed(asked, capsys):
    main(["plan", write("my.yaml"), *DEVICE, "--budget", "2GiB", "--trainer.max_steps=3"])
    out, err = capsys.readouterr()
    command = "lightning-vram fit ... --config plan.yaml"
    table, made, file = out.partition("\n\n# Made by `lightning-vram plan`: ")
    assert made
    assert sorted(table.split()) == sorted(str(plan_of()).split())  # the terminal may be wider
    assert file.startswith("a --config for `lightning-vram fit`, after your own.\n# ")
    assert "\n        budget: 950MiB\n" in out
    assert out.endswith(f"\nSave this as plan.yaml, or add -o plan.yaml, and run: {command}\n")
    assert "tracing" not in err  # not a terminal
    assert "picture" not in out
    assert [path.name for path in Path().iterdir()] == ["my.yaml"]


def test_a_file_and_a_picture_are_written(asked, capsys):
    pytest.importorskip("matplotlib", reason="the extra plots")
    main(["plan", write("my.yaml"), *DEVICE, "-o", "plan.yaml", "--plot=plan.png"])
    out = capsys.readouterr().out
    assert "callbacks" not in out
    assert out.endswith(
        "\nplan.png: picture of memory against step time.\n"
        "\nplan.yaml: the plan. Run: lightning-vram fit ... --config plan.yaml\n"
    )
    assert Path("plan.png").read_bytes()[:4] == b"\x89PNG"
    (callbacks,) = yaml.safe_load(Path("plan.yaml").read_text())["trainer"].values()
    assert [one["class_path"] for one in callbacks] == [
        "lightning_vram.InPlaceFusion",
        "lightning_vram.ActivationCheckpointing",
    ]


def test_a_run_that_fits_needs_nothing(monkeypatch, capsys):
    answer(monkeypatch, plan_of(tried()[:1], budget_bytes=2**40))
    main(["plan", QUICKSTART, *DEVICE])
    assert capsys.readouterr().out == "Fits without changes: 3.91 GiB of 1.00 TiB on H100. There is nothing to do.\n"
    main(["plan", QUICKSTART, *DEVICE, "--output=plan.yaml"])
    assert yaml.safe_load(Path("plan.yaml").read_text()) == {"trainer": {}}


def test_a_plan_is_replaced_and_nothing_else(asked, fail):
    main(["plan", write("my.yaml"), *DEVICE, "-o=plan.yaml"])
    first = Path("plan.yaml").read_text()
    main(["plan", "--config=my.yaml", *DEVICE, "-o=plan.yaml"])
    assert Path("plan.yaml").read_text() == first
    asked.clear()
    Path("other.yaml").write_text("trainer: {}\n")
    both = ["--config=my.yaml", "--config=plan.yaml", *DEVICE]
    assert fail("plan", *both, "-o=other.yaml") == (
        "--output=other.yaml exists and is not a plan of lightning-vram: name another file."
    )
    assert fail("plan", *both, "-o=plan.yaml") == "--output=plan.yaml is a --config of this plan: remove it there."
    assert asked == {}
    assert Path("other.yaml").read_text() == "trainer: {}\n"


def test_where_nothing_fits_there_is_one_line(monkeypatch, capsys, fail):
    found = plan_of().found
    monkeypatch.setattr("lightning_vram.planner.plan.search", lambda *args, **kwargs: replace(found, best=None))
    line = fail("plan", QUICKSTART, *DEVICE, "--budget=1MiB", "-o=plan.yaml", exit_code=3)
    assert "1.00 MiB" in line
    assert "the minimum found is 700.00 MiB, with MicroBatching(size=2)." in line.replace("The", "the")
    assert re.search(r"What helps: budget='\d+\.\d\dMiB', or perhaps allow='lossless' or 'any'\.", line)
    assert not Path("plan.yaml").exists()
    with pytest.raises(SystemExit) as caught:
        main(["plan", QUICKSTART, *DEVICE, "--budget=1MiB", "--json"])
    values = json.loads(capsys.readouterr().out)
    assert (caught.value.code, values["fits"], values["minimum_bytes"]) == (3, False, 700 * 2**20)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--device is missing: name the GPU to plan for, such as --device rtx4090."),
        (
            [*DEVICE, "--host_memory=-1GiB"],
            "--host_memory must be a number and one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB, got '-1GiB'.",
        ),
        ([*DEVICE, "--budget", "-5GiB"], "argument --budget: expected one argument"),
        ([*DEVICE, "--budget=20"], "--budget has no unit, got '20': write '20GiB'."),
        ([*DEVICE, "--budget=1.5"], "--budget as a share of the device must be above 0 and at most 1, got 1.5."),
        ([*DEVICE, "--budget=90GiB"], "--budget must be at most the 79.18 GiB that H100 SXM has, got '90GiB'."),
        ([*DEVICE, "--allow=all"], "--allow must be 'exact', 'lossless' or 'any', got 'all'."),
        ([*DEVICE, "--plot=plan.gif"], "--plot must end in one of .png, .svg, .pdf, .html, got 'plan.gif'."),
        ([*DEVICE, "-o=no/plan.yaml"], "--output: there is no folder 'no'."),
        ([*DEVICE, "--nope=1"], "unrecognized arguments: --nope=1"),
    ],
)
def test_bad_input_is_one_line(arguments, message, asked, fail):
    assert fail("plan", QUICKSTART, *arguments) == message
    assert asked == {}


def test_bad_input_is_refused_before_the_module_is_made(asked, monkeypatch, fail):
    def fails(*args, **kwargs):
        raise AssertionError

    for name in ("ByteGPT", "SourceText"):
        monkeypatch.setattr(getattr(lightning_vram.demos, name), "__init__", fails)
    assert fail("plan", QUICKSTART, *DEVICE, "--budget=0") == "--budget must be above 0, got '0'."
    assert fail("plan", QUICKSTART, "--device=voodoo").startswith("device 'voodoo' is unknown. ")


def test_json_has_the_plan_and_its_choices(asked, capsys):
    main(["plan", QUICKSTART, *DEVICE, "--budget=2GiB", "--json"])
    values = json.loads(capsys.readouterr().out)
    plan = plan_of()
    assert values["fits"]
    assert (values["needed_bytes"], values["budget_bytes"]) == (plan.peak_bytes, plan.budget_bytes)
    assert [one["class_path"] for one in values["config"]["trainer"]["callbacks+"]] == [
        "lightning_vram.InPlaceFusion",
        "lightning_vram.ActivationCheckpointing",
    ]
    assert [one["needed_bytes"] for one in values["choices"] if one["is_plan"]] == [plan.peak_bytes]


def test_a_budget_of_a_file_needs_a_unit_too(asked, fail):
    Path("budget.yaml").write_text("budget: 20\n")
    line = fail("plan", QUICKSTART, *DEVICE, "--config=budget.yaml")
    assert line == "--budget has no unit, got 20: write '20GiB'."
    Path("budget.yaml").write_text("budget: 20000000000\n")
    main(["plan", QUICKSTART, *DEVICE, "--config=budget.yaml"])
    assert asked["budget"] == 20000000000


def fit_with_plan(monkeypatch, *parts: Part, **own: Any) -> pl.Trainer:
    """Plan ``parts`` for a configuration, fit with both, and return the trainer."""
    answer(monkeypatch, plan_of((tried()[0], measured(*parts, mib=10, ms=200))))
    seen: list[pl.Trainer] = []
    fit = pl.Trainer.fit
    monkeypatch.setattr(
        "lightning.pytorch.Trainer.fit", lambda self, *args, **kwargs: [seen.append(self), fit(self, *args, **kwargs)]
    )
    main(["plan", write("my.yaml", **own), *DEVICE, "-o", "plan.yaml"])
    try:
        main(["fit", "--config=my.yaml", "--config=plan.yaml", "--trainer.fast_dev_run=true"])
    finally:
        leave_group()
    (trainer,) = seen
    assert trainer.global_step == 1
    return trainer


PLUGIN = {"class_path": "lightning_vram.LeanMixedPrecision", "init_args": {"precision": "bf16"}}


def test_fit_appends_the_plan_to_the_users_own(monkeypatch):
    own = {"callbacks": {"class_path": "lightning_vram.EmptyCache"}, "plugins": PLUGIN, "strategy": "auto"}
    trainer = fit_with_plan(monkeypatch, FUSION, checkpointing("1MiB"), **own)
    names = [type(callback).__name__ for callback in trainer.callbacks]
    expected = ["EmptyCache", "InPlaceFusion", "ActivationCheckpointing"]
    assert [name for name in names if hasattr(lightning_vram, name)] == expected
    assert isinstance(trainer.precision_plugin, lightning_vram.LeanMixedPrecision)


@pytest.mark.slow
@pytest.mark.distributed
def test_fit_takes_a_strategy_and_plugins_of_a_plan(monkeypatch):
    strategy = Part("lightning_vram.FSDPOffloadStrategy", {"offload": "optimizer"}, place="strategy")
    plugin = Part("lightning_vram.LeanMixedPrecision", {"precision": "bf16"}, place="plugins", replaces=("precision",))
    trainer = fit_with_plan(monkeypatch, strategy, plugin, strategy="auto", precision="bf16-mixed")
    assert isinstance(trainer.strategy, lightning_vram.FSDPOffloadStrategy)
    assert isinstance(trainer.precision_plugin, lightning_vram.LeanMixedPrecision)


@pytest.mark.slow
def test_a_plan_of_the_planner_is_run(capsys, fail):
    sizes = [f"--{part}.init_args.sequence_length=128" for part in ("model", "data")]
    sizes += ["--model.init_args.num_layers=4", "--model.init_args.width=64", "--data.init_args.batch_size=8"]
    main(["plan", write("my.yaml"), *sizes, "--device=cpu", "--budget=20MiB", "-o", "plan.yaml"])
    assert re.search(r"^\*.*ActivationCheckpointing", capsys.readouterr().out, re.MULTILINE)
    main(["fit", "--config=my.yaml", *sizes, "--config=plan.yaml", "--trainer.fast_dev_run=true"])
    assert "fits 1.00 MiB" in fail("plan", "--config=my.yaml", *sizes, "--device=cpu", "--budget=1MiB", exit_code=3)
