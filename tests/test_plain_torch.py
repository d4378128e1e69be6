"""Where PyTorch is installed and Lightning is not, the parts that need none work, and the others say what they need."""

import os
import subprocess
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROGRAM = ROOT / "tests" / "support" / "plain_torch.py"
NEEDS = "lightning_vram.MicroBatching needs Lightning, which is not installed: pip install lightning\n"
OF_THE_COMMAND = (
    "lightning-vram: error: needs Lightning: pip install lightning 'jsonargparse[signatures]' omegaconf rich\n"
)


def run(*command: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)


def files_of_torch() -> dict[str, Path]:
    """All that PyTorch and what it requires have put into the environment, by their names there."""
    found: dict[str, Path] = {}
    names, seen = ["torch"], set()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            installed = distribution(name)
        except PackageNotFoundError:  # of another platform
            continue
        folder = Path(str(installed.locate_file("")))
        tops = {file.parts[0] for file in installed.files or () if file.parts[0] not in ("..", "__pycache__")}
        found |= {top: folder / top for top in tops}
        required = map(Requirement, installed.requires or ())
        names += [one.name for one in required if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """Of an environment that has PyTorch, and nothing that PyTorch does not require."""
    folder = tmp_path_factory.mktemp("plain")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name, path in files_of_torch().items():
        (packages / name).symlink_to(path)
    return folder / "bin" / "python"


@pytest.mark.slow
def test_techniques_train_in_an_environment_of_torch_alone_and_the_command_says_what_it_needs(python):
    done = run(python, PROGRAM)
    assert (done.stdout, done.returncode) == (NEEDS + "equal\n", 0), done.stderr
    done = run(python, "-m", "lightning_vram", "fit", "--help")
    assert (done.stdout, done.stderr, done.returncode) == ("", OF_THE_COMMAND, 1)
