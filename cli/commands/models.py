"""`tokenbus models`: the models that are served and what each worker has, or the models of this machine."""

import argparse
from collections.abc import Iterator
from functools import partial

from msgspec import UNSET

from tokenbus.cli.console import arguments, connection_flags, hub_flags, text_table
from tokenbus.cli.console.amounts import counts_text, duration_text, size_text
from tokenbus.cli.console.flags import Parser, UsageError
from tokenbus.cli.console.plain_text import printable
from tokenbus.cli.console.session import print_error, with_client
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol import extras
from tokenbus.protocol.wire import codec, messages

_FETCH = "fetch"


def add_flags(parser: Parser) -> None:
    text = f"{_FETCH} fetches small models by their names; without a name it lists those that there are"
    parser.add_argument("words", nargs="*", metavar=f"{_FETCH} [NAME]", help=text)
    flag = parser.group("served models")
    flag("--json", arguments.SWITCH, "print the router's answer as JSON")
    flag("--model", arguments.NAME, "list this model only")
    flag("--summary", arguments.SWITCH, "list the models with counts of their workers, not the workers")
    flag = parser.group("models of this machine")
    flag("--local", arguments.SWITCH, "list the models in its Hub cache, and fetched ones, instead")
    flag("--remove", arguments.NAME, "remove org/repo, org/repo:QUANTIZATION, a conversion or a fetched model")
    flag.add(hub_flags.HUB_CACHE)
    connection_flags.add_flags(parser)
    parser.set_defaults(run=lambda options: _run(parser.prog, options))


def _run(prog: str, options: argparse.Namespace) -> int:
    if options.words:
        return _fetch(prog, options)
    if options.local or options.remove:
        extras.require("worker-core", f"models {'--remove' if options.remove else '--local'}")
        from tokenbus.cli.commands import pull

        return pull.run_local(options)
    return with_client(options, partial(_list, options))


def _fetch(prog: str, options: argparse.Namespace) -> int:
    """Raises UsageError."""
    do, *names = options.words
    if do != _FETCH:
        raise UsageError(prog, f"has no action {do}, only {_FETCH}; --model NAME lists one served model")
    extras.require("worker-core", f"models {_FETCH}")
    from tokenbus.cli.commands import fetch

    if problem := hub_flags.apply(options):
        return print_error(problem)
    return fetch.run(names)


def health_text(health: messages.WorkerHealth) -> str:
    """Describes the memory of a worker's processes, its devices and their free memory, and its uptime."""
    devices = []
    for device in health.devices:
        layers = f"{device.layers} layers" if device.layers is not None else ""
        about = ", ".join(filter(None, (device.description, layers)))
        left = f"{size_text(device.free_bytes)} of {size_text(device.total_bytes)} free"
        devices.append(f"{device.name}{about and f' ({about})'} {left}")
    engine = f", engine for {duration_text(health.engine_uptime_s)}" if health.engine_uptime_s else ", no engine"
    taken = f"takes {size_text(health.front_bytes + health.engine_bytes)}"
    return "; ".join([taken, *devices, f"up for {duration_text(health.uptime_s)}{engine}"])


def adapters_of(served: messages.ServedModel) -> Iterator[str]:
    """Yields the names that a model has with each of its adapters, and the workers that lack it."""
    for adapter in served.adapters:
        has_it = {card.worker_id: adapter in [one.name for one in card.adapters] for card in served.workers or []}
        lacking = ", ".join(sorted(worker for worker, has in has_it.items() if not has))
        yield f"{served.model}:{adapter}" + (f" (not at {lacking})" if lacking else "")


async def _list(options: argparse.Namespace, client: WireClient) -> int:
    reply = await client.models(model=options.model, with_workers=not options.summary)
    if options.json:
        print(codec.encode(reply, codec.Encoding.JSON).decode())
        return 0
    rows = _summary_rows(reply.models) if options.summary else _worker_rows(reply.models)
    shown = [tuple(map(printable, row)) for row in rows]
    numbers = (1, len(shown[0]) - 2, len(shown[0]) - 1)
    print(text_table.text_of(shown, numbers) if reply.models else "no model is being served")
    for line in _lines(reply):
        print(printable(line))
    return 0


def _lines(reply: messages.ModelsReply) -> Iterator[str]:
    """Yields what is printed below the table."""
    if reply.summary is not UNSET:
        yield counts_text(reply.summary)
    for served in reply.models:
        yield f"features of {served.model}: {' '.join(served.features)}"
        if served.adapters:
            yield f"adapters of {served.model}: {', '.join(adapters_of(served))}"
        made = {str(card.embeddings) for card in served.workers or [] if card.embeddings is not None}
        for text in sorted(made):
            yield f"embeddings of {served.model}: {text}"
    for served in reply.models:
        for card in sorted(served.workers or [], key=lambda card: card.worker_id):
            if card.health is not None:
                yield f"{card.worker_id}: {health_text(card.health)}"
    for refused in reply.router.refused_cards if reply.router else []:
        yield f"refused: {refused.worker_id} of {refused.model}: {refused.reason}"


def _summary_rows(models: list[messages.ServedModel]) -> Iterator[tuple[str, ...]]:
    yield ("model", "context", "engine", "workers", "running", "waiting")
    for served in models:
        counts = served.summary or messages.WorkerCounts(workers=0, states={}, running=0, waiting=0, generated_tokens=0)
        engines = ", ".join(served.engines or [])
        numbers = (counts_text(counts), str(counts.running), str(counts.waiting))
        yield (served.model, str(served.context_length), engines, *numbers)


def _worker_rows(models: list[messages.ServedModel]) -> Iterator[tuple[str, ...]]:
    yield ("model", "context", "worker", "state", "engine", "running", "waiting")
    for served in models:
        about = (served.model, str(served.context_length))
        for card in sorted(served.workers or [], key=lambda card: card.worker_id):
            load = card.load or messages.Load()
            is_silent = card.watched is not None and card.watched.events == "silent"
            state = f"{card.state}, events silent" if is_silent else card.shown_state
            yield (*about, card.worker_id, state, card.engine, str(load.running), str(load.waiting))
        if not served.workers:
            yield (*about, "", "", "", "", "")
