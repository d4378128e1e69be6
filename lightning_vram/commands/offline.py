"""No downloads: what asks for another machine's address is refused."""

import socket
from types import TracebackType
from typing import Any, NoReturn, Self

from lightning.pytorch.utilities.exceptions import MisconfigurationException


class NoDownloads:
    """Refuse connections inside a ``with`` block; what fails for it there ends in one clear error.

    What can do without (a file that was fetched before) goes on: it sees a machine that is offline.
    An error after a refusal becomes a ``MisconfigurationException``.
    """

    def __init__(self) -> None:
        self._getaddrinfo = socket.getaddrinfo

    def __enter__(self) -> Self:
        self._getaddrinfo = socket.getaddrinfo
        socket.getaddrinfo = _refuse
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> None:
        socket.getaddrinfo = self._getaddrinfo
        refused = _find_refusal(error)
        if isinstance(error, Exception) and refused is not None:
            raise MisconfigurationException(
                f"estimates download nothing, but this configuration needs something from {refused.host}. Download it "
                "first, as `lightning-vram fit` does, or leave it out: weights may be random, and --batch.shape "
                "replaces the data."
            ) from error


class _Refusal(socket.gaierror):
    def __init__(self, host: str) -> None:
        super().__init__(socket.EAI_NONAME, f"estimates download nothing: {host} was not contacted")
        self.host = host


def _refuse(host: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise _Refusal(host.decode(errors="replace") if isinstance(host, bytes) else str(host))


def _find_refusal(error: BaseException | None) -> _Refusal | None:
    """The refusal that led to ``error``, if one did: libraries wrap it in errors of their own."""
    seen: set[int] = set()
    found = [error]
    while found:
        error = found.pop()
        if isinstance(error, _Refusal):
            return error
        if error is not None and id(error) not in seen:
            seen.add(id(error))
            found += [error.__context__, error.__cause__]
    return None
