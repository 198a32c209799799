"""Measures what four tenants with limits of 8, 4, 2 and 1 shares get of a fleet with a quarter of what they ask for.

Run: .venv/bin/python -m bench.router.shares [--seconds 60] [--over 4]

A broker with JetStream, two routers, and two simulated workers whose capacity is the sum of the limits; 16 clients,
four of each tenant, each of which asks for a sixteenth of `--over` times that, and does not wait for answers."""

import asyncio
import collections
import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from bench import flags, system
from tokenbus.cli.console import nats_server
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol.wire import messages

SHARES = {"a": 8, "b": 4, "c": 2, "d": 1}
_TOKENS_PER_SHARE = 1_200
"""Tokens a minute: all shares are the 300 a second of two workers, each with 8 sequences and 20 steps a second."""
_ANSWER = 10
_WARM_UP_S = 12.0
"""Until routers lease from a new bucket."""


class Tally:
    def __init__(self) -> None:
        self.tokens: collections.Counter[str] = collections.Counter()
        self.ends: collections.Counter[str] = collections.Counter()
        self.ended_at: dict[str, list[float]] = {tenant: [] for tenant in SHARES}
        self.sent = 0


@contextlib.asynccontextmanager
async def _fleet() -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as name:
        folder = Path(name)
        nats = await nats_server.start(0, folder / "nats.log", store=folder / "store")
        limits = [f"--tenant-limit-for={tenant}=0,0,{_TOKENS_PER_SHARE * share}" for tenant, share in SHARES.items()]
        worker = ("worker", "--nats", nats.url, "--engine", "sim", "--model", "steps-of-50ms", "--served-name", "m")
        processes = [system.start(folder / f"router{n}.log", "router", "--nats", nats.url, *limits) for n in (1, 2)]
        processes += [system.start(folder / f"worker{n}.log", *worker, "--max-num-seqs", "8") for n in (1, 2)]
        try:
            async with await WireClient.connect(nats.url) as client:
                await system.cards(client, 2)
            yield nats.url
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.wait(timeout=60)
            nats.stop()


async def _ask(client: WireClient, tenant: str, tally: Tally, measured: tuple[float, float]) -> None:
    request = messages.GenerateRequest(token_ids=[1, 2, 3, 4, 5, 6, 7, 8, 9, 10], max_tokens=_ANSWER, ignore_eos=True)
    async for chunk in client.generate("m", request):
        if chunk.finish_reason is not None and measured[0] <= time.monotonic() < measured[1]:
            tally.ends[str(chunk.error.code if chunk.error else chunk.finish_reason)] += 1
            if chunk.usage and not chunk.error:
                tally.tokens[tenant] += chunk.usage.total_tokens
                tally.ended_at[tenant].append(time.monotonic())


async def measure(seconds: int, over: int) -> None:
    tally = Tally()
    per_client_s = over * sum(SHARES.values()) * _TOKENS_PER_SHARE / 60 / (10 + _ANSWER) / (4 * len(SHARES))
    async with _fleet() as url, contextlib.AsyncExitStack() as stack:
        began = time.monotonic() + _WARM_UP_S
        measured = began, began + seconds

        async def live(tenant: str, number: int) -> None:
            client = await stack.enter_async_context(await WireClient.connect(url, tenant=tenant))
            starts = time.monotonic() + number / per_client_s / 4
            async with asyncio.TaskGroup() as group:
                for request in itertools.count():
                    at = starts + request / per_client_s
                    if at >= measured[1]:
                        break
                    await asyncio.sleep(max(0.0, at - time.monotonic()))
                    tally.sent += at >= began
                    group.create_task(_ask(client, tenant, tally, measured))

        await asyncio.gather(*(live(tenant, number) for tenant in SHARES for number in range(4)))
    _show(tally, measured)


def _show(tally: Tally, measured: tuple[float, float]) -> None:
    total, shares = sum(tally.tokens.values()), sum(SHARES.values())
    print(f"{tally.sent} requests in {measured[1] - measured[0]:.0f} s: {json.dumps(tally.ends)}")
    for tenant, share in SHARES.items():
        ended_at = [measured[0], *tally.ended_at[tenant], measured[1]]
        pause_s = max(later - earlier for earlier, later in itertools.pairwise(ended_at))
        got = tally.tokens[tenant] / total
        of_limit = tally.tokens[tenant] / (_TOKENS_PER_SHARE * share * (measured[1] - measured[0]) / 60)
        print(
            f"  {tenant}: {tally.tokens[tenant]} tokens, {got:.3f} of all, {got * shares / share - 1:+.1%} beside its "
            f"share, {of_limit:.0%} of its limit; longest time without an answer {pause_s:.1f} s"
        )


def main() -> None:
    options = flags.parser(__doc__, seconds=60, over=4).parse_args()
    asyncio.run(measure(options.seconds, options.over))


if __name__ == "__main__":
    main()
