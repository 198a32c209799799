"""`tokenbus stop` and `drain`: an operator ends one request, or all of a worker's, with what was generated so far."""

import argparse
import contextlib
from functools import partial

from tokenbus.cli.console import arguments, connection_flags, worker_control
from tokenbus.cli.console.flags import Parser
from tokenbus.cli.console.session import print_error, print_request_error, with_client
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import errors, internal, subjects


def _key(text: str) -> str:
    key = text if ":" in text else subjects.request_key(subjects.DEFAULT_TENANT, text)
    if not subjects.is_request_key(key):
        raise ValueError
    return key


_KEY = arguments.ArgumentType(
    _key, "an id of 1 to 128 of A-Za-z0-9_-, optionally after TENANT: in subject form", "[TENANT:]ID"
)


def add_stop_flags(parser: Parser) -> None:
    text = "the request, as the logs name it; without a tenant, of the default one"
    parser.add_argument("key", type=_KEY.__call__, metavar=_KEY.metavar, help=text)
    connection_flags.add_flags(parser)
    parser.set_defaults(run=lambda options: with_client(options, partial(_stop, options)))


def add_drain_flags(parser: Parser) -> None:
    parser.add_argument("worker_id", metavar="WORKER", help="the worker to drain")
    grace, then = parser.group("grace"), parser.group("what then (one of these)", exclusive=True)
    text = "seconds that its running requests have to finish; a later drain changes it"
    grace("--grace-s", arguments.SECONDS, text, unset="the worker's --grace-s")
    text = "seconds that routers have to move the others to other workers"
    then("--handover-s", arguments.SECONDS, text, unset="the worker's --handover-s")
    then("--stop", arguments.SWITCH, "end the others with what was generated, and move none, like --handover-s 0")
    connection_flags.add_flags(parser)
    parser.set_defaults(run=lambda options: with_client(options, partial(_drain, options)))


async def _stop(options: argparse.Namespace, client: WireClient) -> int:
    """Asks every worker, since only the one that runs a request knows it."""
    workers = [card.address for card in await worker_control.cards(client)]
    refusals: list[errors.Error] = []
    control = internal.Control(op="stop", request_id=options.key)
    async with contextlib.aclosing(client.command_workers(workers, control)) as replies:
        async for worker, reply in replies:
            if reply.ok:
                print(f"{worker.worker_id} has ended {options.key} with what it had generated")
                return 0
            is_elsewhere = reply.error is None or reply.error.param == "request_id"
            if reply.error is not None and not is_elsewhere and reply.error.code is not errors.Code.NO_WORKER:
                refusals.append(reply.error)
    for refusal in refusals[:1]:
        return await print_request_error(client, None, refusal)
    return print_error(f"no worker runs {options.key}: it has ended, or no worker has it yet")


async def _drain(options: argparse.Namespace, client: WireClient) -> int:
    handover_s = 0.0 if options.stop else options.handover_s
    control = internal.Control(op="drain", grace_s=options.grace_s, handover_s=handover_s)
    then = "stopped" if handover_s == 0 else "moved"
    done = f"{options.worker_id} accepts no new requests, and leaves when its running ones have ended or been {then}"
    return await worker_control.carry_out(client, options.worker_id, control, done)
