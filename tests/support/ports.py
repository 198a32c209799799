"""Ports for servers that must be told one before they start."""

import contextlib
import itertools
import random
import socket

_FIRST, _END = 20_000, 32_000
"""Below the ports that systems give to connections and to servers which ask for any: none of them can take one between
its choice and its use."""

_candidates = itertools.cycle(range(_FIRST, _END))
_start = random.SystemRandom().randrange(_END - _FIRST)  # other processes of the same tests choose elsewhere
next(itertools.islice(_candidates, _start, None))


def free_ports(count: int) -> list[int]:
    """Returns ports that nothing listens on now and that this process has not been given lately."""
    found: list[int] = []
    while len(found) < count:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port := next(_candidates))):
            found.append(port)
    return found


def free_port() -> int:
    """Returns a port that nothing listens on now."""
    (port,) = free_ports(1)
    return port
