"""Shared parts of the server commands: their common flags, running one, and reloading its settings on SIGHUP."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

import structlog

from tokenbus.cli.console import arguments
from tokenbus.cli.console.supervisor import EXIT_BAD_SETTINGS
from tokenbus.protocol import tasks
from tokenbus.protocol.process import shutdown
from tokenbus.protocol.telemetry import backoff, logs, status
from tokenbus.worker.contract.engine_errors import ModelError, ModelTooLargeError

Settings = TypeVar("Settings")

CHANGEABLE = {
    "worker": frozenset(
        {
            "max_waiting",
            "max_prompt_tokens",
            "max_new_tokens",
            "reasoning_budget_message",
            "slow_wait_s",
            "grace_s",
            "handover_s",
            "log_level",
        }
    ),
    "router": frozenset(
        {
            "tenant_limit",
            "tenant_limit_for",
            "max_queued_requests",
            "max_queued_tokens",
            "policy",
            "temperature",
            "hold_s",
            "slow_wait_s",
            "log_prompt_chars",
            "log_level",
        }
    ),
    "gateway": frozenset({"api_key", "max_requests", "max_connections_per_address", "grace_s", "log_level"}),
}
"""The options of each command that SIGHUP changes. Changes of all others wait for a restart."""

_NOT_SETTINGS = ("run", "reload")


def add_status_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for the status page, traces and logs."""
    defaults = status.StatusSettings()
    parser.add_argument(
        "--metrics-port",
        type=arguments.ports,
        default=defaults.ports,
        metavar="PORT[-PORT]",
        help="serve /metrics, /livez and /readyz on the first free port of this range; 0: any free port (default: off)",
    )
    parser.add_argument(
        "--metrics-host", default=defaults.host, metavar="ADDRESS", help="address of that port (%(default)s)"
    )
    parser.add_argument(
        "--metrics-fd", type=int, metavar="N", help="serve them on this inherited socket instead of --metrics-port"
    )
    add_traces_flag(parser)
    for flag, variable, names, text in (
        ("--log-level", logs.LEVEL_VARIABLE, tuple(logs.LEVELS), "lowest level that is logged"),
        ("--log-format", logs.FORMAT_VARIABLE, logs.FORMATS, "format of log lines: JSON, or text for people"),
    ):
        parser.add_argument(
            flag,
            type=arguments.one_of(*names),
            default=os.environ.get(variable, "").lower() or None,
            metavar="|".join(names),
            help=f"{text} (variable {variable})",
        )


def status_settings(options: argparse.Namespace) -> status.StatusSettings:
    """Returns the settings of the status page from these flags."""
    return status.StatusSettings(options.metrics_host, options.metrics_port, options.metrics_fd)


def add_traces_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--otlp-traces-endpoint",
        default="",
        metavar="URL",
        help="send traces there, e.g. http://127.0.0.1:4318/v1/traces; needs the extra `traces`",
    )


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of the servers that take requests: routers and workers."""
    parser.add_argument(
        "--inbox-prefix",
        action="append",
        metavar="PREFIX",
        help="allowed prefix of clients' reply subjects (_INBOX); may be repeated",
    )
    parser.add_argument(
        "--slow-wait-s",
        type=arguments.seconds,
        default=backoff.FIRST_S,
        help="log a request that has waited this long, and again each time the wait has doubled (%(default)s)",
    )


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
    reloader = Reloader(process, options, make, level)
    try:
        settings = make(options)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.get_loop().set_exception_handler(tasks.log_uncaught)
            runner.run(serve(settings, reloader))
    except ModelTooLargeError as error:  # it may fit later
        print(f"tokenbus: {error}", file=sys.stderr)
        return 1
    except (ModelError, ValueError) as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
    except ConnectionError as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return 1
    except shutdown.StoppedError:
        pass
    return 0


def _loop_factory() -> Any:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


class Reloader(Generic[Settings]):
    """Reads one server's settings again when called, and returns the settings to use from now on.

    Only the options in CHANGEABLE change. Others keep their value, and the log says that they need a restart."""

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
