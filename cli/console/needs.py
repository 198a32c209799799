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
ON_LINUX = {"up", "worker", "router"}
"""The commands whose templates and grammars run in processes with limits of CPU time and memory that only Linux has."""
ON_UNIX = {*ON_LINUX, "gateway", "auth", "auth-init", "config", "pull", "inspect", "replay"}
"""The commands that use what Windows lacks: signals that reload settings, files that only their owner reads, and what
workers use."""
_NAMES = {"win32": "Windows", "darwin": "macOS"}


def lacking_system(command: str) -> str:
    """Returns the name of this system if a command does not run on it; else an empty string."""
    lacks = ON_UNIX if sys.platform == "win32" else ON_LINUX if sys.platform != "linux" else ()
    return _NAMES.get(sys.platform, sys.platform) if command in lacks else ""


def elsewhere() -> str:
    """Returns what to do about a command that does not run on this system."""
    return f"use {'WSL or a container' if sys.platform == 'win32' else 'a container or a virtual machine'} for it"


def check(command: str) -> None:
    """Raises MissingExtraError if a command can't run. Not even its flags can be read then: they are declared by code
    that needs the same packages."""
    if system := lacking_system(command):
        raise extras.MissingExtraError(f"the command {command} does not run on {system}; {elsewhere()}")
    if extra := EXTRAS.get(command):
        extras.require(extra, f"the command {command}")


def are_met(command: str) -> bool:
    extra = EXTRAS.get(command)
    return not lacking_system(command) and (extra is None or extras.is_installed(extra))
