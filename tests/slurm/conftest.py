"""A cluster for every test that asks for one; each process of pytest-xdist has its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm.cluster import Cluster, find_missing


@pytest.hookimpl(tryfirst=True)  # before -m is looked at
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:  # of all folders
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def needs_cluster() -> None:
    if reason := find_missing():
        pytest.skip(f"no SLURM cluster here: {reason}")


@pytest.fixture(scope="session")
def cluster(needs_cluster: None) -> Iterator[Cluster]:
    """Two nodes with four cores each."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def leave_clusters_idle(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test's jobs end with it."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").end_jobs()
