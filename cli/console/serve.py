"""Shared parts of the server commands: their common flags, running one, and reloading its settings on SIGHUP."""

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import structlog

from tokenbus.cli.console import connection_flags
from tokenbus.cli.console.arguments import COUNT, FILE, INTERVAL, PORTS, URL, one_of, text
from tokenbus.cli.console.flags import EXIT_BAD_SETTINGS, Flag, Parser
from tokenbus.protocol import tasks
from tokenbus.protocol.process import signals
from tokenbus.protocol.telemetry import log_variables, logs, long_waits, status
from tokenbus.protocol.wire import subjects
from tokenbus.worker.contract.engine_errors import ModelError, ModelTooLargeError

Settings = TypeVar("Settings")

_NOT_SETTINGS = ("run", "reload", "reloads")


_TRACES = "send traces there, e.g. http://127.0.0.1:4318/v1/traces; needs the extra `traces`"
TRACES = Flag("--otlp-traces-endpoint", URL, _TRACES, "")
_INBOX = "allowed prefix of clients' reply subjects"
INBOX_PREFIXES = Flag("--inbox-prefix", text("PREFIX"), _INBOX, [], unset=", ".join(subjects.DEFAULT_INBOX_PREFIXES))
_SLOW = "log a request that has waited this long, and again each time the wait has doubled"
SLOW_WAIT = Flag("--slow-wait-s", INTERVAL, _SLOW, long_waits.FIRST_S, reloads=True)


def add_flags(parser: Parser, *logged: Flag) -> None:
    """Adds the last flags of every server: those for its status page, traces, logs, settings file and connection.

    `logged` are the server's own about logs and metrics."""
    page = status.StatusSettings()
    flag = parser.group("monitoring")
    flag(
        "--metrics-port",
        PORTS,
        "serve /metrics, /livez, /readyz and /status on the first free one of these ports; 0: any",
        page.ports,
    )
    flag("--metrics-host", text("ADDRESS"), "address of that port", page.host)
    flag("--metrics-fd", COUNT, "serve them on this inherited socket instead of --metrics-port")
    flag.add(TRACES)
    level, form = log_variables.LEVEL_VARIABLE, log_variables.FORMAT_VARIABLE
    flag("--log-level", one_of(*logs.LEVELS), "lowest that is logged", unset="info", variable=level, reloads=True)
    unset = "json, or console on a terminal"
    flag("--log-format", one_of(*logs.FORMATS), "JSON, or text for people", unset=unset, variable=form)
    flag.add(*logged)
    file = parser.group("settings file")
    file("--config", FILE, "settings in TOML, named like these options", variable="TOKENBUS_CONFIG")
    connection_flags.add_flags(parser)


def status_settings(options: argparse.Namespace) -> status.StatusSettings:
    """Returns the settings of the status page from these flags."""
    return status.StatusSettings(options.metrics_host, options.metrics_port, options.metrics_fd)


def run(
    process: str,
    options: argparse.Namespace,
    make: Callable[[argparse.Namespace], Settings],
    serve: Callable[[Settings, Callable[[], Settings]], Coroutine[Any, Any, None]],
) -> int:
    """Runs a server until it is stopped; returns the exit status. Expected failures are printed as one line.

    `make` turns options into settings. `serve` gets them and a function that reloads them."""
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the default would end the process before it serves
    level = logs.configure(process, logs.LogSettings(options.log_level or "", options.log_format or ""))
    reloader = Reloader(options, make, level)
    try:
        settings = make(options)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.get_loop().set_exception_handler(tasks.log_uncaught)
            runner.run(serve(settings, reloader))
    except (ModelError, ValueError, ConnectionError) as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        may_work_later = isinstance(error, ModelTooLargeError | ConnectionError)
        return 1 if may_work_later else EXIT_BAD_SETTINGS
    except signals.StoppedError:
        pass
    return 0


def _loop_factory() -> Any:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


class Reloader(Generic[Settings]):
    """Reads one server's settings again when called, and returns the settings to use from now on.

    Only the options that `options.reloads` names change. Others keep their value, and the log says that they need a
    restart."""

    def __init__(
        self,
        options: argparse.Namespace,
        make: Callable[[argparse.Namespace], Settings],
        level: logs.LevelFilter,
    ) -> None:
        self._changeable: frozenset[str] = options.reloads
        self._options = options
        self._make = make
        self._level = level
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Reloader of {', '.join(sorted(self._changeable))}>"

    def __call__(self) -> Settings:
        """Raises ValueError, and changes nothing, if the settings are now invalid."""
        # Settings are made from the merged options, so that their ranges are checked together.
        now = vars(self._options.reload())
        before = vars(self._options)
        changed = sorted(name for name in self._changeable if now[name] != before[name])
        merged = argparse.Namespace(**before | {name: now[name] for name in changed})
        settings = self._make(merged)
        late = sorted(name for name in now if name not in _NOT_SETTINGS and now[name] != getattr(merged, name))
        self._options = merged
        self._level.set(merged.log_level or "info")
        self._log.warning(
            "settings_reloaded",
            changed=[name.replace("_", "-") for name in changed],
            need_restart=[name.replace("_", "-") for name in late],
        )
        return settings
