"""Measures what keys and limits cost a router for each request: the key is checked, its own and its tenant's
limits are charged, what is left is reported, and the charge is settled at the end.

    python -m bench.router.limits"""

import random
import statistics
import time

from bench import flags
from tokenbus.protocol.access import keys
from tokenbus.protocol.access.key_ring import KeyRing
from tokenbus.protocol.access.keys import KeyLimits, KeyRecord
from tokenbus.protocol.wire import messages, subjects
from tokenbus.router.access import key_checks
from tokenbus.router.access.key_checks import KeyChecks
from tokenbus.router.access.limits import Limits, TenantLimits, Wanted
from tokenbus.router.access.quota import Quota
from tokenbus.router.telemetry.metrics import RouterMetrics

_MANY = 10**9
_LIMITS = KeyLimits(
    requests_per_minute=_MANY, tokens_per_minute=_MANY, tokens_per_day=_MANY, concurrency=_MANY, max_tokens=32_000
)
_REQUEST = messages.GenerateRequest(prompt="x", max_tokens=1_000)
_BATCH = 200


def _quota(num_keys: int) -> tuple[KeyChecks, Quota, Limits, list[subjects.ModelAddress]]:
    ring, addresses = KeyRing(), []
    for number in range(num_keys):
        key = keys.new_key()
        ring.put(KeyRecord(id=key.id, hash=key.hash, tenant=f"tenant-{number % 100}", limits=_LIMITS))
        addresses.append(subjects.ModelAddress("demo", f"tenant-{number % 100}", key.id))
    ring.heard(time.monotonic())
    checks = KeyChecks(ring)
    limits = Limits(TenantLimits(_MANY, _MANY, _MANY), {}, checks.limits_of)
    names = subjects.Subjects()
    quota = Quota(limits, None, names, "r", None, RouterMetrics(), random.Random(1))  # type: ignore[arg-type]
    limits.on_wanted = lambda: None
    for address in addresses:
        assert isinstance(limits.admit(address, 1, 1, quota.now), Wanted)
    for slots in limits.slots.values():
        slots.share_out(1, quota.now + 3_600)
    return checks, quota, limits, addresses


def _share_out(quota: Quota, limits: Limits) -> None:
    """Gives what leases would have given."""
    for share in limits.windows.values():
        share.roll(quota.now)
        share.share_out(1, quota.now)
        share.asked_at = 0.0


def _us(checks: KeyChecks, quota: Quota, addresses: list[subjects.ModelAddress]) -> float | None:
    """Returns the CPU time of a request; None if a window has ended meanwhile."""
    began = time.process_time_ns()
    for address in addresses:
        record = checks.find(address.tenant, address.key_id, time.time(), time.monotonic())
        key_checks.check_model(record, address.model)
        key_checks.bounded(record, _REQUEST)
        ticket, _ = quota.admit(address, 500, 1_000)
        if ticket is None:
            return None
        quota.close(ticket, address, 700, 200)
    return (time.process_time_ns() - began) / 1e3 / len(addresses)


def main() -> None:
    options = flags.parser(__doc__, keys=1_000, rounds=51).parse_args()
    checks, quota, limits, addresses = _quota(options.keys)
    rng = random.Random(2)
    found: list[float] = []
    while len(found) < options.rounds:
        _share_out(quota, limits)
        took_us = _us(checks, quota, rng.choices(addresses, k=_BATCH))
        found += [] if took_us is None else [took_us]
    low, middle, high = statistics.quantiles(found, n=4)
    print(f"{options.keys} keys: {middle:.1f} us a request (quartiles {low:.1f} and {high:.1f})")


if __name__ == "__main__":
    main()
