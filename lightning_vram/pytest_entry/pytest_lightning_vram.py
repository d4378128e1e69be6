"""pytest's door to lightning_vram: the fixture ``peak_memory`` and its options. See lightning_vram/memory/README.md.

A module of its own, since pytest imports it at each start: ``lightning_vram``, and with it torch and Lightning, are
imported by the first test that asks for the fixture.
"""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lightning_vram.pytest_plugin import PeakMemory

_PEAKS = "lightning_vram_peaks"  # of a worker of pytest-xdist
_measured = pytest.StashKey[dict[str, int]]()
_known = pytest.StashKey[dict[str, int] | None]()  # that tests are compared with; None: the file is written, if any


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("lightning-vram", "peak memory of tests (lightning_vram)")
    group.addoption(
        "--vram-baseline",
        metavar="FILE",
        help="fail tests whose peak in 'peak_memory' is above that in FILE; written if it is not there",
    )
    group.addoption(
        "--vram-tolerance", metavar="PERCENT", type=float, default=1.0, help="by which a peak may grow (default: 1)"
    )
    group.addoption("--vram-update", action="store_true", help="write the peaks to the file instead of comparing")


def pytest_configure(config: pytest.Config) -> None:
    """Check the options, and read the file."""
    options = config.option
    if options.vram_tolerance < 0:
        raise pytest.UsageError(f"--vram-tolerance must not be negative, got {options.vram_tolerance:g}")
    config.stash[_measured], config.stash[_known] = {}, None
    if options.vram_baseline is not None:
        # workers of pytest-xdist get the options: of all, only this process knows where it was called
        options.vram_baseline = str(config.invocation_params.dir / options.vram_baseline)
        if not options.vram_update and os.path.exists(options.vram_baseline):
            config.stash[_known] = _read_peaks(options.vram_baseline)
    elif options.vram_update:
        raise pytest.UsageError("--vram-update needs --vram-baseline FILE")


def _read_peaks(file: str) -> dict[str, int]:
    """Read a JSON file of peaks: bytes by node id."""
    try:
        found = json.loads(Path(file).read_text())
    except json.JSONDecodeError as error:
        raise pytest.UsageError(f"{file} is not a --vram-baseline file: {error}.") from None
    if not isinstance(found, dict) or any(type(value) is not int for value in found.values()):
        raise pytest.UsageError(f"{file} is not a --vram-baseline file: it must map tests to bytes.")
    return found


@pytest.fixture
def peak_memory(request: pytest.FixtureRequest) -> "PeakMemory":
    """Track the tensor bytes of a ``with`` block, exactly and without a GPU: see ``lightning_vram.track_memory``.

    With ``--vram-baseline FILE`` the test fails if its peak has grown.
    """
    from lightning_vram.pytest_plugin import PeakMemory

    options, stash = request.config.option, request.config.stash
    file = os.path.relpath(options.vram_baseline or ".")
    return PeakMemory(request.node.nodeid, stash[_known], options.vram_tolerance, file, stash[_measured])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker of pytest-xdist has ended."""
    node.config.stash[_measured].update(getattr(node, "workeroutput", {}).get(_PEAKS, {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file, sorted, whole or not at all; a worker hands its peaks to the process that does."""
    config, file = session.config, session.config.option.vram_baseline
    measured = config.stash[_measured]
    if hasattr(config, "workeroutput"):
        config.workeroutput[_PEAKS] = measured
    elif measured and file is not None and config.stash[_known] is None:
        peaks = (_read_peaks(file) if os.path.exists(file) else {}) | measured
        part = Path(f"{file}.{os.getpid()}.part")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(peaks, indent=1, sort_keys=True) + "\n")
        part.replace(file)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say that peaks were compared."""
    measured = config.stash[_measured]
    if measured and config.option.vram_baseline is not None:
        done = "written to" if config.stash[_known] is None else "compared with"
        terminalreporter.write_line(f"peak memory of {len(measured)} blocks {done} {config.option.vram_baseline}")
