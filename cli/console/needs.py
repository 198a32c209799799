"""The extra and the system that each command needs."""

import sys

from tokenbus.protocol import extras

EXTRAS = {
    "up": "up",
    "worker": "worker-core",
    "router": "router",
    "gateway": "gateway",
    "auth": "gateway",
    "auth-init": "gateway",
    "pull": "worker-core",
    "inspect": "worker-core",
    "replay": "bench",
    "bench": "bench",
}
"""The extra of each command that needs one. Others talk to a running fleet with what the client library needs."""
ON_UNIX = {
    *("up", "worker", "router", "gateway", "auth", "auth-init", "config"),
    *("models", "pull", "inspect", "doctor", "replay"),
}
"""The commands that use what Windows lacks: locks and signals of files and processes."""


def check(command: str) -> None:
    """Raises MissingExtraError if a command can't run. Not even its flags can be read then: they are declared by code
    that needs the same packages."""
    if sys.platform == "win32" and command in ON_UNIX:
        raise extras.MissingExtraError(f"the command {command} does not run on Windows; use WSL or a container for it")
    if extra := EXTRAS.get(command):
        extras.require(extra, f"the command {command}")


def are_met(command: str) -> bool:
    if sys.platform == "win32" and command in ON_UNIX:
        return False
    extra = EXTRAS.get(command)
    return extra is None or extras.is_installed(extra)
