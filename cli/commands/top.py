"""`tokenbus top`: the fleet as it is now, once or refreshed every second."""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import msgspec
from msgspec import UNSET
from rich.console import Console
from rich.live import Live
from rich.table import Table

from tokenbus.cli.console import arguments, connection_flags, keyboard
from tokenbus.cli.console.flags import Parser
from tokenbus.cli.console.session import with_client
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.process import signals
from tokenbus.protocol.wire import errors, limits, messages, subjects

_COLUMNS_BY_PRIORITY = (
    *("worker", "state", "run", "tok/s", "wait", "KV used", "hits", "model", "cached", "prefill"),
    *("memory", "free", "copies", "kept", "fetched", "KV held", "role", "site", "up", "step ms", "events", "expected"),
    "indexed",
)
"""Columns in the order in which they are kept when the terminal is too narrow for all."""
_GAP = 2
_LINES_AROUND = 8
"""Lines of the screen that are kept for the head of the table and for what is below it."""
_ALL_WORKERS = subjects.WorkerAddress("", "")
_WIDTH = 120


def add_flags(parser: Parser) -> None:
    flag = parser.group("display")
    flag("--interval-s", arguments.INTERVAL, "time between two updates", 1.0)
    flag("--once", arguments.SWITCH, "print one table and exit, as without a terminal")
    flag("--json", arguments.SWITCH, "print the workers as JSON and exit")
    flag("--model", arguments.NAME, "show the workers of this model only")
    connection_flags.add_flags(parser)
    parser.set_defaults(run=lambda options: with_client(options, partial(_top, options)))


class Row(NamedTuple):
    """One worker at one moment. Blocks are those of its KV cache."""

    worker_id: str
    model: str
    state: str
    role: str
    running: int
    max_num_seqs: int
    waiting: int
    queued_prefill_tokens: int
    tokens_per_s: float
    used_blocks: int
    cached_blocks: int
    total_blocks: int
    expected_blocks: int
    """Blocks that its requests use or are expected to use before they end."""
    host_blocks: int
    """Copies of blocks in host memory."""
    fetched_blocks: int
    """Blocks that came from other workers since the engine started."""
    fetched_per_s: float
    step_age_ms: float
    hit_rate: float
    """Share of all prompt tokens that were cached, since the engine started."""
    indexed_blocks: int
    """Blocks of this worker that the answering router has in its prefix index."""
    events: str
    lost_events: int
    adapters: tuple[str, ...] = ()
    """Names of its LoRA adapters."""
    kept_blocks: int = 0
    """Blocks, or checkpoints, that clients have asked to keep."""
    health: messages.WorkerHealth | None = None
    """Memory and uptime; None if the worker has not reported them yet."""
    max_running: int = 0
    """Requests that can run now, if it shares KV memory with other workers; else 0."""
    kv_pool_bytes: int = 0
    """The bytes of that memory that it holds."""
    site: str = ""


class Rates:
    """The growth per second of a counter of each worker, between two updates."""

    def __init__(self) -> None:
        self._seen: dict[subjects.WorkerAddress, tuple[int, float]] = {}

    def update(self, worker: subjects.WorkerAddress, count: int, now: float) -> float:
        """Returns the rate since the last update. It is 0 for a counter that fell, whose engine has restarted."""
        before, at = self._seen.get(worker, (count, now))
        self._seen[worker] = (count, now)
        # Counters restart at 0 together with the engine.
        return max(0, count - before) / (now - at) if now > at else 0.0


class FleetRates:
    """The counts that `rows_of` remembers between two updates."""

    def __init__(self) -> None:
        self.tokens = Rates()
        self.fetched = Rates()
        self.summary = Rates()


def rows_of(reply: messages.ModelsReply, rates: FleetRates, now: float) -> list[Row]:
    """Returns the workers, ordered by model and name."""
    rows = []
    for served in reply.models:
        for card in sorted(served.workers or [], key=lambda card: card.worker_id):
            load, watched = card.load or messages.Load(), card.watched
            rows.append(
                Row(
                    worker_id=card.worker_id,
                    model=served.model,
                    state="ejected" if watched is not None and watched.ejected else card.shown_state,
                    role=card.role,
                    site=card.site,
                    running=load.running,
                    max_num_seqs=card.max_num_seqs,
                    waiting=load.waiting,
                    queued_prefill_tokens=load.queued_prefill_tokens,
                    tokens_per_s=rates.tokens.update(card.address, load.generated_tokens, now),
                    used_blocks=load.used_blocks,
                    cached_blocks=load.cached_blocks,
                    total_blocks=load.used_blocks + load.cached_blocks + load.free_blocks,
                    expected_blocks=load.expected_blocks,
                    host_blocks=load.host_blocks,
                    kept_blocks=load.kept_blocks,
                    fetched_blocks=load.fetched_blocks,
                    fetched_per_s=rates.fetched.update(card.address, load.fetched_blocks, now),
                    step_age_ms=load.step_age_ms,
                    hit_rate=load.cached_tokens / load.prompt_tokens if load.prompt_tokens else 0.0,
                    indexed_blocks=watched.indexed_blocks if watched else 0,
                    events=watched.events if watched else "",
                    lost_events=watched.lost_events if watched else 0,
                    adapters=tuple(one.name for one in card.adapters),
                    health=card.health,
                    max_running=load.max_running,
                    kv_pool_bytes=load.kv_pool_bytes,
                )
            )
    return rows


