"""Fixtures and marks. A test asks for what it needs; a machine that lacks it skips the test and says why."""

import faulthandler
import gc
import importlib
import logging
import os
import shutil
import signal
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities import registry
from support.helpers import CASES, LitTiny, TinyCNN, TinyGPT, assert_equal_weights
from support.simdevice import build
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_vram.memory.device import accelerators

torch.set_num_threads(1)  # the models are tiny; more threads only fight with pytest-xdist

# Every Trainer reads the metadata of all installed packages, which takes as long as a small fit.
registry.entry_points = cache(registry.entry_points)  # type: ignore[attr-defined]


def _renew_thread_pool() -> None:
    """Replace the pool of a process that was forked, which torch does at the first use; two threads at once fail."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that the old pool leaks
        torch.set_num_threads(1)


os.register_at_fork(after_in_child=_renew_thread_pool)
# process groups of the parent that are garbage would wait there for threads that a fork does not take along
os.register_at_fork(after_in_child=gc.freeze)


def _show_what_hangs() -> None:
    """Let a forked process write its stacks to stderr before the test that waits for it reaches its limit of 300 s."""
    faulthandler.register(signal.SIGALRM, file=2)
    signal.alarm(240)


os.register_at_fork(after_in_child=_show_what_hangs)

REQUIREMENTS = {
    "gpu": (torch.cuda.is_available, "needs a CUDA device, and pytest --device cuda"),
    "distributed": (torch.distributed.is_available, "needs a torch build with torch.distributed"),
    "slurm": (lambda: shutil.which("srun") is not None, "needs srun"),
}


_OF_LIGHTNING = "CUBLAS_WORKSPACE_CONFIG", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"
SET_BY_RUNS = {name: os.environ.get(name) for name in (*_OF_LIGHTNING, *accelerators.VARIABLES)}
"""Variables that a Trainer or our command line leaves, as they were before all tests."""

OF_THE_TESTED_RUN = "strategy", "plugins"  # arguments of a Trainer that a baseline goes without
_frozen_before: dict[str, Path] = {}  # by the file whose test was set up last
MARKS_OF_DEVICES = {"sim": ("device", "sim"), "cuda": ("device", "gpu")}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-of-each", action="store_true", help="only the first parametrisation of each test")
    parser.addoption(
        "--slow-sample", type=int, help="of the slow parametrisations of each test only so many, at equal distances"
    )
    parser.addoption(
        "--device",
        choices=["cpu", *MARKS_OF_DEVICES],
        default="cpu",
        help="only the tests that need an accelerator, marked device: on a simulated one, or on CUDA's",
    )


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.option.numprocesses:  # else workers are still to read them
        os.environ.pop("PYTEST_ADDOPTS", None)  # not for the pytest that a test starts
    # Many tests fork, which autograd does not survive in a process that has an accelerator: the others run without.
    if config.option.device != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        # What cuBLAS needs to be deterministic. It must be there before the first product: Lightning's Trainer sets it
        # as well, but a test without a Trainer may come first.
        workspaces = os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        SET_BY_RUNS["CUBLAS_WORKSPACE_CONFIG"] = workspaces
    if config.option.device == "sim" and build.why_not() is None:
        importlib.import_module("support.simdevice.trainer")  # before anything asks PyTorch for its accelerator
    if config.option.device == "cpu":
        # The first backward starts a thread for each device, after which no fork runs backward. Fake tensors make a
        # build for CUDA count one device where there is none: the first backward comes before them.
        torch.ones((), requires_grad=True).backward()


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_slow(config, items)
    with_slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: item.path not in with_slow)  # no worker begins a long test when the others are done
    _select_by_device(config, items)
    if config.option.slow_sample is not None:
        _sample_slow(config, items, config.option.slow_sample)
    if config.option.one_of_each:
        quick_first = sorted(items, key=lambda item: item.get_closest_marker("slow") is not None)
        first = {siblings[0] for siblings in _by_test(quick_first).values()}
        _keep(config, items, lambda item: item in first)


def _select_by_device(config: pytest.Config, items: list[pytest.Item]) -> None:
    """An accelerator changes the process: only tests that ask for one run there, and they only there."""
    device = config.option.device

    def is_selected(item: pytest.Item) -> bool:
        if device == "cpu":
            return not any(map(item.get_closest_marker, ("device", "sim")))
        is_in_file_for_any = device != "sim" and item.get_closest_marker("sim") is not None
        return any(map(item.get_closest_marker, MARKS_OF_DEVICES[device])) and not is_in_file_for_any

    _keep(config, items, is_selected)


def _by_test(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return tests


def _keep(config: pytest.Config, items: list[pytest.Item], is_kept: Callable[[pytest.Item], bool]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if not is_kept(item)])
    items[:] = filter(is_kept, items)


def _mark_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the parametrisations of a test some are not slow: those that ``slow_except`` names, or a ``quick_sample``."""
    for name, siblings in _by_test(items).items():
        named, sample = (siblings[0].get_closest_marker(mark) for mark in ("slow_except", "quick_sample"))
        if named is None and sample is None:
            continue
        quick = set(named.args if named is not None else _spread(siblings, *sample.args))
        ids = {item.callspec.id for item in siblings}  # some are missing with an older torch
        if not quick & ids and not any("[" in argument for argument in config.args):
            raise pytest.UsageError(f"slow_except: {name} has none of the parametrisations {sorted(quick)}")
        for item in siblings:
            if item.callspec.id not in quick:
                item.add_marker(pytest.mark.slow)


