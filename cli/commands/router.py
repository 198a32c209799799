"""`tokenbus router`: the flags of one router and the settings they make."""

import argparse
from typing import TYPE_CHECKING

from tokenbus.cli.console import arguments, connection_flags, serve
from tokenbus.protocol.wire import subjects
from tokenbus.router.placement.policies import POLICIES
from tokenbus.router.placement.remote_prefills import MIN_REMOTE_PREFILL_TOKENS
from tokenbus.router.requests.queueing.placement_queue import QueueSettings
from tokenbus.router.requests.queueing.rate_limiter import TenantLimits

if TYPE_CHECKING:
    from tokenbus.router.settings import RouterSettings


def add_flags(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    serve.add_status_flags(parser)
    serve.add_request_flags(parser)
    parser.add_argument("--router-id", default="", help="name of this router in logs")
    parser.add_argument("--policy", default=POLICIES[0], help=f"{', '.join(POLICIES)} or your own (%(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="above 0, sometimes choose a worker that costs more (%(default)s)",
    )
    parser.add_argument(
        "--remote-prefill-tokens",
        type=arguments.whole(0),
        default=MIN_REMOTE_PREFILL_TOKENS,
        help="fewest missing tokens for which a prefill worker may compute a prompt; 0: none ever does (%(default)s)",
    )
    parser.add_argument(
        "--tenant-limit",
        type=_tenant_limits,
        default=TenantLimits(),
        metavar="OPEN,REQUESTS,TOKENS",
        help="limits of each tenant at this router: concurrent requests, requests and tokens per minute; "
        "0: no limit (0,0,0)",
    )
    parser.add_argument(
        "--tenant-limit-for",
        type=_tenant_limit_for,
        action="append",
        default=[],
        metavar="TENANT=OPEN,REQUESTS,TOKENS",
        help="limits of one tenant, in place of --tenant-limit; may be repeated",
    )
    queue = QueueSettings()
    parser.add_argument(
        "--max-queued-requests",
        type=arguments.whole(0),
        default=queue.max_requests,
        help="requests per model that may wait here while every worker is busy (%(default)s)",
    )
    parser.add_argument(
        "--max-queued-tokens",
        type=arguments.whole(0),
        default=queue.max_tokens,
        help="total tokens of these, prompts and completions together (%(default)s)",
    )
    parser.add_argument(
        "--patience-s",
        type=arguments.whole(0),
        default=60,
        help="seconds that a request which has lost its worker waits for another to continue it (%(default)s)",
    )
    parser.add_argument(
        "--hold-s",
        type=arguments.whole(0),
        default=0,
        help="seconds that a request waits if its model has no worker at all, as after scaling to zero (%(default)s)",
    )
    parser.add_argument(
        "--expect-model",
        action="append",
        default=[],
        metavar="NAME",
        help="a model whose requests wait for --hold-s even if this router has never seen a worker of it",
    )
    parser.add_argument(
        "--max-request-bytes",
        type=arguments.whole(1),
        default=16 * 1024 * 1024,
        help="largest request; one above the broker's limit is sent in parts (%(default)s)",
    )
    parser.add_argument(
        "--tenant-upload-bytes",
        type=arguments.whole(1),
        default=64 * 1024 * 1024,
        help="bytes of one tenant's requests that may be arriving in parts at a time (%(default)s)",
    )
    parser.add_argument(
        "--tokenization-cache-mib",
        type=arguments.whole(0),
        default=64,
        metavar="MIB",
        help="memory for token ids of texts in conversations; 0: tokenize each turn from the start (%(default)s)",
    )
    parser.add_argument(
        "--log-prompt-chars", type=arguments.whole(0), default=0, help="characters of each prompt to log (0)"
    )
    parser.set_defaults(run=run)


def settings_of(options: argparse.Namespace) -> "RouterSettings":
    """Returns the settings that parsed flags describe. Raises ValueError."""
    # Every server parses these flags; only a router needs these modules.
    from tokenbus.router.requests.flights.request_telemetry import RequestLogSettings
    from tokenbus.router.settings import RouterSettings

    return RouterSettings(
        broker=connection_flags.settings_of(options),
        prefix=options.prefix,
        router_id=options.router_id,
        policy=options.policy,
        temperature=options.temperature,
        min_remote_prefill_tokens=options.remote_prefill_tokens,
        queue=QueueSettings(options.max_queued_requests, options.max_queued_tokens),
        inbox_prefixes=tuple(options.inbox_prefix or subjects.DEFAULT_INBOX_PREFIXES),
        max_request_bytes=options.max_request_bytes,
        tenant_upload_bytes=options.tenant_upload_bytes,
        tokenization_cache_bytes=options.tokenization_cache_mib << 20,
        patience_s=options.patience_s,
        hold_s=options.hold_s,
        expected_models=tuple(options.expect_model),
        status_page=serve.status_settings(options),
        otlp_traces_endpoint=options.otlp_traces_endpoint,
        tenant_limits=options.tenant_limit,
        tenant_limit_overrides=dict(options.tenant_limit_for),
        request_log=RequestLogSettings(options.slow_wait_s, options.log_prompt_chars),
    )


def run(options: argparse.Namespace) -> int:
    from tokenbus.router import serve as router

    return serve.run("router", options, settings_of, router.serve)


def _tenant_limits(text: str) -> TenantLimits:
    """A tenant's limits, such as `8,600,100000`: concurrent requests, requests per minute, tokens per minute."""
    try:
        concurrency, requests, tokens = text.split(",")
        found = TenantLimits(int(concurrency), float(requests), float(tokens))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be three numbers such as 8,600,100000, got {text}") from None
    if not all(0 <= number < float("inf") for number in found):
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return found


def _tenant_limit_for(text: str) -> tuple[str, TenantLimits]:
    """A tenant with its limits, such as `acme=8,600,100000`."""
    tenant, _, rest = text.partition("=")
    if not tenant or not rest:
        raise argparse.ArgumentTypeError(f"must be a tenant and its limits, such as acme=8,600,100000, got {text}")
    return tenant, _tenant_limits(rest)
