"""Structured logs: one configuration for every process, JSON lines or readable ones."""

import logging
import os
import sys
from typing import NamedTuple

import msgspec
import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
FORMATS = ("json", "console")
LEVEL_VARIABLE = "TOKENBUS_LOG"
FORMAT_VARIABLE = "TOKENBUS_LOG_FORMAT"


class LevelFilter:
    """What is logged and what is not; may be changed while a process runs."""

    def __init__(self, name: str) -> None:
        self.set(name)

    def __repr__(self) -> str:
        return f"<Level {self._least}>"

    def set(self, name: str) -> None:
        """One of LEVELS; what is none of them is `info`."""
        self._least = LEVELS.get(name.lower(), logging.INFO)

    def __call__(
        self, logger: structlog.typing.WrappedLogger, name: str, line: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """Lets a line pass, or drops it. `name` is the method that was called."""
        if LEVELS.get(name, logging.ERROR) < self._least:
            raise structlog.DropEvent
        return line


class Settings(NamedTuple):
    """What is empty is taken from the variables; without those it is lines of `info`, as JSON unless on a terminal."""

    level: str = ""
    form: str = ""

    def variables(self) -> dict[str, str]:
        """Has a child process log alike."""
        pairs = ((LEVEL_VARIABLE, self.level), (FORMAT_VARIABLE, self.form))
        return {variable: value for variable, value in pairs if value}


DEFAULTS = Settings()


def configure(process: str, settings: Settings = DEFAULTS) -> LevelFilter:
    """Sends logs to standard error, with `process` bound to every line; gives what changes their level."""
    level = LevelFilter(settings.level or os.environ.get(LEVEL_VARIABLE, "info"))
    form = settings.form or os.environ.get(FORMAT_VARIABLE, "console" if sys.stderr.isatty() else "json")
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
        if form == "console"
        else structlog.processors.JSONRenderer(serializer=_as_json)
    )
    tracebacks = structlog.processors.ExceptionRenderer(
        structlog.tracebacks.ExceptionDictTransformer(show_locals=False)  # they hold prompts and texts
    )
    structlog.configure(
        processors=[
            level,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            tracebacks if form == "json" else structlog.processors.StackInfoRenderer(),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(process=process)
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it would write lines of its own among these
    return level


def log_errors_only() -> None:
    """Of a command that asks others: only errors, on standard error. What its requests end in says what is wrong."""
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns when a broker ends TLS, which nats-py does not mind
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
    )


def _as_json(line: object, **_: object) -> str:
    """Quicker than the standard library's: a router writes three lines for each request."""
    return msgspec.json.encode(line, enc_hook=repr).decode()
