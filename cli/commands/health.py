"""`tokenbus health`: the health check of containers, which run it every few seconds.

It imports almost nothing: the whole command line takes a second of CPU to import, and urllib a third of one."""

import argparse
import socket
import sys

from tokenbus.cli.console import arguments, catalog
from tokenbus.cli.console.flags import Parser, UsageError

PORT = 9_100
_TIMEOUT_S = 2.0
_READY = b"200"


def add_flags(parser: Parser) -> None:
    flag = parser.group("check")
    flag("--port", arguments.PORT, "the process's --metrics-port", PORT)
    flag("--live", arguments.SWITCH, "check only whether it is alive")
    parser.set_defaults(run=run)


def main(arguments: list[str]) -> int:
    """Runs the command without the rest of the command line; returns the exit status."""
    try:
        return run(catalog.make_parser("health").parse_args(arguments))
    except UsageError as error:
        print(f"{error.prog}: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """Returns 0 if the process at that port of this machine is ready. Prints why and returns 1 if it is not."""
    path = "/livez" if options.live else "/readyz"
    try:
        status, reason = _get(options.port, path)
    except OSError as error:
        status, reason = b"", f"no answer from http://127.0.0.1:{options.port}{path}: {error.strerror or error}"
    if status == _READY:
        return 0
    print(reason, file=sys.stderr)
    return 1


def _get(port: int, path: str) -> tuple[bytes, str]:
    """Returns status and body of the response. Raises OSError."""
    with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\n\r\n".encode())
        with connection.makefile("rb") as answer:
            head, _, text = answer.read().partition(b"\r\n\r\n")
    words = head.split(maxsplit=2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/"):
        raise OSError("the response is not HTTP")
    return words[1], text.decode(errors="replace").strip()
