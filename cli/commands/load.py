"""`tokenbus load` and `unload`: an operator's control messages to a running worker."""

import argparse
import json
import sys
from functools import partial
from typing import Any

from tokenbus.cli.console import arguments, connection_flags, worker_control
from tokenbus.cli.console.flags import Parser
from tokenbus.cli.console.plain_text import printable
from tokenbus.cli.console.session import print_error, print_request_error, with_client
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import internal
from tokenbus.worker.settings import adapter_settings


def _engine_setting(text: str) -> tuple[str, Any]:
    """Parses NAME=VALUE; a value that is not JSON is taken as a string."""
    name, _, value = text.partition("=")
    if not name or not value:
        raise ValueError
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


_ADAPTER = arguments.ArgumentType(adapter_settings.parse, "", "NAME=PATH[@TENANT,...]")
_SETTING = arguments.ArgumentType(_engine_setting, "a setting and its value", "NAME=VALUE")


def add_flags(parser: Parser) -> None:
    parser.add_argument("worker_id", metavar="WORKER", help="the worker whose process is to load the model")
    parser.add_argument(
        "source", metavar="MODEL", nargs="?", help="file, directory or Hub name, as that worker sees it"
    )
    flag = parser.group("what to load")
    flag("--lora", _ADAPTER, "load this LoRA adapter into the worker's own model, and no other model")
    flag("--served-name --served-model-name", arguments.NAME, "name that clients request", unset="the file's name")
    flag("--replicas", arguments.whole(1), "replicas sharing its weights", 1)
    flag("--set", _SETTING, "engine setting that differs from the worker's own, e.g. context-length=2048", [])
    connection_flags.add_flags(parser)
    parser.set_defaults(run=lambda options: with_client(options, partial(_load, options)))


def add_unload_flags(parser: Parser) -> None:
    parser.add_argument("worker_id", metavar="WORKER", help="the worker to unload")
    flag = parser.group("what to unload")
    flag("--lora", arguments.NAME, "only this LoRA adapter", unset="the whole worker")
    connection_flags.add_flags(parser)
    parser.set_defaults(run=lambda options: with_client(options, partial(_unload, options)))


async def _load(options: argparse.Namespace, client: WireClient) -> int:
    if (options.source is None) is (options.lora is None):
        return print_error("name either a MODEL or an adapter with --lora")
    if options.lora is not None:
        adapter, path, tenants = options.lora
        control = internal.Control(
            op="load_adapter", adapter=adapter, path=path, tenants=None if tenants is None else list(tenants)
        )
        done = f"{options.worker_id} has the adapter {adapter}"
        return await worker_control.carry_out(client, options.worker_id, control, done)
    control = internal.Control(
        op="load",
        model=options.source,
        served_name=options.served_name,
        replicas=options.replicas,
        settings=dict(options.set),
    )
    async for reply in worker_control.ask(client, options.worker_id, control):
        if not reply.ok:
            assert reply.error is not None
            return await print_request_error(client, None, reply.error)
        if reply.worker_ids:
            print(printable(f"serving as {', '.join(reply.worker_ids)}"))
            return 0
        if reply.progress is not None and sys.stderr.isatty():
            print(f"\rloading {reply.progress:.0%} ", end="", file=sys.stderr, flush=True)
    return print_error("the worker stopped answering")


async def _unload(options: argparse.Namespace, client: WireClient) -> int:
    worker = options.worker_id
    if options.lora is not None:
        control = internal.Control(op="unload_adapter", adapter=options.lora)
        done = f"{worker} takes no new requests for the adapter {options.lora}"
        return await worker_control.carry_out(client, worker, control, done)
    then = "leaves, or stays loadable if its model is loaded on demand"
    done = f"{worker} accepts no new requests; when its running ones have ended or moved it {then}"
    return await worker_control.carry_out(client, worker, internal.Control(op="unload"), done)
