"""pytest's door to lightning_vram: the fixture ``peak_memory`` and its options. See lightning_vram/memory/README.md.

A module of its own, since pytest imports it at each start: ``lightning_vram``, and with it torch and Lightning, are
imported by the first test that asks for the fixture.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from lightning_vram.pytest_plugin import PeakMemory

_PEAKS = "lightning_vram_peaks"  # of a worker of pytest-xdist
_measured = pytest.StashKey[dict[str, int]]()
_is_written = pytest.StashKey[bool]()  # the file, instead of compared with


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
    """Check the options."""
    config.stash[_measured] = {}
    if config.option.vram_tolerance < 0:
        raise pytest.UsageError(f"--vram-tolerance must not be negative, got {config.option.vram_tolerance:g}")
    if config.option.vram_baseline is None:
        if config.option.vram_update:
            raise pytest.UsageError("--vram-update needs --vram-baseline FILE")
        return
    # workers of pytest-xdist get the options: of all, only this process knows where it was called
    config.option.vram_baseline = str(config.invocation_params.dir / config.option.vram_baseline)
    config.stash[_is_written] = config.option.vram_update or not Path(config.option.vram_baseline).exists()


@pytest.fixture(scope="session")
def _known_peaks(pytestconfig: pytest.Config) -> dict[str, int] | None:
    """Those that tests are compared with; ``None`` without a file, and where it is to be written."""
    from lightning_vram.pytest_plugin import read_peaks

    file = pytestconfig.option.vram_baseline
    if file is None or pytestconfig.option.vram_update or not Path(file).exists():
        return None
    return read_peaks(Path(file))


@pytest.fixture
def peak_memory(request: pytest.FixtureRequest, _known_peaks: dict[str, int] | None) -> "PeakMemory":
    """Track the tensor bytes of a ``with`` block, exactly and without a GPU: see ``lightning_vram.track_memory``.

    With ``--vram-baseline FILE`` the test fails if its peak has grown.
    """
    from lightning_vram.pytest_plugin import PeakMemory

    options, measured = request.config.option, request.config.stash[_measured]
    file = "" if options.vram_baseline is None else _shown(options.vram_baseline)
    return PeakMemory(request.node.nodeid, _known_peaks, options.vram_tolerance, file, measured)


def _shown(file: str) -> str:
    """The path of a file as one would type it here."""
    return str(Path(file).relative_to(Path.cwd())) if Path(file).is_relative_to(Path.cwd()) else file


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """A worker of pytest-xdist has ended."""
    node.config.stash[_measured].update(getattr(node, "workeroutput", {}).get(_PEAKS, {}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the file; a worker hands its peaks to the process that does."""
    config = session.config
    measured = config.stash[_measured]
    if hasattr(config, "workeroutput"):
        config.workeroutput[_PEAKS] = measured
    elif measured and config.option.vram_baseline is not None:
        file = Path(config.option.vram_baseline)
        if config.stash[_is_written]:
            from lightning_vram.pytest_plugin import read_peaks, write_peaks

            write_peaks(file, (read_peaks(file) if file.exists() else {}) | measured)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say that peaks were compared."""
    measured = config.stash[_measured]
    if measured and config.option.vram_baseline is not None:
        done = "written to" if config.stash[_is_written] else "compared with"
        terminalreporter.write_line(f"peak memory of {len(measured)} blocks {done} {config.option.vram_baseline}")
