"""The extra that each command needs."""

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


def check(command: str) -> None:
    """Raises MissingExtraError if a command can't run. Not even its flags can be read then: they are declared by code
    that needs the same packages."""
    if extra := EXTRAS.get(command):
        extras.require(extra, f"the command {command}")


def are_met(command: str) -> bool:
    extra = EXTRAS.get(command)
    return extra is None or extras.is_installed(extra)
