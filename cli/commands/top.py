"""`tokenbus top`: the fleet as it is now, once or refreshed every second."""

import argparse
import asyncio
import contextlib
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tokenbus.cli.console import arguments, connection_flags, keyboard
from tokenbus.cli.console.amounts import duration_text, size_text
from tokenbus.cli.console.flags import Parser
from tokenbus.cli.console.plain_text import cells, printable
from tokenbus.cli.console.session import with_client
from tokenbus.client.wire.fleet_picture import FleetPicture
from tokenbus.client.wire.fleet_viewer import FleetViewer
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.process import signals
from tokenbus.protocol.wire import errors, messages

_COLUMNS_BY_PRIORITY = (
    *("worker", "state", "run", "tok/s", "wait", "KV used", "hits", "model", "cached", "prefill"),
    *("memory", "free", "copies", "kept", "fetched", "KV held", "role", "site", "up", "token ms", "step ms", "events"),
    *("expected", "indexed"),
)
"""Columns in the order in which they are kept when the terminal is too narrow for all."""
_GAP = 2
_LINES_AROUND = 8
"""Lines of the screen that are kept for the head of the table and for what is below it."""
_WIDTH = 120
_MIB = 1 << 20
_FIRST_LOOK_S = 0.1
_UNSEEN = (
    "no router answers, or this user may not publish to `fleet` of this tenant: pass the tenant that it may, such as "
    "--tenant operator"
)
_LATE_S = 15.0
"""Usage that is not saved for this long is shown: routers save it every few seconds."""
_LATE_RECORDS = 1_024
_MAX_LIMITS = 4
"""Limits that are shown."""
_PATIENCE_S = 5.0
"""Time for the first two digests."""


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
    step_age_ms: float
    token_ms: float
    """Milliseconds from one token of a stream to the next, at its best; 0 while unknown."""
    hit_rate: float
    """Share of all prompt tokens that were cached, since the engine started."""
    indexed_blocks: int
    """Blocks of this worker that the answering router has in its prefix index."""
    events: str
    lost_events: int
    kept_blocks: int = 0
    """Blocks, or checkpoints, that clients have asked to keep."""
    memory: messages.WorkerMemory | None = None
    """Memory and the engine's start; None if the worker has not reported them yet."""
    since_ms: int = 0
    """Unix time in ms at which its frontend started."""
    max_running: int = 0
    """Requests that can run now, if it shares KV memory with other workers; else 0."""
    kv_pool_bytes: int = 0
    """The bytes of that memory that it holds."""
    site: str = ""


def rows_of(picture: FleetPicture, model: str | None = None) -> list[Row]:
    """Returns the workers of a model, or all, ordered by model and name."""
    return [_row(*view) for view in picture.workers() if model in (None, view.sheet.model)]


def _row(sheet: messages.WorkerSheet, numbers: messages.WorkerNumbers, memory: messages.WorkerMemory | None) -> Row:
    return Row(
        worker_id=sheet.worker_id,
        model=sheet.model,
        state=numbers.state,
        role=sheet.role,
        site=sheet.site,
        running=numbers.running,
        max_num_seqs=sheet.max_num_seqs,
        waiting=numbers.waiting,
        queued_prefill_tokens=numbers.queued_prefill_tokens,
        tokens_per_s=numbers.tokens_per_s,
        used_blocks=numbers.used_blocks,
        cached_blocks=numbers.cached_blocks,
        total_blocks=numbers.total_blocks,
        expected_blocks=numbers.expected_blocks,
        host_blocks=numbers.host_blocks,
        kept_blocks=numbers.kept_blocks,
        fetched_blocks=numbers.fetched_blocks,
        step_age_ms=numbers.step_age_ms,
        token_ms=numbers.token_ms,
        hit_rate=numbers.hit_rate,
        indexed_blocks=numbers.indexed_blocks,
        events=numbers.events,
        lost_events=numbers.lost_events,
        memory=memory,
        since_ms=sheet.since_ms,
        max_running=numbers.max_running if numbers.kv_pool_bytes else 0,
        kv_pool_bytes=numbers.kv_pool_bytes,
    )


