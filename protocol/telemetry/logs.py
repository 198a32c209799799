"""Configures structured logs, the same in every process: lines of JSON, or readable ones."""

import contextlib
import enum
import io
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, TextIO, cast

import msgspec
import structlog

from tokenbus.protocol.telemetry.log_variables import FORMAT_VARIABLE, LEVEL_VARIABLE

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
FORMATS = ("json", "console")
MAX_LINES_PER_S = 20
"""Warnings and errors per second with the same event: thousands of clients, or a hostile one, can cause many more."""
_NEVER_DROPPED = frozenset({"control"})
"""Operators' commands, which are always logged."""


class LevelFilter:
    """A structlog processor that drops lines below a level, which may change while the process runs."""

    def __init__(self, name: str) -> None:
        self.set(name)

    def __repr__(self) -> str:
        return f"<LevelFilter {self.lowest}>"

    def set(self, name: str) -> None:
        """Sets the lowest level that is logged: one of LEVELS; anything else means `info`."""
        self.lowest = LEVELS.get(name.lower(), logging.INFO)

    def __call__(
        self, logger: structlog.typing.WrappedLogger, name: str, line: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """Returns the line or raises DropEvent. `name` is the logging method, such as `info`."""
        if LEVELS.get(name, logging.ERROR) < self.lowest:
            raise structlog.DropEvent
        return line


class FloodFilter:
    """A structlog processor that drops warnings and errors when too many have the same event."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = 0.0
        self._counts: Counter[str] = Counter()
        """Lines in the current second, by event."""
        self._dropped: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<FloodFilter, {self._dropped.total()} dropped>"

    def __call__(
        self, logger: structlog.typing.WrappedLogger, name: str, line: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """Returns the line or raises DropEvent. The first line after dropped ones has their number in `unlogged`."""
        event = str(line.get("event"))
        if LEVELS.get(name, logging.ERROR) < logging.WARNING or event in _NEVER_DROPPED:
            return line
        with self._lock:
            now = self._clock()
            if now - self._since >= 1.0:
                self._since = now
                self._counts.clear()
            self._counts[event] += 1
            if self._counts[event] > MAX_LINES_PER_S:
                self._dropped[event] += 1
                raise structlog.DropEvent
            unlogged = self._dropped.pop(event, 0)
        return {**line, "unlogged": unlogged} if unlogged else line


class LossyOutput(io.TextIOBase):
    """A file for log lines. One that can't be written is lost: a full disk must not end requests."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._file.flush()


class LogSettings(NamedTuple):
    """Level and format of the log. Empty values are taken from the environment; the defaults are `info`, and JSON
    unless standard error is a terminal."""

    level: str = ""
    form: str = ""

    def variables(self) -> dict[str, str]:
        """Returns environment variables that make a child process log like this one."""
        pairs = ((LEVEL_VARIABLE, self.level), (FORMAT_VARIABLE, self.form))
        return {variable: value for variable, value in pairs if value}


DEFAULTS = LogSettings()


def configure(process: str, settings: LogSettings = DEFAULTS) -> LevelFilter:
    """Sends logs to standard error, with `process` on every line. Returns the filter, to change the level later."""
    level = LevelFilter(settings.level or os.environ.get(LEVEL_VARIABLE, "info"))
    form = settings.form or os.environ.get(FORMAT_VARIABLE, "console" if sys.stderr.isatty() else "json")
    renderer: structlog.typing.Processor = (
        # repr: client-chosen names must not send control sequences to the terminal
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback, repr_native_str=True)
        if form == "console"
        else structlog.processors.JSONRenderer(serializer=_as_json)
    )
    tracebacks = structlog.processors.ExceptionRenderer(
        structlog.tracebacks.ExceptionDictTransformer(show_locals=False)  # local variables hold prompts and texts
    )
    structlog.configure(
        processors=[
            level,
            FloodFilter(),
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            tracebacks if form == "json" else _with_plain_values,
            renderer,
        ],
        wrapper_class=_logger_class(level),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, LossyOutput(sys.stderr))),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it would write unstructured lines between these
    return level


def log_errors_only() -> None:
    """Logs only errors, to standard error: for commands whose output already shows how their requests ended."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns when a broker ends TLS, which nats-py handles
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, LossyOutput(sys.stderr))),
    )


def _logger_class(level: LevelFilter) -> type[structlog.typing.FilteringBoundLogger]:
    """Returns a class of loggers that drop debug lines before they are made: each request has some."""

    class Logger(structlog.make_filtering_bound_logger(logging.DEBUG)):  # type: ignore[misc]
        def debug(self, event: str, *arguments: object, **keys: object) -> object:
            return super().debug(event, *arguments, **keys) if level.lowest <= logging.DEBUG else None

    return Logger


def _with_plain_values(
    logger: structlog.typing.WrappedLogger, name: str, line: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Returns the line as JSON would have it: `ready`, and not `<WorkerState.READY: 'ready'>`."""
    return {key: value.value if isinstance(value, enum.Enum) else value for key, value in line.items()}


def _as_json(line: object, **_: object) -> str:
    """Encodes a log line with msgspec, which is faster than json: every request has some."""
    try:
        return msgspec.json.encode(line, enc_hook=repr).decode()
    except UnicodeEncodeError:  # a file's name that is no text
        return json.dumps(line, default=repr)
