"""Submit the example's batch script with the test's training, and read what became of it."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from slurm.cluster import Cluster
from support.ports import find_free_port
from torch import Tensor

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "slurm" / "train.sbatch"
RUN = Path(__file__).with_name("training_run.py")
OVER = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
PATIENCE = 300  # seconds; a start took 132 on two cores with five more workers of pytest


class Training:
    """A job that trains, or has trained.

    Args:
        cluster: To run on.
        folder: Of the run; all nodes see it.
        options: Of ``training_run.py``.
        sbatch_options: Before the batch script.
    """

    def __init__(self, cluster: Cluster, folder: Path, *options: object, sbatch_options: tuple[str, ...] = ()) -> None:
        self.cluster = cluster
        self.folder = folder
        folder.mkdir(exist_ok=True)
        command = ["python", RUN, "--root", folder, *options]
        given = [f"--output={folder}/output", *sbatch_options]
        self.job = cluster.submit(SCRIPT, *given, env=python_environment(cluster), args=command)

    def events(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        """What the training has told, oldest first."""
        path = self.folder / f"events.{rank}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def wait_for_start(self, number: int = 1) -> None:
        """Return when both ranks train for the n-th time."""
        self.cluster.wait_until(
            lambda: min(len(self.events("start", rank)) for rank in (0, 1)) >= number,
            self.job,
            PATIENCE,
            f"did not start {number} times",
        )

    def end(self, timeout: float = PATIENCE) -> str:
        """Wait until the job is over; return its state."""
        return self.cluster.wait(self.job, *OVER, timeout=timeout)

    @property
    def output(self) -> str:
        return self.cluster.output(self.job)

    @property
    def weights(self) -> dict[str, Tensor]:
        return torch.load(self.folder / "weights.pt")


def python_environment(cluster: Cluster) -> dict[str, str]:
    """As of an activated virtual environment. The nodes of the cluster have names that nobody else knows."""
    path = os.pathsep.join([str(Path(sys.executable).parent), cluster.environment["PATH"]])
    # the port of the job's number may be another cluster's
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_port())}
    return {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | address


def assert_close(weights: dict[str, Tensor], others: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    assert weights.keys() == others.keys()
    for name, weight in weights.items():
        assert (weight - others[name]).abs().max() <= tolerance, name