class Totals(NamedTuple):
    """All workers, of which a table shows some."""

    counts: messages.WorkerCounts
    tokens_per_s: float
    first: int
    """Number of the first worker shown, from 0."""


def counts_text(counts: messages.WorkerCounts) -> str:
    """Describes how many workers are in which state."""
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(counts.states.items()))
    return f"{counts.workers:,} {'worker' if counts.workers == 1 else 'workers'}: {states}"


def make_table(
    rows: list[Row],
    router: messages.RouterStats | None = None,
    width: int = _WIDTH,
    totals: Totals | None = None,
) -> Table:
    """Returns a table of the workers with as many columns as fit into `width` characters; `totals` counts all workers
    if these are not all."""
    cells = [_cells(row) for row in rows]
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    shown = _columns_that_fit(cells, width)
    for name in shown:
        table.add_column(name, no_wrap=True)
    for row in cells:
        table.add_row(*(row[name] for name in shown))
    table.caption = "\n".join(_caption(rows, router, totals))
    return table


def _cells(row: Row) -> dict[str, str]:
    """Returns the texts of one row by column, from left to right."""
    return {
        "worker": row.worker_id,
        "model": row.model,
        "state": row.state,
        "role": row.role,
        "site": row.site,
        "run": f"{row.running}/{row.max_running or row.max_num_seqs}",
        "wait": str(row.waiting),
        "prefill": str(row.queued_prefill_tokens),
        "tok/s": f"{row.tokens_per_s:.0f}",
        "KV used": f"{row.used_blocks}/{row.total_blocks}",
        "KV held": size_text(row.kv_pool_bytes) if row.max_running else "",
        "expected": str(row.expected_blocks),
        "cached": str(row.cached_blocks),
        "copies": str(row.host_blocks),
        "kept": str(row.kept_blocks),
        "fetched": str(row.fetched_blocks),
        "indexed": str(row.indexed_blocks),
        "hits": f"{row.hit_rate:.0%}",
        "events": f"{row.events} -{row.lost_events}" if row.lost_events else row.events,
        "step ms": f"{row.step_age_ms:.0f}",
        **_health_cells(row.health),
    }


def _health_cells(health: messages.WorkerHealth | None) -> dict[str, str]:
    """Returns the texts about memory and uptime: the memory of both processes, what each device has left, and how long
    the engine has served."""
    if health is None:
        return {"memory": "", "free": "", "up": ""}
    return {
        "memory": size_text(health.front_bytes + health.engine_bytes),
        "free": " ".join(f"{one.name} {size_text(one.free_bytes)}" for one in health.devices),
        "up": duration_text(health.engine_uptime_s),
    }


def size_text(num_bytes: int) -> str:
    """Returns a number of bytes in a suitable unit, such as `1.5G`."""
    gib = num_bytes / 2**30
    return f"{gib:.1f}G" if gib >= 1 else f"{num_bytes / 2**20:.0f}M"


def duration_text(seconds: float) -> str:
    """Returns a time in its two largest units, such as `3d 4h`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes}m"
    return f"{minutes}m {rest}s" if minutes else f"{rest}s"


def _columns_that_fit(cells: list[dict[str, str]], width: int) -> list[str]:
    """Returns the columns that fit, from left to right, without empty ones. The workers' names always fit."""
    chosen: set[str] = set()
    left = width + _GAP  # the last column needs no gap after it
    for name in _COLUMNS_BY_PRIORITY:
        if not any(row[name] for row in cells):
            continue
        needed = max(len(text) for text in (name, *(row[name] for row in cells))) + _GAP
        if needed <= left or not chosen:
            chosen.add(name)
            left -= needed
    return [name for name in cells[0] if name in chosen] if cells else ["worker"]


def _caption(rows: list[Row], router: messages.RouterStats | None, totals: Totals | None) -> Iterator[str]:
    if totals is None:
        running, waiting = sum(row.running for row in rows), sum(row.waiting for row in rows)
        yield f"{running} running, {waiting} waiting, {sum(row.tokens_per_s for row in rows):.0f} tokens/s"
    else:
        counts = totals.counts
        yield (
            f"{totals.first + 1:,} to {totals.first + len(rows):,} of {counts_text(counts)} (arrow keys: other pages); "
            f"{counts.running:,} running, {counts.waiting:,} waiting, {totals.tokens_per_s:,.0f} tokens/s"
        )
    if copies := sum(row.host_blocks for row in rows):
        yield (
            f"{copies} blocks copied to host memory, {sum(row.fetched_blocks for row in rows)} fetched from other "
            f"workers, {sum(row.fetched_per_s for row in rows):.0f} a second"
        )
    for model, names in _adapters_by_model(rows).items():
        yield f"adapters of {model}: {', '.join(names)}"
    if router is None:
        return
    at = f" at {router.site}" if router.site else ""
    part = f" for {' '.join(router.models)}" if router.models else ""
    yield (
        f"router {router.router_id}{at}{part}: {router.decisions} placed, {router.decisions_per_s:.1f} a second "
        f"in {router.decision_p50_us:.0f} µs (p99 {router.decision_p99_us:.0f}), "
        f"{router.waiting} wait here, {router.continued} continued elsewhere; {router.indexed_blocks} blocks indexed; "
        f"cached {router.predicted_hit_rate:.0%} expected, {router.hit_rate:.0%} real, "
        f"{router.predicted_fetch_rate:.0%} to be fetched, {router.legs} prompts computed elsewhere"
    )
    if router.uploads:
        mebibytes = router.upload_bytes / 2**20
        yield f"{router.uploads} large requests arriving in parts, of which {mebibytes:.1f} MiB came"
    for refused in router.refused_cards:
        yield f"refused: {refused.worker_id} of {refused.model}: {refused.reason}"


