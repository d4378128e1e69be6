"""The notebook: it runs in a kernel of its own, and is saved with no more than what it prints and the picture."""

import shutil
import subprocess
import sys

import pytest
import torch
from support.parts import ROOT

nbformat = pytest.importorskip("nbformat")

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
PNG = "image/png"


def printed(notebook):
    return "".join(out.text for cell in code(notebook) for out in cell.outputs if out.get("name") == "stdout")


def pictures(cell):
    return [out.data[PNG] for out in cell.outputs if PNG in out.get("data", {})]


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture(scope="module")
def saved():
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_runs_and_says_what_it_is_saved_with(saved, tmp_path):
    copy = shutil.copy(NOTEBOOK, tmp_path)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-W", "error", "--nbmake", "--overwrite", copy]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    result = nbformat.read(copy, as_version=4)
    assert [len(pictures(cell)) for cell in code(result)] == [0] * (len(code(result)) - 1) + [1]
    assert {file.name for file in tmp_path.iterdir()} == {NOTEBOOK.name, "step.png"}
    if torch.__version__.startswith("2.13."):  # of constraints.txt; other versions save other activations
        assert printed(result) == printed(saved)


def test_it_is_saved_with_what_it_prints_and_one_small_picture(saved):
    *others, last = code(saved)
    assert [pictures(cell) for cell in others] == [[]] * len(others)
    assert len(pictures(last)) == 1
    assert {out.get("name", PNG) for cell in code(saved) for out in cell.outputs} == {"stdout", PNG}
    assert {cell.execution_count for cell in code(saved)} == {None}
    assert NOTEBOOK.stat().st_size < 200 * 1024
