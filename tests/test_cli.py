"""The command: real fits, comparison, report, and one line for each mistake."""

import os
import re
import sys
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import yaml
from support.evil import Evil
from support.helpers import LitTiny, TinyCNN, assert_equal_weights
from support.offload_nets import leave_group
from support.parts import CONFIGS, PRESETS

from lightning_vram import FSDPOffloadStrategy
from lightning_vram.cli import main
from lightning_vram.memory.device.accelerators import SETTING, VARIABLES
from lightning_vram.memory.device.measurement import read_measurements
from lightning_vram.memory.units import format_bytes

ROOT = Path(__file__).parents[1]
QUICKSTART = f"--config={ROOT / 'configs' / 'quickstart.yaml'}"
SMALL = [
    *("--model.init_args.num_layers=2", "--model.init_args.width=16", "--model.init_args.sequence_length=32"),
    *("--data.init_args.batch_size=2", "--trainer.max_steps=4", "--trainer.val_check_interval=4"),
    *("--trainer.limit_val_batches=1", "--trainer.log_every_n_steps=2", "--trainer.accelerator=cpu"),
]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def in_tmp_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-vram"])  # LightningCLI warns about arguments of pytest's


COMMANDS = (
    "expected a command, one of fit, validate, test, predict, estimate, plan, calibrate, report, consolidate, presets"
)


def fail(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail; returns the one line it says."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("lightning-vram: error: ")]
    assert len(lines) == 1
    return lines[0].removeprefix("lightning-vram: error: ")


def write(path: Path, config: dict) -> str:
    path.write_text(yaml.safe_dump(config))
    return f"--config={path}"


def table_cells(text: str, row: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"│ {row} "))
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


@pytest.mark.slow
def test_the_quickstart_shows_plain_against_packed(capsys):
    main(["fit", QUICKSTART, *SMALL, "--trainer.callbacks.init_args.budget=420KiB"])
    out = capsys.readouterr().out
    assert "baseline and AutoVRAM" in out
    plain, packed, ratio = table_cells(out, "peak allocated")
    assert plain == "464.64 KiB"
    assert float(packed.split()[0]) < 420
    assert float(ratio) < 0.91
    for row in ("parameters", "gradients", "optimizer state", "activations", "temporaries", "time per step"):
        assert len(table_cells(out, row)) == 3
    assert "Final weights equal: yes, bit-exact." in out
    assert "quickstart/step.html: picture of the step with lightning_vram." in out
    page = Path("quickstart/step.html").read_text()
    assert "KiB, within the limit</h1>" in page
    assert "limit 420.00 KiB" in page
    stages = [m.stage for m in read_measurements("quickstart/vram.jsonl")]
    assert stages == ["train", "train", "train", "validate"]
    main(["report", "quickstart/vram.jsonl"])
    out = capsys.readouterr().out
    assert len(table_cells(out, "peak allocated")) == 2
    assert "Median time per training batch" in out


def test_the_command_lets_segments_of_the_allocator_expand(monkeypatch, capsys):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # what the command sets is taken back
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    fail(["fit", "--config=none.yaml"], capsys)
    assert {os.environ[name] for name in VARIABLES} == {SETTING}
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    fail(["fit", "--config=none.yaml"], capsys)  # too late, and of no matter


@pytest.mark.slow
def test_a_precision_plugin_is_compared_with_lightnings_of_the_same_format(capsys):
    plugin = {"class_path": "lightning_vram.LeanMixedPrecision", "init_args": {"recast_in_backward": True}}
    main(["fit", QUICKSTART, write(Path("precision.yaml"), {"trainer": {"plugins": [plugin]}}), *SMALL])
    out = capsys.readouterr().out
    assert re.search(r"AutoVRAM and\s+LeanMixedPrecision", out)
    assert "Final weights equal: yes, bit-exact." in out


@pytest.mark.slow
def test_the_strategy_is_left_out_of_the_plain_fit(capsys):
    config = {"trainer": {"strategy": "fsdp_offload", "callbacks": [{"class_path": "lightning_vram.VRAMMonitor"}]}}
    main(["fit", QUICKSTART, write(Path("strategy.yaml"), config), *SMALL])
    assert "baseline and fsdp_offload" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow_except("activation_checkpointing")
@pytest.mark.parametrize("path", [path for path in CONFIGS if path not in PRESETS], ids=lambda path: path.stem)
def test_the_command_each_config_begins_with(path, monkeypatch, capsys):
    command = path.read_text().splitlines()[0].removeprefix("# lightning-vram ").split()
    main([word.replace("configs/", f"{ROOT}/configs/") for word in command] + SMALL)


@pytest.mark.slow_except("test")
@pytest.mark.parametrize("subcommand", ["validate", "test", "predict"])
def test_other_subcommands(subcommand, capsys):
    config = yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text())
    del config["trainer"]["callbacks"], config["compare_with_baseline"]
    sizes = [option for option in SMALL if not option.startswith("--trainer.max") and "val_check" not in option]
    limit = {"test": ["--trainer.limit_test_batches=1"], "predict": ["--trainer.limit_predict_batches=1"]}
    main([subcommand, write(Path("c.yaml"), config), *sizes, *limit.get(subcommand, [])])


