"""Presets: each is a whole run, also in a job of SLURM, goes on where it was, and takes parts on top."""

import sys
from pathlib import Path

import pytest
import yaml
from support.parts import PRESETS, ROOT

from lightning_vram.cli import main
from lightning_vram.demos import ByteGPT

SMALL = {
    "lightning_vram.demos.ByteGPT": [
        *("--model.init_args.num_layers=2", "--model.init_args.width=16", "--model.init_args.sequence_length=32"),
        "--data.init_args.batch_size=2",
    ],
    "lightning_vram.demos.DigitsResNet": ["--model.init_args.width=4", "--data.init_args.batch_size=4"],
}
QUIET = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def outside_of_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["lightning-vram"])  # LightningCLI warns about arguments of pytest's
    for name in ("SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "SLURM_JOB_ID", "RUN_DIR"):
        monkeypatch.delenv(name, raising=False)


def config(name: str) -> str:
    return f"--config={ROOT / 'configs' / name}.yaml"


def write(text: str) -> str:
    Path("own.yaml").write_text(text)
    return "--config=own.yaml"


def read(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict:
    """The configuration that these arguments make, without a run."""
    with pytest.raises(SystemExit) as caught:
        main(["fit", *arguments, "--print_config"])
    assert caught.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)


def callbacks_of(result: dict) -> list[str]:
    return [callback["class_path"].rpartition(".")[2] for callback in result["trainer"]["callbacks"]]


def checkpoints_of(result: dict) -> str | None:
    return result["trainer"]["callbacks"][callbacks_of(result).index("ModelCheckpoint")]["init_args"]["dirpath"]


def small(path: Path) -> list[str]:
    return SMALL.get(yaml.safe_load(path.read_text())["model"]["class_path"], [])


@pytest.mark.slow_except("single_gpu")
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_is_a_whole_run_that_writes_where_it_runs(path, tmp_path):
    main(["fit", f"--config={path}", *small(path), *QUIET, "--trainer.fast_dev_run=true"])
    assert len(list(tmp_path.rglob("last.ckpt"))) == 1
    assert not [name for name in tmp_path.iterdir() if (ROOT / name.name).exists()]


@pytest.mark.quick_sample(2)
@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_says_its_folder_once(path, capsys):
    result = read(f"--config={path}", "--trainer.default_root_dir=elsewhere", capsys=capsys)
    assert result["trainer"]["logger"]["init_args"]["save_dir"] == "elsewhere"
    assert checkpoints_of(result) in (None, "elsewhere/checkpoints")  # None: the logger's folder


def test_the_sizes_of_a_job_arrive_as_numbers(monkeypatch, capsys):
    trainer = read(config("slurm_fsdp_offload"), capsys=capsys)["trainer"]
    assert (trainer["num_nodes"], trainer["devices"]) == (1, 1)  # outside of a job
    monkeypatch.setenv("SLURM_NNODES", "2")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "4")
    trainer = read(config("slurm_fsdp_offload"), capsys=capsys)["trainer"]
    assert (trainer["num_nodes"], trainer["devices"]) == (2, 4)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [({"SLURM_JOB_ID": "17"}, "runs/17"), ({"SLURM_JOB_ID": "17", "RUN_DIR": "/shared/a run"}, "/shared/a run")],
    ids=["job", "named"],
)
def test_a_job_has_one_folder_over_all_restarts(variables, folder, monkeypatch, capsys):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = read(config("slurm_fsdp_offload"), capsys=capsys)
    assert result["trainer"]["default_root_dir"] == folder
    assert checkpoints_of(result) == f"{folder}/checkpoints"


@pytest.mark.slow
def test_a_job_that_comes_back_goes_on_from_its_last_step(monkeypatch, tmp_path):
    step, batches = ByteGPT.training_step, []

    def training_step(self, batch):
        batches.append(self.trainer.global_step)
        return step(self, batch)

    monkeypatch.setattr(ByteGPT, "training_step", training_step)
    path = ROOT / "configs" / "slurm_fsdp_offload.yaml"
    for max_steps in (2, 3):
        limits = [f"--trainer.max_steps={max_steps}", "--trainer.log_every_n_steps=1"]
        limits.append("--trainer.callbacks.every_n_train_steps=1")  # of the last callback
        main(["fit", f"--config={path}", *small(path), *QUIET, *limits, "--trainer.limit_val_batches=0"])
    assert batches == [0, 1, 2]
    assert [folder.name for folder in tmp_path.rglob("*.ckpt")] == ["last.ckpt"]
    assert len(list(tmp_path.rglob("metrics.csv"))) == 2  # none is overwritten


def test_a_list_with_a_plus_is_added_to_that_of_the_preset(capsys):
    own = write("trainer:\n  callbacks+:\n    - lightning_vram.InPlaceFusion\n    - lightning_vram.ActivationOffload\n")
    preset = callbacks_of(read(config("single_gpu"), capsys=capsys))
    added = ["InPlaceFusion", "ActivationOffload"]
    assert callbacks_of(read(config("single_gpu"), own, capsys=capsys)) == preset + added


def test_a_list_without_a_plus_replaces_that_of_the_preset(capsys):
    result = read(config("single_gpu"), config("in_place_fusion"), capsys=capsys)
    assert callbacks_of(result) == ["InPlaceFusion"]
    assert result["trainer"]["logger"]["class_path"].endswith("CSVLogger")


def test_the_strategy_and_a_part_go_on_top_of_a_preset(tmp_path):
    own = write("trainer:\n  callbacks+:\n    - lightning_vram.InPlaceFusion\n")
    path = ROOT / "configs" / "single_gpu.yaml"
    layers = [f"--config={path}", config("fsdp_offload"), own]
    main(["fit", *layers, *small(path), *QUIET, "--trainer.fast_dev_run=true"])
    assert len(list(tmp_path.rglob("last.ckpt"))) == 1
