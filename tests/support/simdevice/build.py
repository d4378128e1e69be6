"""Compiles the simulated accelerator, once for each environment and each state of its sources."""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

NAME = "lightning_vram_sim"
SOURCES = Path(__file__).parent / "csrc"
FLAGS = ["-O1", "-std=c++20", "-w"]  # warnings are those of PyTorch's headers


def why_not() -> str | None:
    """Say in a line why it cannot be built here, or None."""
    if sys.platform != "linux":
        return "the simulated accelerator needs Linux"
    if _folder_is_complete(_folder()):
        return None
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return f"the simulated accelerator needs a C++ compiler, and there is no {compiler} (Debian: g++)"
    if shutil.which("ninja", path=_search_path()) is None:
        return "the simulated accelerator needs ninja (pip install ninja)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return "the simulated accelerator needs the headers of Python (Debian: python3-dev)"
    return None


def load() -> ModuleType:
    """Return the extension, compiled if this environment has not done so; processes that start at once wait."""
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / "one_at_a_time"):
        if not _folder_is_complete(folder):
            return _build(folder)
    spec = importlib.util.spec_from_file_location(NAME, folder / f"{NAME}.so")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _build(folder: Path) -> ModuleType:
    from torch.utils import cpp_extension  # imports setuptools: half a second

    (folder / "lock").unlink(missing_ok=True)  # PyTorch's own, left by a build that was killed: it would wait for ever
    path = os.environ["PATH"]
    os.environ["PATH"] = _search_path()
    try:
        sources = [str(source) for source in sorted(SOURCES.glob("*.cpp"))]
        module = cpp_extension.load(NAME, sources, extra_cflags=FLAGS, build_directory=str(folder))
    finally:
        os.environ["PATH"] = path
    (folder / "complete").touch()
    return module


def _folder() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_extensions"
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or default)
    key = hashlib.sha256(repr([torch.__version__, torch.__file__, platform.python_version(), FLAGS]).encode())
    for source in sorted(SOURCES.iterdir()):
        key.update(source.read_bytes())
    return root / f"{NAME}-torch-{torch.__version__}-{key.hexdigest()[:12]}"


def _folder_is_complete(folder: Path) -> bool:
    return (folder / "complete").exists()


def _search_path() -> str:
    """With the scripts of this environment, where pip puts ninja: it may not be activated."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # let go by the kernel, however the process ends
        yield
