"""The listening socket of the gateway: bound here, or inherited from the process that started it."""

import contextlib
import errno
import ipaddress
import os
import socket
import sys

if sys.platform != "win32":
    import resource

_BACKLOG = 2_048
_SEND_BUFFER_BYTES = 64 * 1024
"""Bytes that the kernel buffers for one connection (Linux doubles this). By default it would buffer megabytes of events
for a client that does not read."""
_MOST_CONNECTIONS = 1 << 20
_OTHER_FILES = 416
"""Files for everything except clients' connections: the status page, refused clients, and the process itself."""


class ListenError(ValueError):
    """The gateway can't listen on its address."""

    @property
    def is_taken(self) -> bool:
        """Whether another process listens there."""
        return isinstance(self.__cause__, OSError) and self.__cause__.errno == errno.EADDRINUSE


def bind(host: str, port: int, hint: str = "") -> socket.socket:
    """Returns a listening socket; port 0 means any free port. Raises ListenError, whose text ends with `hint`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        number = error.errno or 0  # getaddrinfo has its own error numbers, below 0
        reason = os.strerror(number) if number > 0 else error.strerror
        raise ListenError(f"can't listen on {host}:{port} ({reason}){hint}") from error
    return listening


def inherit(number: int) -> socket.socket:
    """Returns the listening socket with this file descriptor. Raises ListenError if it is not one."""
    try:
        listening = socket.socket(fileno=number)
        is_listening = listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ListenError(f"--fd {number} is not a socket ({error.strerror})") from error
    if not is_listening:
        raise ListenError(f"--fd {number} is not a listening socket")
    return listening


def detect_slow_clients(listening: socket.socket, deadline_s: float) -> None:
    """Makes the kernel end connections whose client reads nothing for `deadline_s`, or whose machine does not answer,
    and limits its buffers for them. On Linux, accepted connections inherit these options."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(deadline_s * 1_000))
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(deadline_s / 2)))
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(deadline_s / 6)))


def raise_open_file_limit() -> int:
    """Raises the open file limit to what the system allows; many shells set 1,024, which is too low.

    Returns the number of connections that the limit allows."""
    if sys.platform == "win32":
        return _MOST_CONNECTIONS
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(1, min(_MOST_CONNECTIONS, allowed - _OTHER_FILES))


def is_loopback(listening: socket.socket) -> bool:
    """Whether only this machine can reach the socket."""
    return ipaddress.ip_address(listening.getsockname()[0]).is_loopback


def base_url(listening: socket.socket) -> str:
    """Returns the `base_url` for OpenAI's clients."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
