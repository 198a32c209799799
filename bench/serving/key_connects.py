"""The time that a NATS client takes to connect with an API key, and until the connections of a revoked key have ended.

Run: .venv/bin/python -m bench.serving.key_connects [--pairs 300] [--at-once 500] [--revocations 60]

Compares connects by key with those by a user's password, one after the other; `tokenbus auth` runs in this process."""

import asyncio
import logging
import statistics
import tempfile
import time
from pathlib import Path

import structlog

from bench import flags
from tests.support import key_broker
from tests.support.key_broker import KeyBroker


async def connect_ms(broker: KeyBroker, **options: str) -> float:
    started = time.perf_counter()
    assert await broker.answer_to(**options) == b"PONG"
    return (time.perf_counter() - started) * 1e3


async def revoke_ms(broker: KeyBroker) -> float:
    """Returns the time from the change of a new key until its connection has ended."""
    key, record = await broker.new_key()
    while await broker.answer_to(auth_token=key) != b"PONG":
        pass
    await broker.connect(key, record)
    broker.disconnected.clear()
    started = time.perf_counter()
    await broker.change(record, revoked_at=1.0)
    await broker.disconnected.wait()
    return (time.perf_counter() - started) * 1e3


def shown(times_ms: list[float]) -> str:
    cuts = statistics.quantiles(times_ms, n=100)
    return f"{cuts[49]:.2f} ms (p99 {cuts[98]:.2f}, at most {max(times_ms):.2f})"


async def measure(pairs: int, at_once: int, revocations: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with key_broker.running(Path(folder)) as broker:
            operator = await broker.use_bucket()
            key, _ = await broker.new_key()
            async with broker.auth():
                by_password, by_key = [], []
                for _ in range(pairs):
                    by_password.append(await connect_ms(broker, user="operator", **{"pass": key_broker.PASSWORD}))
                    by_key.append(await connect_ms(broker, auth_token=key))
                print(f"connect by password {shown(by_password)}, by key {shown(by_key)}")
                started = time.perf_counter()
                await asyncio.gather(*[connect_ms(broker, auth_token=key) for _ in range(at_once)])
                print(f"{at_once} connects at once: {time.perf_counter() - started:.2f} s")
                print(f"revoked until closed {shown([await revoke_ms(broker) for _ in range(revocations)])}")
            await operator.close()


def main() -> None:
    options = flags.parser(__doc__, pairs=300, at_once=500, revocations=60).parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    asyncio.run(measure(options.pairs, options.at_once, options.revocations))


if __name__ == "__main__":
    main()