def _sample_slow(config: pytest.Config, items: list[pytest.Item], num_slow: int) -> None:
    """Leave out most of what is slow and alike, so that one run of all tests ends in good time."""
    slow = [item for item in items if item.get_closest_marker("slow") is not None and hasattr(item, "callspec")]
    slow = [item for item in slow if item.get_closest_marker("minutes") is None]  # -m is asked about them
    left_out = set()
    for siblings in _by_test(slow).values():
        chosen = _spread(siblings, num_slow)
        left_out.update(item for item in siblings if item.callspec.id not in chosen)
    _keep(config, items, lambda item: item not in left_out)


def _spread(siblings: list[pytest.Item], num_quick: int) -> list[str]:
    """Return the ids of so many of ``siblings``, at equal distances, the first among them."""
    num_quick = min(num_quick, len(siblings))
    return [siblings[place * len(siblings) // num_quick].callspec.id for place in range(num_quick)]


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # half a second each time that a test collects garbage, for what stays to the end


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path != _frozen_before.get("path"):  # what earlier files have imported and cached is looked through no more
        _frozen_before["path"] = item.path
        gc.collect()
        gc.freeze()
    torch.use_deterministic_algorithms(mode=False)  # a Trainer(deterministic=True) of an earlier test set it
    for mark, (is_met, reason) in REQUIREMENTS.items():
        if item.get_closest_marker(mark) and not is_met():
            pytest.skip(reason)
    if (reason := _why_no_device(item.config.option.device)) is not None:
        pytest.skip(reason)


def _why_no_device(device: str) -> str | None:
    if device == "sim":
        return build.why_not()
    return "needs a CUDA device" if device == "cuda" and not torch.cuda.is_available() else None


@pytest.fixture(autouse=True)
def leave_device_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give back what the test has kept of the accelerator: the next one may look at its statistics."""
    yield
    if request.config.option.device == "cpu":
        return
    module = torch.get_device_module()
    if module.get_sync_debug_mode():  # setting it warns, the first time
        module.set_sync_debug_mode("default")
    gc.collect()
    module.set_per_process_memory_fraction(1.0)
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats()


@pytest.fixture(autouse=True)
def leave_process_as_it_was() -> Iterator[None]:
    """End what a strategy leaves connected, as it may for the next fit, and what else a test has set for all."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning_vram")]
    levels, is_deterministic = [one.level for one in loggers], torch.are_deterministic_algorithms_enabled()
    _restore_variables()
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    torch.use_deterministic_algorithms(is_deterministic)
    torch.set_num_threads(1)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    _restore_variables()


