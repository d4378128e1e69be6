"""The batch scripts of the examples, as they are, on two nodes."""

from pathlib import Path

import pytest
from slurm.cluster import Cluster
from slurm.training import OVER, PATIENCE, ROOT, SCRIPT, Training, python_environment

pytestmark = pytest.mark.timeout(600)  # several starts of Python and torch, on a machine that does other things, too

SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))
# of a demo that would take minutes on this machine
SMALL = [
    *("--model.num_layers=2", "--model.width=16", "--model.num_heads=2", "--model.sequence_length=16"),
    *("--trainer.max_steps=6", "--trainer.limit_val_batches=1", "--data.batch_size=2", "--trainer.accelerator=cpu"),
]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_it_trains_on_two_nodes(cluster: Cluster, tmp_path: Path, script: Path) -> None:
    args = SMALL if "offload" in script.name else ["python", "examples/slurm/train.py", "--max_steps=6"]
    env = python_environment(cluster) | {"RUN_DIR": str(tmp_path / "run")}
    job = cluster.submit(script, f"--chdir={ROOT}", f"--output={tmp_path}/output", env=env, args=args)
    assert cluster.wait(job, *OVER, timeout=PATIENCE) == "COMPLETED", cluster.output(job)
    assert "All 2 processes" in cluster.output(job) or "Starting with 2 processes" in cluster.output(job)
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()
    assert not (tmp_path / "run" / "slurm_requeue").exists()


def test_more_tasks_than_devices_are_refused_with_the_line_to_change(cluster: Cluster, tmp_path: Path) -> None:
    options = (f"--chdir={ROOT}", f"--output={tmp_path}/output", "--ntasks-per-node=2", "--cpus-per-task=2")
    script = SCRIPT.with_name("train_offload.sbatch")
    env = python_environment(cluster) | {"RUN_DIR": str(tmp_path / "run")}
    job = cluster.submit(script, *options, env=env, args=[*SMALL, "--trainer.devices=1"])
    assert cluster.wait(job, *OVER, timeout=PATIENCE) == "FAILED"
    said = (
        "SLURM started 4 tasks on 2 nodes, and the Trainer has devices=1 and num_nodes=2. Set '#SBATCH --nodes=2' and "
        "'#SBATCH --ntasks-per-node=1', or Trainer(devices=2, num_nodes=2)."
    )
    assert said in cluster.output(job)


def test_one_core_for_a_task_is_warned_of(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--cpus-per-task=1", "--export=ALL,SLURM_CPUS_PER_TASK=1")
    training = Training(cluster, tmp_path / "run", "--strategy", "sharded", "--max_steps", 2, sbatch_options=options)
    assert training.end() == "COMPLETED", training.output
    assert "SLURM gave this task one core. Request more with '#SBATCH --cpus-per-task=8'" in training.output
