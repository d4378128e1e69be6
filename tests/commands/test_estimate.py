"""The command ``estimate``: what it makes of files and arguments, with a stand-in for the estimate itself."""

import copy
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from support.estimates import estimate_of
from support.parts import CONFIGS

import lightning_vram
from lightning_vram import DeviceSpec
from lightning_vram.cli import main
from lightning_vram.memory.units import parse_bytes
from lightning_vram.report.estimate import ShownEstimate, shown

ROOT = Path(__file__).parents[2]
QUICKSTART = f"--config={ROOT / 'configs' / 'quickstart.yaml'}"
DEVICE = ["--device", "rtx4090"]
SHAPE = [*DEVICE, "--batch.shape"]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture
def answer(monkeypatch) -> Callable[..., None]:
    """Let a function of the test be the estimate."""
    place = "lightning_vram.commands.run.estimate_memory"
    return lambda function: monkeypatch.setattr(place, shown(function, ShownEstimate))


@pytest.fixture
def asked(answer) -> dict[str, Any]:
    """What the estimate is called with."""
    found: dict[str, Any] = {}

    def estimate_memory(module, batch=None, **arguments):
        found.update(arguments, module=module, batch=batch)
        arguments["on_progress"]("tracing the step", 1.0)
        return estimate_of()

    answer(estimate_memory)
    return found


def test_the_answer_is_printed_and_drawn(asked, capsys):
    main(["estimate", QUICKSTART, *DEVICE, "--plot", "step.html"])
    out, err = capsys.readouterr()
    assert out.startswith("Fits: 900.00 MiB of 1.00 GiB on RTX 4090\n")
    assert out.endswith("step.html: picture of the step.\n")
    assert "Fits: 900.00 MiB" in Path("step.html").read_text()
    assert "tracing" not in err  # not a terminal


@pytest.mark.slow_except("quickstart", "slurm_fsdp_offload")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_it_takes_the_files_of_fit_and_makes_no_trainer(path, asked, monkeypatch):
    @functools.wraps(pl.Trainer.__init__)  # the parser reads its signature
    def refuse(*args, **kwargs):
        raise AssertionError("a Trainer was made")

    monkeypatch.setattr(pl.Trainer, "__init__", refuse)
    files = [QUICKSTART] if "quickstart" in path.read_text().splitlines()[0] else []
    main(["estimate", *files, f"--config={path}", *DEVICE])
    assert isinstance(asked["module"], pl.LightningModule)
    assert isinstance(asked["datamodule"], pl.LightningDataModule)
    config = yaml.safe_load(path.read_text())
    names = {part["class_path"].rpartition(".")[2] for part in config["trainer"].get("callbacks", [])}
    assert names <= {type(callback).__name__ for callback in asked["trainer"]["callbacks"]}
    assert all(isinstance(callback, pl.Callback) for callback in asked["trainer"]["callbacks"])


def test_arguments_of_the_trainer_are_made_but_no_trainer(asked):
    main(["estimate", QUICKSTART, *DEVICE, "--trainer.strategy=fsdp_offload", "--trainer.precision=bf16-mixed"])
    trainer = asked["trainer"]
    assert (trainer["strategy"], trainer["precision"], trainer["max_steps"]) == ("fsdp_offload", "bf16-mixed", 30)
    assert [type(callback).__name__ for callback in trainer["callbacks"]] == ["VRAMMonitor", "AutoVRAM"]
    plugin = '--trainer.plugins=[{"class_path": "lightning_vram.LeanMixedPrecision"}]'
    main(["estimate", QUICKSTART, *DEVICE, plugin])
    assert isinstance(asked["trainer"]["plugins"][0], lightning_vram.LeanMixedPrecision)


@pytest.mark.parametrize(
    ("arguments", "devices", "num_nodes"),
    [
        ([], 1, 1),
        (["--trainer.devices=4", "--trainer.num_nodes=2"], 4, 2),
        (["--trainer.devices=[0,2]"], 2, 1),
        (["--trainer.devices=4", "--devices=8", "--num_nodes=3"], 8, 3),
    ],
)
def test_devices(arguments, devices, num_nodes, asked):
    main(["estimate", QUICKSTART, *DEVICE, *arguments])
    assert (asked["device"], asked["devices"], asked["num_nodes"]) == ("rtx4090", devices, num_nodes)


def test_json_has_the_numbers_of_the_table(asked, capsys):
    main(["estimate", QUICKSTART, *DEVICE, "--json"])
    values = json.loads(capsys.readouterr().out)
    estimate = estimate_of()
    assert (values["fits"], values["device"], values["needed_bytes"]) == (True, "RTX 4090", 900 * 2**20)
    assert values["peak_bytes"] == sum(values["by_category"].values()) == estimate.peak_bytes
    assert values["by_module"] == dict(estimate.by_module)


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_run_that_does_not_fit_has_an_exit_code_of_its_own(arguments, answer, capsys):
    answer(lambda *args, **kwargs: replace(estimate_of(), device=DeviceSpec("small", 2**20)))
    with pytest.raises(SystemExit) as caught:
        main(["estimate", QUICKSTART, *DEVICE, *arguments])
    assert caught.value.code == 3
    out = capsys.readouterr().out
    assert json.loads(out)["fits"] is False if arguments else out.startswith("Does not fit: ")


