"""`tokenbus bench`: puts load on a running system, point by point, and reports what its clients see."""

import argparse
import asyncio
import datetime
import sys
import time
from collections.abc import Coroutine
from functools import partial
from pathlib import Path

from rich.console import Console

from tokenbus.cli.console import connection_flags, load_flags, session
from tokenbus.cli.console.flags import Parser
from tokenbus.cli.console.load_flags import TO_STANDARD_OUTPUT, plan_of
from tokenbus.cli.console.plain_text import printable
from tokenbus.cli.console.session import EXIT_INTERRUPTED, with_client
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol import tasks
from tokenbus.protocol.process import signals
from tokenbus.protocol.telemetry import logs
from tokenbus.replay.load.measure import measure, warm_up
from tokenbus.replay.load.page import page
from tokenbus.replay.load.points import Plan
from tokenbus.replay.load.results import LoadReport, RunResult, as_json, summarize
from tokenbus.replay.load.stats import RunStats
from tokenbus.replay.load.table import run_lines, run_table, sweep_table
from tokenbus.replay.load.workload import FittedWorkload


def add_flags(parser: Parser) -> None:
    load_flags.add_flags(parser)
    connection_flags.add_flags(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Returns the exit status: 0 if at least one request of every run finished without an error. Raises ValueError."""
    plan = plan_of(options)
    logs.log_errors_only()
    return with_client(options, partial(_bench, options, plan))


async def _bench(options: argparse.Namespace, plan: Plan, client: WireClient) -> int:
    model = await session.model_of(options, client, "generate")
    return await Bench(plan._replace(model=model), client).run()


class Bench:
    """A sweep over the points of a plan."""

    def __init__(self, plan: Plan, client: WireClient) -> None:
        self._plan = plan
        self._client = client
        self._runs: list[RunResult] = []
        self._stats: list[RunStats] = []
        to_stderr = plan.json == TO_STANDARD_OUTPUT
        self._console = Console(stderr=to_stderr, highlight=False, soft_wrap=True)

    def __repr__(self) -> str:
        return f"<Bench of {self._plan.model}, {len(self._runs)} of {len(self._plan.points)} runs done>"

    async def run(self) -> int:
        began_at = datetime.datetime.now(datetime.UTC)
        fitted = await self._fit()
        is_interrupted = await _interrupted(self._measure_all(fitted))
        if not self._runs:
            return EXIT_INTERRUPTED
        self._finish(self._report(fitted, began_at))
        if is_interrupted:
            return EXIT_INTERRUPTED
        return 0 if all(run.finished for run in self._runs) else 1

    async def _fit(self) -> FittedWorkload:
        """Returns the workload fitted to the context of the model. Raises ValueError if no worker serves it."""
        plan = self._plan
        served = {one.model: one for one in (await self._client.models(with_workers=False)).models}
        if plan.model not in served:
            known = ", ".join(served) or "nothing"
            raise ValueError(f"no worker serves {plan.model!r}; served models: {known}")
        fitted = plan.workload.fit(served[plan.model].context_length, clip=plan.clip)
        for count, what in ((fitted.skipped, "left out"), (fitted.clipped, "cut")):
            if count:
                print(f"{count} requests are longer than the model's context and were {what}", file=sys.stderr)
        return fitted

    async def _measure_all(self, fitted: FittedWorkload) -> None:
        for number, point in enumerate(self._plan.points):
            await warm_up(self._client, self._plan, fitted.workload, point)
            stats = RunStats(time.monotonic())
            is_done = False
            try:
                await measure(self._client, self._plan, fitted.workload, point, number, stats)
                is_done = True
            finally:
                self._stats.append(stats)
                self._runs.append(summarize(point, stats, interrupted=not is_done))
                self._print(self._runs[-1])

    def _print(self, run: RunResult) -> None:
        self._console.print(f"[bold]{run.point}[/bold]")
        self._console.print(run_table(run))
        for line in run_lines(run):
            self._console.print(printable(line), markup=False)
        self._console.print()

    def _report(self, fitted: FittedWorkload, began_at: datetime.datetime) -> LoadReport:
        return LoadReport(
            model=self._plan.model,
            workload=fitted.workload.describe(),
            began_at=began_at.isoformat(timespec="seconds"),
            seed=self._plan.seed,
            temperature=self._plan.temperature,
            skipped=fitted.skipped,
            clipped=fitted.clipped,
            runs=self._runs,
        )

    def _finish(self, report: LoadReport) -> None:
        """Prints and writes the results. Raises ValueError for a file that can't be written."""
        if len(self._runs) > 1:
            self._console.print(sweep_table(self._runs))
        if self._plan.json == TO_STANDARD_OUTPUT:
            print(as_json(report).decode(), end="")
        elif self._plan.json:
            _write(self._plan.json, as_json(report))
        if self._plan.html:
            _write(self._plan.html, page(report, [stats.times for stats in self._stats]).encode())


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise ValueError(f"{path} can't be written: {error.strerror}") from error


async def _interrupted(work: Coroutine[None, None, None]) -> bool:
    """Runs `work`; returns whether Ctrl-C or SIGTERM interrupted it."""
    task = tasks.awaited(work)
    with signals.on_stop(task.cancel):
        try:
            await task
        except asyncio.CancelledError:
            return True
    return False