def make_table(
    rows: list[Row],
    routers: Sequence[messages.RouterStats] = (),
    width: int = _WIDTH,
    *,
    first: int = 0,
    most: int | None = None,
    limits: Sequence[messages.ClientLimits] = (),
) -> Table:
    """Returns a table of the workers from `first` on, at most `most`, with as many columns as fit into `width`
    characters; below it are the sums of all."""
    page = rows[first:] if most is None else rows[first : first + most]
    rows_of_cells = [{name: printable(text) for name, text in _cells(row).items()} for row in page]
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    shown = _columns_that_fit(rows_of_cells, width)
    for name in shown:
        table.add_column(name, no_wrap=True)
    for row in rows_of_cells:
        table.add_row(*cells(*(row[name] for name in shown)))
    about_routers = itertools.chain(*map(_router_lines, routers))
    told = limits[:_MAX_LIMITS]
    lines = (*_sums(rows, first, len(page)), *about_routers, *map(limits_text, told))
    table.caption = Text("\n".join(map(printable, lines)))
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
        "token ms": f"{row.token_ms:.0f}" if row.token_ms else "",
        "step ms": f"{row.step_age_ms:.0f}",
        **_memory_cells(row),
    }


def _memory_cells(row: Row) -> dict[str, str]:
    """Returns the texts about memory and uptime: the memory of both processes, what each device has left, and how long
    the engine has served."""
    memory = row.memory
    if memory is None:
        return {"memory": "", "free": "", "up": ""}
    return {
        "memory": size_text((memory.front_mib + memory.engine_mib) * _MIB),
        "free": " ".join(f"{name} {size_text(free_mib * _MIB)}" for name, _, free_mib in memory.devices),
        "up": duration_text(max(0.0, time.time() - row.since_ms / 1e3 - memory.engine_since_s)),
    }


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


def _sums(rows: list[Row], first: int, num_shown: int) -> Iterator[str]:
    """Yields the lines about all workers, of which some are shown."""
    work = (
        f"{sum(row.running for row in rows):,} running, {sum(row.waiting for row in rows):,} waiting, "
        f"{sum(row.tokens_per_s for row in rows):,.0f} tokens/s"
    )
    if num_shown < len(rows):
        states = Counter(row.state for row in rows)
        counted = ", ".join(f"{count:,} {state}" for state, count in sorted(states.items()))
        shown = f"{first + 1:,} to {first + num_shown:,} of {len(rows):,} workers: {counted}"
        work = f"{shown} (arrow keys: other pages); {work}"
    yield work
    if copies := sum(row.host_blocks for row in rows):
        fetched = sum(row.fetched_blocks for row in rows)
        yield f"{copies} blocks copied to host memory, {fetched} fetched from other workers"


def _router_lines(router: messages.RouterStats) -> Iterator[str]:
    """Yields the lines about one router."""
    at = f" at {router.site}" if router.site else ""
    part = f" for {' '.join(router.models)}" if router.models else ""
    yield (
        f"router {router.router_id}{at}{part}: {router.decisions} placed, {router.decisions_per_s:.1f} a second "
        f"in {router.decision_p50_us:.0f} µs (p99 {router.decision_p99_us:.0f}), "
        f"{router.waiting} wait here, {router.continued} continued elsewhere, "
        f"{router.passed_on} cancels and resyncs passed on; {router.indexed_blocks} blocks indexed; "
        f"cached {router.predicted_hit_rate:.0%} expected, {router.hit_rate:.0%} real, "
        f"{router.predicted_fetch_rate:.0%} to be fetched, {router.legs} prompts computed elsewhere"
    )
    if router.uploads:
        mebibytes = router.upload_bytes / 2**20
        yield f"{router.uploads} large requests arriving in parts, of which {mebibytes:.1f} MiB came"
    if router.throttled:
        yield f"{router.throttled:,} requests refused by limits in the last minute"
    if router.shares_limits:
        yield "limits are shared out evenly: the bucket by which they hold across routers can't be reached"
    if router.usage_unsaved_s > _LATE_S:
        problem = f": {router.usage_problem}" if router.usage_problem else ""
        yield f"usage of the last {duration_text(router.usage_unsaved_s)} is not saved{problem}"
    if router.audit_queued > _LATE_RECORDS or router.audit_lost:
        yield f"audit log: {router.audit_queued:,} records wait, {router.audit_lost:,} were lost"
    for refused in router.refused_cards:
        yield f"refused: {refused.worker_id} of {refused.model}: {refused.reason}"


def limits_text(limits: messages.ClientLimits) -> str:
    """Describes what a tenant or a key has left of its limits."""
    told = limits.rate_limits or messages.RateLimits()
    parts = [
        f"{one.remaining:,} of {one.limit:,} {unit} left"
        for unit, one in (("requests", told.requests), ("tokens", told.tokens))
        if one is not None
    ]
    if limits.max_open:
        parts.append(f"{limits.open} of {limits.max_open} open")
    if limits.refused:
        parts.append(f"{limits.refused:,} refused in the last minute")
    return f"limits of {f'key {limits.key_id}' if limits.key_id else f'tenant {limits.tenant}'}: {', '.join(parts)}"


