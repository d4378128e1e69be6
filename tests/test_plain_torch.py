"""Where PyTorch is installed and Lightning is not, the parts that need none work, and the others say what they need."""

import os
import subprocess
import sys
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
HIDE = """
import runpy, sys
from importlib.machinery import PathFinder
class Hiding(PathFinder):  # torch 2.15 finds its backends by entry points, for which finders are asked, too
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {hidden} else PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Hiding if finder is PathFinder else finder for finder in sys.meta_path]
sys.argv[:] = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
HIDDEN = {"lightning", "pytorch_lightning", "torchmetrics", "jsonargparse", "omegaconf", "rich"}


def run(*command: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_techniques_train_where_lightning_is_hidden():
    done = run(sys.executable, "-c", HIDE.replace("{hidden}", str(HIDDEN)), PROGRAM)
    assert (done.stdout, done.returncode) == (NEEDS + "equal\n", 0), done.stderr


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
def test_techniques_train_in_an_environment_of_torch_alone(python):
    done = run(python, PROGRAM)
    assert (done.stdout, done.returncode) == (NEEDS + "equal\n", 0), done.stderr


@pytest.mark.slow
def test_the_command_says_in_one_line_what_it_needs(python):
    done = run(python, "-m", "lightning_vram", "fit", "--help")
    assert (done.stdout, done.stderr, done.returncode) == ("", OF_THE_COMMAND, 1)
