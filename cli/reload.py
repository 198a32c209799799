"""Reads a server's settings again, and takes of what has changed that which may change while it serves."""

import argparse
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import structlog

from tokenbus.protocol.telemetry import logs

Settings = TypeVar("Settings")

CHANGEABLE = {
    "worker": frozenset({"max_waiting", "max_new_tokens", "slow_wait_s", "grace_s", "log_level"}),
    "router": frozenset(
        {
            "tenant_limit",
            "tenant_limit_for",
            "max_queued_requests",
            "max_queued_tokens",
            "policy",
            "temperature",
            "slow_wait_s",
            "log_prompt_chars",
            "log_level",
        }
    ),
    "gateway": frozenset({"api_key", "max_requests", "max_connections_per_address", "grace_s", "log_level"}),
}
"""By command: the settings, as options are called, that SIGHUP changes. Everything else waits for the next start."""

_NO_SETTINGS = ("run", "reload")


def _as_written(names: Iterable[str]) -> list[str]:
    """As the file has them."""
    return sorted(name.replace("_", "-") for name in names)


class Reloader(Generic[Settings]):
    """Of one process. Calling it gives the settings to serve with from now on."""

    def __init__(
        self,
        command: str,
        options: argparse.Namespace,
        make: Callable[[argparse.Namespace], Settings],
        level: logs.LevelFilter,
    ) -> None:
        self._changeable = CHANGEABLE[command]
        self._options = options
        self._make = make
        self._level = level
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Reread of {', '.join(sorted(self._changeable))}>"

    def __call__(self) -> Settings:
        """Raises ValueError, and changes nothing, where what is there now can't be."""
        now = self._options.reload()
        changed = {name for name in self._changeable if getattr(now, name) != getattr(self._options, name)}
        held = argparse.Namespace(**vars(self._options) | {name: getattr(now, name) for name in changed})
        settings = self._make(held)
        late = [name for name in vars(now) if name not in _NO_SETTINGS and getattr(now, name) != getattr(held, name)]
        self._options = held
        self._level.set(held.log_level or "info")
        self._log.warning("settings_reloaded", changed=_as_written(changed), need_restart=_as_written(late))
        return settings
