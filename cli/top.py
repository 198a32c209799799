"""`tokenbus top`: the fleet as it is now, again every second."""

import argparse
import asyncio
import json
import time
from typing import NamedTuple

from rich.console import Console
from rich.live import Live
from rich.table import Table

from cli import clients
from client import Client
from protocol import errors, messages

_COLUMNS = ("worker", "model", "state", "run", "wait", "prefill", "tok/s", "KV used", "cached", "step ms")


class Row(NamedTuple):
    """One worker at one moment. Blocks are those of its KV memory."""

    worker_id: str
    model: str
    state: str
    running: int
    max_num_seqs: int
    waiting: int
    queued_prefill_tokens: int
    tokens_per_s: float
    used_blocks: int
    cached_blocks: int
    total_blocks: int
    step_age_ms: float


class Rates:
    """Tokens per second of each worker, from one look to the next."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def of(self, worker_id: str, tokens: int, now: float) -> float:
        """A counter that went back began anew: its engine was started again."""
        before, at = self._seen.get(worker_id, (tokens, now))
        self._seen[worker_id] = (tokens, now)
        return max(0, tokens - before) / (now - at) if now > at else 0.0


def rows_of(reply: messages.ModelsReply, rates: Rates, now: float) -> list[Row]:
    """The workers in order of model and name."""
    rows = []
    for served in reply.models:
        for card in sorted(served.workers or [], key=lambda card: card.worker_id):
            load = card.load or messages.Load()
            rows.append(
                Row(
                    worker_id=card.worker_id,
                    model=served.model,
                    state=card.state,
                    running=load.running,
                    max_num_seqs=card.max_num_seqs,
                    waiting=load.waiting,
                    queued_prefill_tokens=load.queued_prefill_tokens,
                    tokens_per_s=rates.of(card.worker_id, load.generated_tokens, now),
                    used_blocks=load.used_blocks,
                    cached_blocks=load.cached_blocks,
                    total_blocks=load.used_blocks + load.cached_blocks + load.free_blocks,
                    step_age_ms=load.step_age_ms,
                )
            )
    return rows


def table_of(rows: list[Row]) -> Table:
    table = Table(*_COLUMNS, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns[:3]:
        column.no_wrap = True
    for row in rows:
        table.add_row(
            row.worker_id,
            row.model,
            row.state,
            f"{row.running}/{row.max_num_seqs}",
            str(row.waiting),
            str(row.queued_prefill_tokens),
            f"{row.tokens_per_s:.0f}",
            f"{row.used_blocks}/{row.total_blocks}",
            str(row.cached_blocks),
            f"{row.step_age_ms:.0f}",
        )
    table.caption = (
        f"{sum(row.running for row in rows)} running, {sum(row.waiting for row in rows)} waiting, "
        f"{sum(row.tokens_per_s for row in rows):.0f} tokens/s"
    )
    return table


def run(options: argparse.Namespace) -> int:
    """Shows the fleet until Ctrl-C, or once; returns the exit status."""
    return clients.with_client(options, _top)


async def _top(options: argparse.Namespace, client: Client) -> int:
    rates = Rates()
    rows_of(await client.models(), rates, time.monotonic())
    await asyncio.sleep(options.every_s)
    if options.once or options.json:
        return _show_once(rows_of(await client.models(), rates, time.monotonic()), as_json=options.json)
    with Live(auto_refresh=False, screen=True) as live:
        while True:
            live.update(await _look(client, rates), refresh=True)
            await asyncio.sleep(options.every_s)


async def _look(client: Client, rates: Rates) -> Table | str:
    try:
        return table_of(rows_of(await client.models(timeout_s=2.0), rates, time.monotonic()))
    except errors.RequestError as error:
        return f"no router answers: {error.error.message}"


def _show_once(rows: list[Row], *, as_json: bool) -> int:
    if as_json:
        print(json.dumps([row._asdict() for row in rows]))
    else:
        Console().print(table_of(rows) if rows else "no model is being served")
    return 0
