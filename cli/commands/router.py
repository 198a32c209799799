"""`tokenbus router`: the flags of one router and the settings they make."""

import argparse
from typing import NamedTuple

from tokenbus.cli.console import audit_flags, connection_flags, key_flags, serve
from tokenbus.cli.console.arguments import (
    COUNT,
    MAX_COUNT,
    MIB,
    NAME,
    PATTERN,
    SECONDS,
    SWITCH,
    ArgumentType,
    real,
    whole,
)
from tokenbus.cli.console.flags import Flag, Parser, fields_of, text_of
from tokenbus.protocol.access import usage
from tokenbus.protocol.wire import subjects
from tokenbus.router.access.limits import TenantLimits
from tokenbus.router.placement.policies import POLICIES
from tokenbus.router.placement.remote_prefills import MIN_REMOTE_PREFILL_TOKENS
from tokenbus.router.requests.flights.request_telemetry import RequestLogSettings
from tokenbus.router.requests.queueing.placement_queue import QueueSettings
from tokenbus.router.settings import RouterSettings


class TenantOverride(NamedTuple):
    """The limits of one tenant."""

    tenant: str
    limits: TenantLimits

    def __str__(self) -> str:
        return f"{self.tenant}={text_of(self.limits)}"


def _limits(text: str) -> TenantLimits:
    concurrency, requests, tokens = text.split(",")
    found = TenantLimits(int(concurrency), int(requests), int(tokens))
    if not all(0 <= number <= MAX_COUNT for number in found):
        raise ValueError
    return found


def _override(text: str) -> TenantOverride:
    tenant, mark, limits = text.partition("=")
    if not tenant or not mark:
        raise ValueError
    return TenantOverride(tenant, _limits(limits))


_LIMITS = ArgumentType(
    _limits, f"three whole numbers from 0 to {MAX_COUNT:,}, such as 8,600,100000", "OPEN,REQUESTS,TOKENS"
)
_OVERRIDE = ArgumentType(_override, "a tenant and its limits, such as acme=8,600,100000", "TENANT=OPEN,REQUESTS,TOKENS")


def add_flags(parser: Parser) -> None:
    flag = parser.group("placement", RouterSettings)
    flag("--policy", NAME, f"{', '.join(POLICIES)} or your own", reloads=True)
    flag("--temperature", real(0), "above 0, sometimes choose a worker that costs more", reloads=True)
    remote = "fewest missing tokens for which a prefill worker may compute a prompt; 0: none ever does"
    flag("--remote-prefill-tokens", COUNT, remote, MIN_REMOTE_PREFILL_TOKENS)
    flag("--site", NAME, "place where it runs: workers of other sites cost more", unset="all cost the same")
    flag("--site-cost-s", SECONDS, "time by which a worker of another site counts as slower")
    flag = parser.group("limits", RouterSettings)
    limits = "limits of each tenant at all routers together: open requests, requests and tokens per minute; 0: no limit"
    flag("--tenant-limit", _LIMITS, limits, TenantLimits(), reloads=True)
    flag("--tenant-limit-for", _OVERRIDE, "limits of one tenant, in place of --tenant-limit", [], reloads=True)
    flag.add(serve.INBOX_PREFIXES)
    bytes_ = whole(1, metavar="BYTES")
    flag("--max-request-bytes", bytes_, "largest request; one above the broker's limit is sent in parts")
    flag("--tenant-upload-bytes", bytes_, "bytes of one tenant's requests that may be arriving in parts at a time")
    key_flags.add_flags(parser)
    flag = parser.group("waiting", RouterSettings)
    queue, waiting = QueueSettings(), "requests per model that may wait here while every worker is busy"
    flag("--max-queued-requests", COUNT, waiting, queue.max_requests, reloads=True)
    tokens = "total tokens of these, prompts and completions together"
    flag("--max-queued-tokens", COUNT, tokens, queue.max_tokens, reloads=True)
    flag("--patience-s", SECONDS, "how long a request which has lost its worker waits for another to continue it")
    hold = "how long a request waits if its model has no worker at all, as after scaling to zero"
    flag("--hold-s", SECONDS, hold, reloads=True)
    expect = "a model whose requests wait for --hold-s even if this router has never seen a worker of it"
    flag("--expect-model", NAME, expect, [])
    flag = parser.group("usage", RouterSettings)
    flag("--usage", SWITCH, "count what requests use, by day, tenant, key and model, in the broker's JetStream")
    flag("--usage-days", whole(1, usage.MAX_DAYS), "days for which these counts are kept")
    audit_flags.add_flags(parser)
    flag = parser.group("router", RouterSettings)
    part = "a pattern of the names of the models that it serves, such as chat-*; other routers serve the others"
    flag("--models", PATTERN, part, [], unset="all models")
    flag("--router-id", NAME, "name of this router in logs", unset="host and process id")
    cache = "memory for token ids of texts in conversations; 0: tokenize each turn from the start"
    flag("--tokenization-cache-mib", MIB, cache, RouterSettings.tokenization_cache_bytes >> 20)
    prompts = Flag("--log-prompt-chars", COUNT, "characters of each prompt to log", 0, reloads=True)
    serve.add_flags(parser, serve.SLOW_WAIT, prompts)
    parser.set_defaults(run=run)


def settings_of(options: argparse.Namespace) -> RouterSettings:
    """Returns the settings that parsed flags describe. Raises ValueError."""
    return RouterSettings(
        broker=connection_flags.settings_of(options),
        key_settings=key_flags.settings_of(options),
        audit_settings=audit_flags.settings_of(options),
        min_remote_prefill_tokens=options.remote_prefill_tokens,
        queue=QueueSettings(options.max_queued_requests, options.max_queued_tokens),
        inbox_prefixes=tuple(options.inbox_prefix or subjects.DEFAULT_INBOX_PREFIXES),
        tokenization_cache_bytes=options.tokenization_cache_mib << 20,
        model_patterns=tuple(options.models),
        expected_models=tuple(options.expect_model),
        status_page=serve.status_settings(options),
        tenant_limits=options.tenant_limit,
        tenant_limit_overrides=dict(options.tenant_limit_for),
        request_log=RequestLogSettings(options.slow_wait_s, options.log_prompt_chars),
        **fields_of(RouterSettings, options),
    )


def run(options: argparse.Namespace) -> int:
    from tokenbus.router import serve as router

    return serve.run("router", options, settings_of, router.serve)