async def _top(options: argparse.Namespace, client: WireClient) -> int:
    async with client.view_fleet() as viewer:
        if options.once or options.json or not _is_screen():
            return await _show_once(viewer, options)
        left = asyncio.Event()
        live = Live(auto_refresh=False, screen=True)
        pages = _Pages()
        with keyboard.watched(live, left.set, pages.press), contextlib.suppress(signals.StoppedError):
            await signals.unless_stopped(left, _watch(viewer, pages, live, options))
    return 0


class _Pages:
    """The pages of a fleet, as many workers each as fit on the screen, of which one is shown."""

    def __init__(self) -> None:
        self.first = 0
        """The number of the first worker shown."""
        self.turned = asyncio.Event()
        """Set when another page is to be shown."""
        self._num_workers = self._most = 0

    def press(self, key: bytes) -> None:
        """Turns the page, if the key does that."""
        if key in keyboard.FORWARD and self.first + self._most < self._num_workers:
            self.first += self._most
        elif key in keyboard.BACKWARD and self.first:
            self.first = max(0, self.first - self._most)
        else:
            return
        self.turned.set()

    def table(
        self,
        rows: list[Row],
        routers: Sequence[messages.RouterStats],
        width: int,
        height: int,
        limits: Sequence[messages.ClientLimits] = (),
    ) -> Table:
        """Returns the table of the page that fits on the screen."""
        self._num_workers, self._most = len(rows), max(1, height - _LINES_AROUND)
        if self.first >= len(rows):  # the last workers have left
            self.first = 0
        return make_table(rows, routers, width, first=self.first, most=self._most, limits=limits)


def _is_screen() -> bool:
    """Whether standard output shows a table that is drawn again and again. In a pipe or a file it would not appear."""
    return sys.stdout.isatty() and not Console().is_dumb_terminal


async def _watch(viewer: FleetViewer, pages: _Pages, live: Live, options: argparse.Namespace) -> None:
    while True:
        pages.turned.clear()
        shown: Table | Text = Text(f"the fleet can't be seen: {printable(viewer.problem or _UNSEEN)}")
        if viewer.picture.is_complete and not viewer.problem:
            rows = rows_of(viewer.picture, options.model)
            routers = viewer.picture.routers()
            width, height = live.console.width, live.console.height
            shown = pages.table(rows, routers, width, height, viewer.picture.limits())
            if not rows:
                shown = _no_workers(options.model)
        live.update(shown, refresh=True)
        # at the start, and after a loss, the first digest is shown at once
        interval_s = options.interval_s if viewer.picture.is_complete else _FIRST_LOOK_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(interval_s):
                await pages.turned.wait()


def _to_json(row: Row) -> dict[str, object]:
    memory = row.memory and msgspec.structs.asdict(row.memory)
    return row._asdict() | {"memory": memory}


def _no_workers(model: str | None) -> Text:
    return Text("no model is being served" if model is None else f"no worker serves the model {printable(model)}")


async def _show_once(viewer: FleetViewer, options: argparse.Namespace) -> int:
    """Prints the fleet after two digests, since rates need two."""
    until = time.monotonic() + _PATIENCE_S
    while not viewer.picture.is_complete:
        await _next_digest(viewer, until)
    viewer.changed.clear()
    await _next_digest(viewer, until)
    rows = rows_of(viewer.picture, options.model)
    if options.json:
        print(msgspec.json.encode([_to_json(row) for row in rows]).decode())
    else:
        width = max(_WIDTH, Console().width)
        picture = viewer.picture
        table = make_table(rows, picture.routers(), width, limits=picture.limits())
        shown = table if rows else _no_workers(options.model)
        Console(width=width).print(shown)
    return 0


async def _next_digest(viewer: FleetViewer, until: float) -> None:
    """Waits for a digest until a moment of the monotonic clock. Raises RequestError(no_worker) if none comes."""
    try:
        async with asyncio.timeout(until - time.monotonic()):
            await viewer.changed.wait()
    except TimeoutError as error:
        reason = viewer.problem or _UNSEEN
        raise errors.request_error(errors.Code.NO_WORKER, reason) from error
    viewer.changed.clear()