def test_any_module_that_does_not_fit_plain_is_told(capsys, monkeypatch):
    calls = []

    def fit(self, *args, **kwargs):
        calls.append(kwargs)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("lightning.pytorch.Trainer.fit", fit)
    main(["fit", QUICKSTART, *SMALL])
    out = capsys.readouterr().out
    assert len(calls) == 2
    assert "Final weights equal: -." in out


def test_interpolation_follows_overrides_and_other_files(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr("lightning.pytorch.Trainer.fit", lambda self, model, **kwargs: seen.append((model, kwargs)))
    base = write(Path("base.yaml"), {"model": {"class_path": "lightning_vram.demos.ByteGPT"}})
    data = {"class_path": "lightning_vram.demos.SourceText"}
    data["init_args"] = {"sequence_length": "${model.init_args.sequence_length}"}
    other = write(Path("other.yaml"), {"data": data})
    main(["fit", base, other, "--model.init_args.sequence_length=48", "--trainer.accelerator=cpu"])
    assert seen[0][1]["datamodule"].sequence_length == 48


CALLBACK = "lightning_vram.ActivationCheckpointing"


@pytest.mark.quick_sample(4)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--trainer.max_stepss=3"],
            "unrecognized arguments: --trainer.max_stepss=3. Did you mean --trainer.max_steps?",
        ),
        (["--trainer.callbacks+=EmtyCache"], "trainer.callbacks: Expected a dot import path string: EmtyCache"),
        (["--model.init_args.widthh=3"], "model: lightning_vram.demos.ByteGPT: Option 'widthh' is not accepted"),
        (["--config=nope.yaml"], "config: File does not exist: "),
        (["--model=NoSuch"], "model: Expected a dot import path string: NoSuch"),
        (["--trainer.strategy=foo"], "You selected an invalid strategy name: `strategy='foo'`."),
        (["--model.init_args.width=130"], "ByteGPT(num_heads) must divide width=130, got 4."),
        (
            ["--seed_everything=false"],
            "compare_with_baseline=true needs a seed for both fits, got seed_everything=false.",
        ),
        (["--trainer.callbacks=null"], "compare_with_baseline=true needs a lightning_vram.VRAMMonitor among"),
        (
            ["--trainer.callbacks=lightning_vram.VRAMMonitor"],
            "compare_with_baseline=true needs features of lightning_vram to",
        ),
        (["--ckpt_path=nope.ckpt"], "Checkpoint file not found: nope.ckpt"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(arguments, message, capsys):
    assert fail(["fit", QUICKSTART, *arguments], capsys).startswith(message)


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"trainr": {"max_steps": 1}},
            "Subcommand 'fit' does not accept option 'trainr.max_steps'. Did you mean trainer.max_steps?",
        ),
        (
            {"trainer": {"callbacks": [{"class_path": CALLBACK, "init_args": {"every_n_layers": 0}}]}},
            "ActivationCheckpointing(every_n_layers) must be at least 1, got 0.",
        ),
        ({"trainer": {"max_steps": "${nope.x}"}}, "Interpolation key '..nope.x' not found"),
        (
            {"data": {"class_path": "lightning_vram.demos.SourceText", "init_args": {"path": "empty"}}},
            "SourceText(path): no *.py file in 'empty'.",
        ),
    ],
)
def test_a_mistake_in_a_file_is_one_line(config, message, capsys):
    base = {
        "model": {"class_path": "lightning_vram.demos.ByteGPT"},
        "data": {"class_path": "lightning_vram.demos.SourceText"},
    }
    assert fail(["fit", write(Path("c.yaml"), base | config), "--trainer.accelerator=cpu"], capsys).startswith(message)


