"""Two routers share a limit in the bucket of a real broker."""

import asyncio
import random

import msgspec

from tokenbus.protocol import tasks
from tokenbus.protocol.access.keys import KeyLimits
from tokenbus.protocol.bus.bucket import Bucket, BucketState
from tokenbus.protocol.bus.connection import Connection
from tokenbus.protocol.wire import errors, subjects
from tokenbus.router.access.limits import TOKENS_A_DAY, Account, Limits, TenantLimits
from tokenbus.router.access.quota import Quota
from tokenbus.router.access.windows import Record
from tokenbus.router.telemetry.metrics import RouterMetrics

NAMES = subjects.Subjects("quota-test")
KEY = subjects.ModelAddress("demo", "acme", "abcdefghij")
PER_DAY = 60
KEY_LIMITS = KeyLimits(tokens_per_day=PER_DAY)


class OldBucket(Bucket):
    """The broker's bucket, as if it had been made a while ago: nothing is leased from a new one at first."""

    async def state(self) -> BucketState:
        found = await super().state()
        return found._replace(created=f"2020{found.created[4:]}")


def router(connection: Connection, name: str) -> Quota:
    limits = Limits(TenantLimits(), {}, lambda key_id: KEY_LIMITS)
    bucket = OldBucket(connection, "quota_test", timeout_s=30.0)
    return Quota(limits, connection, NAMES, name, bucket, RouterMetrics(), random.Random(name))


async def let_through(quota: Quota) -> bool:
    """Asks until a request is let through, or nothing is left. A router that the machine has made wait for seconds
    refuses for a moment."""
    while True:
        try:
            ticket, _ = await quota.admitted(KEY, 1, 0)
        except errors.RequestError as refused:
            error = refused.error
            assert error.code is errors.Code.OVERLOADED
            if error.rate_limits and error.rate_limits.tokens and not error.rate_limits.tokens.remaining:
                return False
            await asyncio.sleep(min(1.0, (error.retry_after_ms or 0.0) / 1e3))
        else:
            quota.close(ticket, KEY, 1)
            return True


async def test_two_routers_give_out_a_limit_once_and_at_most_a_request_each_beyond_it(jetstream: Connection) -> None:
    quotas = [router(jetstream, name) for name in ("r1", "r2")]
    for quota in quotas:
        await quota.open()
    running = [tasks.background("quota", quota.run()) for quota in quotas]
    assert all(quota.is_leasing for quota in quotas)
    outcomes = await asyncio.gather(*(let_through(quota) for _ in range(PER_DAY) for quota in quotas))
    for task in running:
        task.cancel()
    assert PER_DAY <= sum(outcomes) <= PER_DAY + len(quotas)
    entry = await OldBucket(jetstream, "quota_test").get(f"{KEY.key_id}.{TOKENS_A_DAY}")
    assert entry is not None
    record = msgspec.msgpack.decode(entry.value or b"", type=Record)
    account = Account(KEY.key_id, TOKENS_A_DAY)
    assert record.taken == sum(quota._limits.windows[account].leased for quota in quotas)
    assert len(record.leases) == 2, "both have had a part"