def _restore_variables() -> None:
    for name, value in SET_BY_RUNS.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def deterministic_kernels() -> None:
    """For tests without a Trainer that compare bits: an operator without a deterministic kernel raises."""
    torch.use_deterministic_algorithms(mode=True)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def mesh(one_rank: None) -> DeviceMesh:
    """For FSDP2 on one rank."""
    return init_device_mesh("cpu", (1,))


@pytest.fixture
def leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that of all fits of a test nothing is alive when it has ended: Trainer, strategy, module, parameters."""
    fitted: list[weakref.ref[object]] = []
    fit_before = pl.Trainer.fit

    def noting(trainer: pl.Trainer, model: torch.nn.Module, *args: object, **kwargs: object) -> None:
        fitted.extend(weakref.ref(one) for one in (trainer, trainer.strategy, model, *model.parameters()))
        fit_before(trainer, model, *args, **kwargs)

    monkeypatch.setattr(pl.Trainer, "fit", noting)
    yield
    # A thread of the device may release the last backward's callbacks, and with them the module, a little later.
    end = time.monotonic() + 5
    while (alive := _types_alive(fitted)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not alive


def _types_alive(fitted: list[weakref.ref[object]]) -> list[str]:
    gc.collect()
    return [type(one).__name__ for ref in fitted if (one := ref()) is not None]


def _seeded(make: Callable[[], Any]) -> Callable[[], Any]:
    """Build the same model, with the same weights and the same data to come, at every call."""

    def build() -> Any:
        pl.seed_everything(0, verbose=False)
        return make()

    return build


@pytest.fixture(params=[TinyCNN, TinyGPT], ids=["cnn", "gpt"])
def make_model(request: pytest.FixtureRequest) -> Callable[[], LitTiny]:
    return _seeded(lambda: LitTiny(request.param()))


@pytest.fixture(params=sorted(CASES))
def make_case(request: pytest.FixtureRequest) -> Callable[[], pl.LightningModule]:
    """As ``make_model``, over the demos as well: any kind of model the package promises something for."""
    return _seeded(CASES[request.param])


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., pl.Trainer]:
    """Build a quiet, deterministic CPU trainer for two epochs; keyword arguments override."""
    defaults = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "deterministic": True,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
    }
    return lambda **overrides: pl.Trainer(**(defaults | overrides))


@pytest.fixture
def fit(make_trainer: Callable[..., pl.Trainer]) -> Callable[..., Any]:
    """``fit(make, *callbacks, **options)``: train what ``make()`` builds for one epoch without validation.

    The same weights, data and random numbers at every call. ``options`` are the Trainer's, or ``ckpt_path``. Returns
    the model; its trainer is ``model.trainer``.
    """

    def run(make: Callable[[], Any], *callbacks: pl.Callback, ckpt_path: Any = None, **options: Any) -> Any:
        pl.seed_everything(0, verbose=False)
        model = make()
        trainer = make_trainer(callbacks=list(callbacks), **{"max_epochs": 1, "limit_val_batches": 0, **options})
        trainer.fit(model, ckpt_path=ckpt_path)
        return model

    return run


@pytest.fixture
def same_as_baseline(fit: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """``same_as_baseline(make, *callbacks, tolerance=None, baseline=None, **options)``: compare two fits.

    The baseline has no callbacks, strategy or plugins, but for those in ``baseline``, which replaces arguments of its
    Trainer. Weights and buffers are the same to the bit, or within ``tolerance`` (absolute). Returns both models, the
    tested one first.
    """

    def compare(
        make: Callable[[], Any],
        *callbacks: pl.Callback,
        tolerance: float | None = None,
        baseline: Any = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        plain = {name: value for name, value in options.items() if name not in OF_THE_TESTED_RUN} | (baseline or {})
        others = plain.pop("callbacks", [])
        expected, actual = fit(make, *others, **plain), fit(make, *callbacks, **options)
        if tolerance is None:
            assert_equal_weights(actual, expected)
        else:
            torch.testing.assert_close(actual.state_dict(), expected.state_dict(), rtol=0, atol=tolerance)
        return actual, expected

    return compare