def _adapters_by_model(rows: list[Row]) -> dict[str, list[str]]:
    """Returns the names of each model's adapters; a worker that lacks one is named after it."""
    found: dict[str, list[str]] = {}
    for model in dict.fromkeys(row.model for row in rows):
        workers = [row for row in rows if row.model == model]
        for name in sorted({name for row in workers for name in row.adapters}):
            lacking = [row.worker_id for row in workers if name not in row.adapters]
            found.setdefault(model, []).append(f"{name} (not at {', '.join(lacking)})" if lacking else name)
    return found


async def _top(options: argparse.Namespace, client: WireClient) -> int:
    rates = FleetRates()
    if options.once or options.json or not _is_screen():
        rows_of(await client.models(model=options.model), rates, time.monotonic())  # rates need two readings
        await asyncio.sleep(options.interval_s)
        return _show_once(await client.models(model=options.model), rates, as_json=options.json)
    left = asyncio.Event()
    live = Live(auto_refresh=False, screen=True)
    pages = _Pages(client, options.model)
    with keyboard.watched(live, left.set, pages.press), contextlib.suppress(signals.StoppedError):
        await signals.unless_stopped(left, _watch(pages, rates, live, options.interval_s))
    return 0


class _Pages:
    """The pages of a fleet, as many workers each as fit on the screen, of which one is shown."""

    def __init__(self, client: WireClient, model: str | None) -> None:
        self._client = client
        self._model = model
        self._before: list[tuple[str | None, int]] = [(None, 0)]
        """Where the pages up to the one that is shown begin: `after`, and the number of workers before."""
        self._next: tuple[str, int] | None = None
        """The same of the page after it, if there is one."""
        self.turned = asyncio.Event()
        """Set when another page is to be shown."""

    def press(self, key: bytes) -> None:
        """Turns the page, if the key does that."""
        if key in keyboard.FORWARD and self._next is not None:
            self._before.append(self._next)
        elif key in keyboard.BACKWARD and len(self._before) > 1:
            self._before.pop()
        else:
            return
        self._next = None
        self.turned.set()

    async def table(self, rates: FleetRates, width: int, height: int) -> Table | str:
        """Returns the table of a page that fits on the screen. Raises RequestError."""
        after, first = self._before[-1]
        limit = min(max(1, height - _LINES_AROUND), limits.MAX_PAGE_WORKERS)
        asked = messages.ModelsRequest(model=self._model, after=after, limit=limit)
        page = await self._client.models_page(asked, timeout_s=2.0)
        whole = page if after is None else await self._client.models(2.0, model=self._model, with_workers=False)
        now, rows = time.monotonic(), rows_of(page, rates, time.monotonic())
        if not rows and after is not None:  # the last workers have left
            self._before = [(None, 0)]
            self.turned.set()
        self._next = (page.next, first + len(rows)) if page.next is not UNSET else None
        counts, totals = whole.summary, None
        if counts is not UNSET and counts.workers > len(rows):
            rate = rates.summary.update(_ALL_WORKERS, counts.generated_tokens, now)
            totals = Totals(counts, rate, first)
        return make_table(rows, whole.router or None, width, totals)


def _is_screen() -> bool:
    """Whether standard output shows a table that is drawn again and again. In a pipe or a file it would not appear."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


async def _watch(pages: _Pages, rates: FleetRates, live: Live, interval_s: float) -> None:
    while True:
        pages.turned.clear()
        try:
            shown = await pages.table(rates, live.console.width, live.console.height)
        except errors.RequestError as error:
            shown = f"no router answers: {error.error.message}"
        live.update(shown, refresh=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await pages.turned.wait()


def _show_once(reply: messages.ModelsReply, rates: FleetRates, *, as_json: bool) -> int:
    rows = rows_of(reply, rates, time.monotonic())
    if as_json:
        print(msgspec.json.encode([row._asdict() for row in rows]).decode())
    else:
        width = max(_WIDTH, Console().width)
        shown = make_table(rows, reply.router or None, width) if rows else "no model is being served"
        Console(width=width).print(shown)
    return 0
