"""Viewers of a fleet see their own limits, and operators those that refuse most."""

import pytest

from tokenbus.cli.commands.top import limits_text
from tokenbus.client.wire.fleet_picture import FleetPicture
from tokenbus.protocol.access.keys import KeyLimits
from tokenbus.protocol.wire import messages, subjects
from tokenbus.router.access.limits import Account, Limits, TenantLimits, Ticket, Wanted

KEYS = {"aaaaaaaaaa": KeyLimits(requests_per_minute=60, concurrency=8), "bbbbbbbbbb": KeyLimits(requests_per_minute=30)}
NOW = 1_000.0


def limits() -> Limits:
    made = Limits(TenantLimits(tokens_per_minute=6_000), {}, lambda key_id: KEYS.get(key_id, KeyLimits()))
    for tenant, key_id in (("acme", "aaaaaaaaaa"), ("globex", "bbbbbbbbbb")):
        assert isinstance(made.admit(subjects.ModelAddress("m", tenant, key_id), 1, 0, NOW), Wanted)
    for share in made.windows.values():
        share.roll(NOW)
        share.share_out(1, NOW)
    for slots in made.slots.values():
        slots.share_out(1, NOW)
    return made


def use_up(made: Limits, tenant: str, key_id: str, num_refused: int) -> None:
    address = subjects.ModelAddress("m", tenant, key_id)
    while isinstance(made.admit(address, 1, 0, NOW), Ticket):
        pass
    for _ in range(num_refused - 1):
        made.admit(address, 1, 0, NOW)


def names(seen: list[messages.ClientLimits]) -> list[tuple[str, str, int]]:
    return [(one.tenant, one.key_id, one.refused) for one in seen]


def test_a_viewer_sees_the_limits_of_its_key_and_tenant_and_of_no_other() -> None:
    made = limits()
    use_up(made, "acme", "aaaaaaaaaa", 3)
    use_up(made, "globex", "bbbbbbbbbb", 1)
    assert names(made.seen_by("acme", "aaaaaaaaaa", NOW)) == [("acme", "aaaaaaaaaa", 3), ("acme", "", 0)]
    assert names(made.seen_by("acme", "", NOW)) == [("acme", "", 0)]
    key, tenant = made.seen_by("acme", "aaaaaaaaaa", NOW)
    assert key.rate_limits
    assert key.rate_limits.requests
    assert (key.rate_limits.requests.limit, key.rate_limits.requests.remaining) == (60, 0)
    assert (key.open, key.max_open) == (4, 8)
    assert tenant.rate_limits
    assert tenant.rate_limits.requests is None


def test_an_operator_sees_the_limits_that_refuse_most_until_a_minute_later() -> None:
    made = limits()
    assert made.most_refused(NOW) == []
    use_up(made, "globex", "bbbbbbbbbb", 1)
    use_up(made, "acme", "aaaaaaaaaa", 3)
    assert names(made.most_refused(NOW)) == [("acme", "aaaaaaaaaa", 3), ("globex", "bbbbbbbbbb", 1)]
    assert made.refusals.count(NOW) == 4
    assert (made.most_refused(NOW + 60.0), made.refusals.count(NOW + 60.0)) == ([], 0)
    assert not made._refused


def test_what_several_routers_tell_of_a_limit_is_put_together() -> None:
    picture = FleetPicture()
    for router, remaining in (("r1", 30), ("r2", 12)):
        told = messages.RateLimits(requests=messages.RateLimit(limit=60, remaining=remaining, reset_ms=1.0))
        seen = messages.ClientLimits(tenant="acme", rate_limits=told, open=1, max_open=8, refused=2)
        picture.apply(messages.FleetDigest(router_id=router, limits=[seen]), NOW)
    (seen,) = picture.limits()
    assert limits_text(seen) == (
        "limits of tenant acme: 12 of 60 requests left, 2 of 8 open, 4 refused in the last minute"
    )


def test_the_limits_of_clients_that_come_again_and_again_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenbus.router.access.limits.MAX_ACCOUNTS", 8)
    made = Limits(TenantLimits(requests_per_minute=60, concurrency=2), {}, None)
    address = subjects.ModelAddress("m", "acme")
    for number in range(100):
        if number == 20:
            window = made.windows[Account("=acme", "requests")]
            slots = made.slots[Account("=acme", "concurrency")]
        made.report(subjects.ModelAddress("m", f"t{number}"), NOW)
        made.report(address, NOW)
    assert made.windows[Account("=acme", "requests")] is window
    assert made.slots[Account("=acme", "concurrency")] is slots
