"""An estimate downloads nothing."""

import contextlib
import socket
import urllib.request

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_vram.commands.dry_run import no_downloads

MESSAGE = (
    r"^estimates download nothing, but this configuration needs something from models\.example\. Download it first, as "
    r"`lightning-vram fit` does, or leave it out: weights may be random, and --batch\.shape replaces the data\.$"
)


def fetch() -> None:
    urllib.request.urlopen("http://models.example/weights")


def test_a_download_is_named():
    with pytest.raises(MisconfigurationException, match=MESSAGE), no_downloads():
        fetch()


def fetch_wrapped() -> None:
    try:
        try:
            fetch()
        except OSError as error:
            raise RuntimeError("cannot connect") from error
    except RuntimeError:
        raise KeyError("no weights")  # noqa: B904 - as libraries do


def test_so_it_is_however_a_library_wraps_the_error():
    with pytest.raises(MisconfigurationException, match=MESSAGE), no_downloads():
        fetch_wrapped()


def test_who_can_do_without_goes_on():
    with no_downloads(), contextlib.suppress(OSError):
        fetch()


def test_an_error_that_has_nothing_to_do_with_it_stays():
    def fetch_in_vain() -> None:
        with contextlib.suppress(OSError):
            fetch()
        raise ValueError("another")

    with pytest.raises(ValueError, match="another"), no_downloads():
        fetch_in_vain()


def test_afterwards_addresses_can_be_asked_for_again():
    before = socket.getaddrinfo
    with contextlib.suppress(MisconfigurationException), no_downloads():
        fetch()
    assert socket.getaddrinfo is before