@pytest.fixture
def recursion_limit():
    """Python's own: torch's compiler raises that of its process for good."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: [a\n", "Problems parsing config: while parsing a flow sequence"),
        ("".join(" " * depth + "a:\n" for depth in range(500)), "the configuration is nested too deeply."),
        ("", "a --config file is empty, or no YAML mapping."),
    ],
    ids=["broken", "deep", "empty"],
)
@pytest.mark.usefixtures("recursion_limit")
def test_broken_yaml_is_one_line(text, message, capsys):
    Path("c.yaml").write_text(text)
    assert fail(["fit", "--config=c.yaml"], capsys).startswith(message)


def test_a_path_that_is_no_checkpoint_is_one_line(capsys):
    Path("notes.txt").write_text("hello")
    torch.save({"hyper_parameters": Evil(Path("was_run"))}, "evil.ckpt")
    assert fail(["fit", QUICKSTART, "--ckpt_path=notes.txt"], capsys) == (
        "notes.txt is damaged or not a checkpoint (KeyError: 101)"
    )
    assert fail(["fit", QUICKSTART, "--ckpt_path=evil.ckpt"], capsys).startswith("evil.ckpt contains posix.mkdir, and")
    assert not Path("was_run").exists()


def test_a_broken_checkpoint_is_one_line(capsys):
    torch.save({"state_dict": {"a": torch.arange(1000)}}, "a.ckpt")
    data = bytearray(Path("a.ckpt").read_bytes())
    data[data.index(torch.arange(1000).numpy().tobytes())] ^= 1
    Path("a.ckpt").write_bytes(data)
    arguments = [QUICKSTART, *SMALL, "--trainer.strategy=fsdp_offload", "--trainer.devices=1", "--ckpt_path=a.ckpt"]
    assert fail(["fit", *arguments], capsys) == (
        "The checkpoint a.ckpt could not be read: a.ckpt is damaged (Bad CRC-32 for file 'a/data/0'). Resume "
        "from another checkpoint, or load this one without the check: verify=False."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], f"{COMMANDS}, got none."),
        (["fitt"], f"{COMMANDS}, got 'fitt'. Did you mean fit?"),
        (["fit"], "model is missing: name it with --model, or in a file with --config FILE."),
    ],
)
def test_a_wrong_subcommand_is_one_line(arguments, message, capsys):
    assert fail(arguments, capsys).startswith(message)


class Broken(LitTiny):
    def __init__(self) -> None:
        super().__init__(TinyCNN())
        {}["nokey"]


def test_a_mistake_in_the_users_module_is_one_line(capsys, monkeypatch):
    line = fail(["fit", f"--model={__name__}.Broken", "--trainer.accelerator=cpu"], capsys)
    assert line == "'nokey' (LIGHTNING_VRAM_DEBUG=1 shows where)"
    Path("boom.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(Path.cwd())
    line = fail(["fit", "--model=boom.Module"], capsys)
    assert line == "model: division by zero, got boom.Module"


def test_a_bug_of_the_user_keeps_its_traceback_and_debug_shows_that_of_a_mistake(monkeypatch):
    def fit(self, *args, **kwargs):
        raise ValueError("from the user's own code")

    monkeypatch.setattr("lightning.pytorch.Trainer.fit", fit)
    with pytest.raises(ValueError, match="from the user's own code"):
        main(["fit", QUICKSTART, *SMALL])
    monkeypatch.setenv("LIGHTNING_VRAM_DEBUG", "1")
    with pytest.raises(ValueError, match="must divide"):
        main(["fit", QUICKSTART, "--model.init_args.width=130"])


def fit(model: LitTiny, ckpt_path: str | None = None, **options: object) -> pl.Trainer:
    options |= {"accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(max_steps=2, **options)
    trainer.fit(model, ckpt_path=ckpt_path)
    return trainer


def save_sharded(value: object = 1) -> LitTiny:
    """Train a model that has one value more in its checkpoints."""
    model = LitTiny(TinyCNN())
    model.on_save_checkpoint = lambda checkpoint: checkpoint.update(more=value)
    try:
        fit(model, strategy=FSDPOffloadStrategy(state_dict_type="sharded")).save_checkpoint("sharded")
    finally:
        leave_group()
    return model


@pytest.mark.distributed
def test_a_sharded_checkpoint_becomes_a_file_for_a_plain_trainer(capsys):
    model = save_sharded()
    main(["consolidate", "sharded", "one/plain.ckpt"])
    size = format_bytes(Path("one/plain.ckpt").stat().st_size)
    assert capsys.readouterr().out.splitlines()[-1] == f"one/plain.ckpt: {size}, for any Trainer."
    plain = LitTiny(TinyCNN())
    trainer = fit(plain, ckpt_path="one/plain.ckpt")
    assert trainer.global_step == 2
    assert_equal_weights(plain, model)
    states, (optimizer,) = torch.load("one/plain.ckpt")["optimizer_states"], trainer.optimizers
    assert len(states) == 1
    assert len(states[0]["state"]) == len(optimizer.state) > 0


@pytest.mark.distributed
def test_what_is_not_consolidated_is_one_line(capsys):
    save_sharded(Evil(Path("was_run")))
    assert "meta.pt contains posix.mkdir, and" in fail(["consolidate", "sharded", "plain.ckpt"], capsys)
    assert not Path("was_run").exists()
    assert fail(["consolidate", "sharded", "sharded"], capsys) == "sharded is a folder: name a file to write."
    main(["consolidate", "sharded", "plain.ckpt", "--weights_only", "false"])
    assert Path("was_run").exists()
    Path("was_run").rmdir()
    shard = next(Path("sharded").glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    arguments = ["consolidate", "sharded", "plain.ckpt", "--weights_only=false"]
    assert "is damaged" in fail(arguments, capsys)
    assert not Path("was_run").exists()
    main([*arguments, "--verify=false"])
