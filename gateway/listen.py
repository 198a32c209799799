"""The socket that the gateway listens on: bound here, or handed down by who started the process."""

import contextlib
import os
import socket
import sys

if sys.platform != "win32":
    import resource

_BACKLOG = 2_048
_GONE_AFTER_S = 30
"""A reader who takes nothing for so long, or a machine that is silent, counts as gone."""
_MOST_CONNECTIONS = 1 << 20
_OTHER_FILES = 416
"""What the process opens beside its clients' connections: for the status page, clients that it refuses, and itself."""


class ListenError(ValueError):
    """The address can't be bound; says what to do."""


def bind(host: str, port: int, hint: str = "") -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ListenError, with `hint`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror  # a name's errors have numbers of their own
        raise ListenError(f"can't listen on {host}:{port} ({reason}){hint}") from error
    return listening


def inherit(number: int) -> socket.socket:
    """The listening socket that this file descriptor is. Raises ListenError."""
    try:
        listening = socket.socket(fileno=number)
        is_listening = listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ListenError(f"--fd {number} is no socket ({error.strerror})") from error
    if not is_listening:
        raise ListenError(f"--fd {number} is no listening socket")
    return listening


def detect_dead_clients(listening: socket.socket) -> None:
    """Has the kernel notice clients that are gone without a word, on every connection; Linux takes it over to them."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _GONE_AFTER_S * 1_000)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _GONE_AFTER_S // 2)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _GONE_AFTER_S // 6)


def raise_open_file_limit() -> int:
    """Has the process open as many files as the system lets it: 1,024, as many shells have it, are too few. Gives how
    many connections that allows."""
    if sys.platform == "win32":
        return _MOST_CONNECTIONS
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(1, min(_MOST_CONNECTIONS, allowed - _OTHER_FILES))


def base_url(listening: socket.socket) -> str:
    """What a client's `base_url` is."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
