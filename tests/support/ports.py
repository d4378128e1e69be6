"""Ports that stay free until a process of a test listens at them."""

import random
import socket
from itertools import islice

# Below the ranges from which Linux (32768 on) and macOS (49152 on) give each connection a port: one of those may be
# taken, by a client of anybody, in the seconds that a test needs to start the process that listens at it.
_PORTS = range(10_000, 32_000)


def find_free_ports(count: int) -> list[int]:
    """Ports, all different, that nobody listens at now."""
    drawn = random.SystemRandom().sample(_PORTS, 200 + count)  # tests seed the global generator
    return list(islice(filter(_is_free, drawn), count))


def find_free_port() -> int:
    return find_free_ports(1)[0]


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