def test_a_batch_of_the_wrong_kind_is_one_line(answer, fail):
    answer(lambda module, batch, **arguments: torch.nn.Embedding(4, 4)(batch))
    line = fail("estimate", QUICKSTART, *DEVICE, "--batch.shape=[8, 3, 224, 224]")
    assert line.startswith("the step fails on the batch of --batch.shape: ")
    assert "token ids need --batch.dtype int64 and --batch.high with the size of the vocabulary." in line


def test_what_the_users_code_prints_is_no_part_of_the_json(answer, capsys):
    answer(lambda *args, **kwargs: sys.stdout.write("hello") and estimate_of())
    main(["estimate", QUICKSTART, *DEVICE, "--json"])
    out, err = capsys.readouterr()
    assert json.loads(out)["fits"]
    assert "hello" in err


def test_a_strategy_a_number_and_a_device_are_refused_in_one_line(fail):
    line = fail("estimate", QUICKSTART, *DEVICE, "--trainer.strategy=fsdp_ofload")
    assert line.startswith("You selected an invalid strategy name: `strategy='fsdp_ofload'`.")
    assert fail("estimate", QUICKSTART, *DEVICE, "--devices=0") == "--devices must be at least 1, got 0."
    assert "Did you mean RTX 5090, RTX 4090, " in fail("estimate", QUICKSTART, "--device=rtx9999")


def test_a_device_can_be_described(asked):
    main(["estimate", QUICKSTART, "--device", "my card", "--device_memory", "24GiB"])
    assert (asked["device"].name, asked["device"].memory_bytes) == ("my card", 24 * 2**30)


def test_a_shape_stands_for_the_data(asked):
    shape = ["--batch.shape", "{tokens: [8, 1025], mask: [8]}", "--batch.dtype", "{tokens: int64, mask: bool}"]
    main(["estimate", QUICKSTART, *DEVICE, *shape, "--batch.high", "256"])
    assert asked["datamodule"] is None
    assert asked["batch"]["tokens"].shape == (8, 1025)
    assert asked["batch"]["tokens"].max() > 200
    assert asked["batch"]["mask"].dtype is torch.bool
    main(["estimate", QUICKSTART, *DEVICE, "--batch.shape", "[[8,3,4,4],[8]]", "--batch.dtype", "[float32, int64]"])
    assert [tensor.dtype for tensor in asked["batch"]] == [torch.float32, torch.int64]


class WithoutData(pl.LightningModule):
    pass


def test_the_optimizer_of_a_configuration_is_that_of_the_module_and_of_its_copies(asked):
    options = ["--optimizer=SGD", "--optimizer.lr=0.5", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=3"]
    main(["estimate", "--model=lightning_vram.demos.DigitsResNet", *SHAPE, "[2]", *options])
    for module in (asked["module"], copy.deepcopy(asked["module"])):
        (made,), (schedule,) = module.configure_optimizers()
        assert isinstance(made, torch.optim.SGD)
        assert made.defaults["lr"] == 0.5
        assert [id(p) for p in made.param_groups[0]["params"]] == [id(p) for p in module.parameters()]
        assert schedule.step_size == 3
    main(["estimate", "--model=lightning_vram.demos.DigitsResNet", *SHAPE, "[2]", *options[:2]])
    assert isinstance(asked["module"].configure_optimizers(), torch.optim.SGD)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_large_model_is_made_without_its_memory(asked):
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident_bytes()
    sizes = ["--model.init_args.num_layers=6", "--model.init_args.width=2048", "--model.init_args.num_heads=16"]
    main(["estimate", QUICKSTART, *DEVICE, *sizes])
    weights = sum(parameter.nbytes for parameter in asked["module"].parameters())
    assert weights > 2**30
    assert resident_bytes() - before < 2**28


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([QUICKSTART], "--device is missing: name the GPU to estimate for, such as --device rtx4090."),
        (
            [f"--model={__name__}.WithoutData", *DEVICE],
            "there is no batch: name a datamodule (--data), or give shapes, such as --batch.shape "
            "'[8, 3, 224, 224]', with --batch.dtype and, for integers, --batch.high.",
        ),
        ([QUICKSTART, *SHAPE, "[8]", "--batch.high=0"], "batch.high must be at least 1, got 0."),
        (
            [QUICKSTART, *DEVICE, "--device_memory=much"],
            "--device_memory must be a number and one of B, KiB, MiB, GiB, TiB, kB, MB, GB, TB, got 'much'.",
        ),
        ([QUICKSTART, *DEVICE, "--devices=two"], "devices: Expected int, got two"),
        ([QUICKSTART, *DEVICE, "--plot=folder.html"], "--plot: 'folder.html' is a folder."),
        ([QUICKSTART, "--devise=rtx4090"], "unrecognized arguments: --devise=rtx4090. Did you mean --device?"),
        ([QUICKSTART, "--device=no.json"], "the file 'no.json' cannot be read: No such file or directory."),
    ],
)
def test_bad_input_is_one_line(arguments, message, asked, fail):
    Path("folder.html").mkdir()
    assert fail("estimate", *arguments) == message
    assert asked == {}


def test_a_picture_without_matplotlib_is_one_line_before_the_work(asked, monkeypatch, fail):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert fail("estimate", QUICKSTART, *DEVICE, "--plot=step.png") == (
        "step.png needs matplotlib: pip install matplotlib. step.svg and step.html need nothing."
    )
    assert asked == {}


def test_what_the_estimate_refuses_is_one_line(answer, fail):
    answer(lambda *args, **kwargs: parse_bytes("a lot", "device"))
    assert fail("estimate", QUICKSTART, *DEVICE).startswith("device must be a number and one of B, ")
