"""`tokenbus wire-check`: checks a running system against the rules of the wire contract."""

import argparse
import asyncio
from functools import partial

from tokenbus.cli.console import connection_flags, session
from tokenbus.cli.console.arguments import SWITCH, TEXT, real, text
from tokenbus.cli.console.flags import Parser
from tokenbus.cli.console.plain_text import printable
from tokenbus.conformance.probing.assertions import BrokenError, Message
from tokenbus.conformance.probing.exchange import DEFAULT_WAIT_S, Exchange
from tokenbus.conformance.probing.link import ProbeLink
from tokenbus.conformance.probing.probe import Probe, ProbeTarget
from tokenbus.conformance.probing.report import RuleVerdict, json_line, line, summary
from tokenbus.conformance.rules.registry import Rule, all_rules
from tokenbus.conformance.runner import run_all
from tokenbus.protocol.bus import connection
from tokenbus.protocol.telemetry import logs
from tokenbus.protocol.wire import errors, subjects
from tokenbus.protocol.wire.default_model import default_model

_WAITS_OF_A_RULE = 6
"""A rule may take as long as this many waits for a message."""
_MODELS_TIMEOUT_S = 2.0


def add_flags(parser: Parser) -> None:
    flag = parser.group("check")
    flag.add(session.MODEL)
    flag("--inbox-prefix", text("PREFIX"), "prefix of reply subjects", subjects.DEFAULT_INBOX_PREFIXES[0])
    flag("--only", TEXT, "check only the rules that contain this text", "", unset="all rules")
    flag(
        "--wait-s",
        real(1, 3_600, "SECONDS"),
        "how long a rule waits for a message; more for a busy system",
        DEFAULT_WAIT_S,
    )
    flag("--list", SWITCH, "list the rules without checking them")
    flag("--json", SWITCH, "print one JSON object per rule")
    connection_flags.add_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns the exit status: 1 if a rule is broken. Raises ConnectionError and ValueError."""
    rules = [rule for rule in all_rules() if options.only.lower() in rule.name.lower()]
    if options.list:
        print("\n".join(rule.name for rule in rules))
        return 0
    logs.log_errors_only()
    if not rules:
        raise ValueError(f"no rule contains {options.only!r}: --list shows all rules")
    return asyncio.run(_check(options, rules))


async def _check(options: argparse.Namespace, rules: list[Rule]) -> int:
    names = subjects.Subjects(options.prefix)
    link = await ProbeLink.open(connection_flags.settings_of(options), options.inbox_prefix)
    try:
        target = await _find(link, names, options)
        make_probe = partial(Probe, link, names, options.tenant, options.inbox_prefix, target, options.wait_s)
        outcomes = []
        async for outcome in run_all(rules, make_probe, _WAITS_OF_A_RULE * options.wait_s):
            print(json_line(outcome) if options.json else printable(line(outcome), lines=True), flush=True)
            outcomes.append(outcome)
    finally:
        await link.close()
    if not options.json:
        print(summary(outcomes))
    return int(any(outcome.verdict is RuleVerdict.BROKEN for outcome in outcomes))


async def _find(link: ProbeLink, names: subjects.Subjects, options: argparse.Namespace) -> ProbeTarget:
    """Returns what the models reply says about the model. Raises ValueError if no worker serves it."""
    exchange = Exchange(link.new_inbox(), msgpack=False)
    await link.subscribe(exchange.inbox, exchange.take)
    await link.publish(names.models_for(options.tenant), b"", exchange.inbox)
    try:
        reply = await exchange.first("a reply to models", _MODELS_TIMEOUT_S)
    except BrokenError as error:
        raise ValueError(f"no router answers at {connection.redact_url(options.nats)}: {error}") from error
    return _served(reply, options.model)


def _served(reply: Message, model: str | None) -> ProbeTarget:
    """Reads only what the rules need. Whether the reply follows the contract is for them to check."""
    known = {str(served.get("model")): served for served in reply.get("models") or []}
    if model is None:
        try:
            model = default_model({name: served.get("features") or () for name, served in known.items()}, "generate")
        except errors.RequestError as error:
            raise ValueError(error.error.message) from error
    if model not in known:
        raise ValueError(f"no worker serves {model!r}; served models: {', '.join(known) or 'nothing'}")
    served = known[model]
    ready = [card for card in served.get("workers") or [] if card.get("state") == "ready"]
    return ProbeTarget(
        model,
        int(served.get("context_length") or 0),
        tuple(str(card.get("worker_id")) for card in ready),
        int((reply.get("limits") or {}).get("max_request_bytes") or 0),
        int((reply.get("limits") or {}).get("max_upload_bytes") or 0),
        tuple(map(str, served.get("adapters") or [])),
    )
