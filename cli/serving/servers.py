"""The commands that serve: `up`, `worker`, `router` and `gateway`.

What only one of them needs is imported where it is needed: the others start a third sooner without it."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from tokenbus.cli import arguments, connection_flags
from tokenbus.cli.commands import gateway, up, worker
from tokenbus.cli.reload import Reloader
from tokenbus.cli.supervisor import EXIT_BAD_SETTINGS
from tokenbus.protocol.process import shutdown
from tokenbus.protocol.telemetry import backoff, logs, status
from tokenbus.protocol.wire import subjects
from tokenbus.router.requests.rate_limiter import TenantLimits
from tokenbus.worker import contract

if TYPE_CHECKING:
    from tokenbus.router.settings import RouterSettings

Settings = TypeVar("Settings")


def _add_up(parser: argparse.ArgumentParser) -> None:
    worker.add_model(parser)
    parser.add_argument("--workers", type=arguments.at_least(1), default=2, help="worker replicas (%(default)s)")
    parser.add_argument(
        "--port", type=arguments.port, default=4222, help="port of the embedded broker; 0 takes a free one"
    )
    parser.add_argument("--nats", metavar="URL", help="use this broker instead of an embedded one")
    parser.add_argument(
        "--gateway-port",
        type=arguments.port,
        metavar="PORT",
        help="of the HTTP API (8000, or a free one where it is taken)",
    )
    parser.add_argument("--no-gateway", action="store_true", help="leave the HTTP API out")
    parser.add_argument(
        "--metrics",
        action="store_true",
        help="show /metrics of each process, from ports 9100 (router), 9110 (workers) and 9130 (gateway) on",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON once it serves")
    _add_traces(parser)
    parser.set_defaults(run=up.run)


def _add_worker(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    _add_inboxes(parser)
    _add_status(parser)
    _add_slow_wait(parser)
    worker.add_flags(parser)
    parser.set_defaults(run=_worker)


def _add_status(parser: argparse.ArgumentParser) -> None:
    shown = status.Settings()
    parser.add_argument(
        "--metrics-port",
        type=arguments.ports,
        default=shown.ports,
        metavar="PORT[-PORT]",
        help="show /metrics, /livez and /readyz at the first of these that is free; 0 takes any; none shows nothing",
    )
    parser.add_argument(
        "--metrics-host", default=shown.host, metavar="ADDRESS", help="and at this address (%(default)s)"
    )
    _add_traces(parser)
    _add_logs(parser)


def _add_logs(parser: argparse.ArgumentParser) -> None:
    for flag, variable, names, text in (
        ("--log-level", logs.LEVEL_VARIABLE, tuple(logs.LEVELS), "the least that is logged"),
        ("--log-format", logs.FORMAT_VARIABLE, logs.FORMATS, "lines of JSON, or readable ones as on a terminal"),
    ):
        parser.add_argument(
            flag,
            type=arguments.one_of(*names),
            default=os.environ.get(variable, "").lower() or None,
            metavar="|".join(names),
            help=f"{text} (variable {variable})",
        )


def _add_slow_wait(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slow-wait-s",
        type=arguments.seconds,
        default=backoff.FIRST_S,
        help="a request that has waited so long leaves a line, and another each time that has doubled (%(default)s)",
    )


def _add_traces(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--otlp-traces-endpoint",
        default="",
        metavar="URL",
        help="send spans of requests there, as http://127.0.0.1:4318/v1/traces; needs the extra traces",
    )


def _add_inboxes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--inbox-prefix",
        action="append",
        metavar="PREFIX",
        help="what a client's reply subject may begin with (_INBOX); may be repeated",
    )


def _add_router(parser: argparse.ArgumentParser) -> None:
    from tokenbus.router.placement.policies import POLICIES
    from tokenbus.router.requests.placement_queue import QueueSettings

    connection_flags.add_client_flags(parser)
    _add_status(parser)
    _add_inboxes(parser)
    parser.add_argument("--router-id", default="", help="name of this router in logs")
    parser.add_argument("--policy", default=POLICIES[0], help=f"{', '.join(POLICIES)} or your own (%(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="above 0 dearer workers are drawn now and then (%(default)s)",
    )
    parser.add_argument(
        "--tenant-limit",
        type=arguments.tenant_limits,
        default=TenantLimits(),
        metavar="OPEN,REQUESTS,TOKENS",
        help="of each tenant: requests at a time, requests and tokens a minute, at this router; 0 is no limit (0,0,0)",
    )
    parser.add_argument(
        "--tenant-limit-for",
        type=arguments.tenant_limit_for,
        action="append",
        default=[],
        metavar="TENANT=OPEN,REQUESTS,TOKENS",
        help="of one tenant, instead; may be repeated",
    )
    waiting = QueueSettings()
    parser.add_argument(
        "--max-queued-requests",
        type=arguments.at_least(0),
        default=waiting.max_requests,
        help="requests of a model that may wait here while every worker is busy (%(default)s)",
    )
    parser.add_argument(
        "--max-queued-tokens",
        type=arguments.at_least(0),
        default=waiting.max_tokens,
        help="tokens of all of them, prompts and what they may generate (%(default)s)",
    )
    parser.add_argument(
        "--max-request-bytes", type=arguments.at_least(0), default=0, help="largest request; 0: half the broker's"
    )
    _add_slow_wait(parser)
    parser.add_argument(
        "--log-prompt-chars", type=arguments.at_least(0), default=0, help="log so much of each prompt's beginning (0)"
    )
    parser.set_defaults(run=_router)


def _add_gateway(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    _add_status(parser)
    gateway.add_flags(parser)
    parser.set_defaults(run=_gateway)


def _worker(options: argparse.Namespace) -> int:
    from tokenbus.worker.frontend import serve
    from tokenbus.worker.frontend.frontend import ReplacedError

    try:
        return _run("worker", options, worker.settings_of, serve.serve)
    except ReplacedError as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS


def _router(options: argparse.Namespace) -> int:
    from tokenbus.router import serve

    return _run("router", options, _router_settings, serve.serve)


def _router_settings(options: argparse.Namespace) -> "RouterSettings":
    """What parsed flags mean. Raises ValueError."""
    from tokenbus.router.requests.placement_queue import QueueSettings
    from tokenbus.router.requests.request_telemetry import RequestLogSettings
    from tokenbus.router.settings import RouterSettings

    return RouterSettings(
        broker=connection_flags.settings_of(options),
        prefix=options.prefix,
        router_id=options.router_id,
        policy=options.policy,
        temperature=options.temperature,
        queue=QueueSettings(options.max_queued_requests, options.max_queued_tokens),
        inbox_prefixes=tuple(options.inbox_prefix or subjects.DEFAULT_INBOX_PREFIXES),
        max_request_bytes=options.max_request_bytes,
        status_page=status.Settings(options.metrics_host, options.metrics_port),
        otlp_traces_endpoint=options.otlp_traces_endpoint,
        tenant_limits=options.tenant_limit,
        tenant_limit_overrides=dict(options.tenant_limit_for),
        request_log=RequestLogSettings(options.slow_wait_s, options.log_prompt_chars),
    )


def _gateway(options: argparse.Namespace) -> int:
    from tokenbus.gateway import serve  # a fifth of a second that no other command needs

    return _run("gateway", options, gateway.SettingsFactory(), serve.serve)


def _run(
    process: str,
    options: argparse.Namespace,
    make: Callable[[argparse.Namespace], Settings],
    serve: Callable[[Settings, Callable[[], Settings]], Coroutine[Any, Any, None]],
) -> int:
    """A server process: what stops it, wrong settings included, is one line that says what to do."""
    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it serves and reads its settings again then
    level = logs.configure(process, logs.Settings(options.log_level or "", options.log_format or ""))
    again = Reloader(process, options, make, level)
    try:
        settings = make(options)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(settings, again))
    except (contract.EngineStartError, ValueError) as error:
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


SETTINGS_FACTORIES: dict[str, Callable[[argparse.Namespace], Any]] = {
    "worker": worker.settings_of,
    "router": _router_settings,
    "gateway": gateway.settings_of,
}
"""What makes settings of a server's options; raises ValueError."""
FLAGS = {"up": _add_up, "worker": _add_worker, "router": _add_router, "gateway": _add_gateway}
"""What gives the parser of each command its flags."""
