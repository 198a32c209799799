"""`tokenbus wire-check`: finds the system, tries the rules against it, prints what holds."""

import argparse
import asyncio
import sys
from functools import partial

from tokenbus.cli import connection_flags
from tokenbus.cli.supervisor import EXIT_BAD_SETTINGS
from tokenbus.conformance.assertions import BrokenError, Message
from tokenbus.conformance.exchange import Exchange
from tokenbus.conformance.link import Link
from tokenbus.conformance.probe import Probe, Target
from tokenbus.conformance.report import Verdict, json_line, line, summary
from tokenbus.conformance.rules.registry import Rule, all_rules
from tokenbus.conformance.runner import run_all
from tokenbus.protocol.bus import connection
from tokenbus.protocol.telemetry import logs
from tokenbus.protocol.wire import subjects

EXIT_BROKEN = EXIT_UNREACHABLE = 1
"""As of every command where there is no broker; no line on standard output tells the two apart."""
RULE_TIMEOUT_S = 40.0

_MODELS_TIMEOUT_S = 2.0


class NotServedError(Exception):
    """There is nothing to check; says what to do."""


def run(options: argparse.Namespace) -> int:
    """Returns the exit status."""
    rules = [rule for rule in all_rules() if options.only.lower() in rule.name.lower()]
    if options.list:
        print("\n".join(rule.name for rule in rules))
        return 0
    logs.log_errors_only()
    try:
        if not rules:
            raise NotServedError(f"no rule is named like {options.only!r}: --list shows them")
        return asyncio.run(_check(options, rules))
    except ConnectionError as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return EXIT_UNREACHABLE
    except (NotServedError, ValueError) as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS


async def _check(options: argparse.Namespace, rules: list[Rule]) -> int:
    names = subjects.Subjects(options.prefix)
    link = await Link.open(connection_flags.settings_of(options), options.inbox_prefix)
    try:
        served = await _find(link, names, options)
        make_probe = partial(Probe, link, names, options.tenant, options.inbox_prefix, served)
        outcomes = []
        async for outcome in run_all(rules, make_probe, RULE_TIMEOUT_S):
            print(json_line(outcome) if options.json else line(outcome), flush=True)
            outcomes.append(outcome)
    finally:
        await link.close()
    if not options.json:
        print(summary(outcomes))
    return EXIT_BROKEN if any(outcome.verdict is Verdict.BROKEN for outcome in outcomes) else 0


async def _find(link: Link, names: subjects.Subjects, options: argparse.Namespace) -> Target:
    """What is known of the model from the start. Raises NotServedError where nobody serves it."""
    exchange = Exchange(link.new_inbox(), msgpack=False)
    await link.subscribe(exchange.inbox, exchange.take)
    await link.publish(names.models_for(options.tenant), b"", exchange.inbox)
    try:
        reply = await exchange.first("a reply to models", _MODELS_TIMEOUT_S)
    except BrokenError as error:
        raise NotServedError(f"no router answers at {connection.redact_url(options.nats)}: {error}") from error
    return _served(reply, options.model)


def _served(reply: Message, model: str) -> Target:
    """Reads no more of the reply than it must: the rules are about the rest."""
    known = {served.get("model"): served for served in reply.get("models") or []}
    if model not in known:
        raise NotServedError(f"nobody serves {model!r}; what is served: {', '.join(map(str, known)) or 'nothing'}")
    served = known[model]
    ready = [card for card in served.get("workers") or [] if card.get("state") == "ready"]
    return Target(
        model,
        int(served.get("context_length") or 0),
        tuple(str(card.get("worker_id")) for card in ready),
        int((reply.get("limits") or {}).get("max_request_bytes") or 0),
    )
