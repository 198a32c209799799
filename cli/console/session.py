"""Runs a client command over one connection, and turns errors into one line of text and an exit status."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable

import msgspec

from tokenbus.cli.console import arguments, connection_flags
from tokenbus.cli.console.flags import EXIT_BAD_SETTINGS, Flag
from tokenbus.cli.console.plain_text import printable
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol import late_logger
from tokenbus.protocol.wire import errors

MODEL = Flag("--model -m", arguments.NAME, "the served model", unset="the only one that can do it")
EXIT_INTERRUPTED = 130
_CONNECT_TIMEOUT_S = 2.0
_DENIED = "permissions violation"
"""In the broker's error where its permissions forbid a subject, in small letters."""


def log_errors_only() -> None:
    """Has only errors logged, to standard error, if there are any."""
    late_logger.configure_first(_log_errors_only)


def _log_errors_only() -> None:
    import tokenbus.protocol.process.lean_imports  # isort: skip  # noqa: F401  # before structlog
    from tokenbus.protocol.telemetry import logs

    logs.log_errors_only()


def with_client(options: argparse.Namespace, command: Callable[[WireClient], Awaitable[int]]) -> int:
    """Runs a command with a connected client and returns its exit status."""
    log_errors_only()
    try:
        settings = connection_flags.settings_of(options, _CONNECT_TIMEOUT_S)
    except ValueError as error:
        return print_error(str(error), EXIT_BAD_SETTINGS)

    async def run() -> int:
        async with await WireClient.connect(tenant=options.tenant, prefix=options.prefix, settings=settings) as client:
            try:
                return await command(client)
            except errors.RequestError as error:
                told = with_hint(options, error.error)
                return await print_request_error(client, getattr(options, "model", None), told)

    try:
        return asyncio.run(run())
    except BrokenPipeError:
        raise  # also a ConnectionError, but it means that the reader of our output is gone
    except asyncio.CancelledError:
        return EXIT_INTERRUPTED
    except (ConnectionError, ValueError) as error:
        return print_error(str(error))


def with_hint(options: argparse.Namespace, error: errors.Error) -> errors.Error:
    """Returns an error with what to try, if the broker's permissions are the reason for it."""
    if _DENIED not in error.message.lower():
        return error
    tenant = options.nats_user or "operator"
    hint = f"; this user may not ask as {options.tenant}: pass the tenant that it may, such as --tenant {tenant}"
    return error if tenant == options.tenant else msgspec.structs.replace(error, message=error.message + hint)


async def model_of(options: argparse.Namespace, client: WireClient, feature: str = "") -> str:
    """Returns the model that `--model` names, else the only one that is served and has this feature. Raises
    RequestError if there are none or several."""
    if options.model is not None:
        return str(options.model)
    return await client.default_model(feature)


async def print_request_error(client: WireClient, model: str | None, error: errors.Error) -> int:
    """Prints an error reply, with the served models if the requested one is not; returns the exit status."""
    if model is not None and error.code in (errors.Code.MODEL_NOT_FOUND, errors.Code.NO_WORKER):
        try:
            names = [served.model for served in (await client.models(2.0, with_workers=False)).models]
        except errors.RequestError:
            names = [model]
        if model not in names:
            text = f"{error.message}; served models: {', '.join(names) or 'nothing'}"
            error = msgspec.structs.replace(error, message=text)
    again = f" (try again in {error.retry_after_ms:.0f} ms)" if error.retry_after_ms else ""
    return print_error(f"{error.code}: {error.message}{again}")


def print_error(text: str, status: int = 1) -> int:
    """Prints an error, which may be somebody else's; returns the exit status."""
    for line in text.splitlines():
        print(f"tokenbus: {printable(line)}", file=sys.stderr)
    return status


def decode_utf8(data: bytes, source: str) -> str:
    """Decodes input. Raises ValueError naming the source and the first invalid byte."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not UTF-8: byte {error.start + 1} of it is {data[error.start]:#04x}") from error
