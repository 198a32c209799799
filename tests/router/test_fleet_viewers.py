"""Who looks at a router's fleet is sent digests, and no tenant keeps the others from it."""

from typing import Any

import pytest

from tests.router.builders import fleet_of
from tests.support.recording_bus import RecordingBus
from tokenbus.protocol.wire import codec, errors, messages
from tokenbus.protocol.wire.fleet import MAX_FLEET_VIEWS
from tokenbus.router.requests.fleet_viewers import FleetViewers

ASKED = messages.FleetRequest(router_id="r1")


@pytest.fixture
def viewers() -> FleetViewers:
    nothing: Any = None
    fleet = fleet_of()
    return FleetViewers(
        RecordingBus(),  # type: ignore[arg-type]
        nothing,
        fleet,
        "r1",
        lambda now: fleet.router_view("r1", 0, now),
        list,
        lambda tenant, key_id, is_operator: [],
    )


def views_of(viewers: FleetViewers, tenant: str) -> list[str]:
    return [reply for reply, view in viewers._views.items() if view.tenant == tenant]


async def test_a_tenant_that_looks_from_everywhere_leaves_room_for_others(viewers: FleetViewers) -> None:
    def ask(tenant: str, number: int) -> None:
        viewers.ask(f"{tenant}.{number}", ASKED, codec.Encoding.JSON, tenant, "", is_operator=False)

    for number in range(MAX_FLEET_VIEWS):
        ask("greedy", number)
    with pytest.raises(errors.RequestError) as refused:
        ask("greedy", MAX_FLEET_VIEWS)
    assert refused.value.error.code is errors.Code.OVERLOADED
    for number in range(MAX_FLEET_VIEWS // 2):
        ask("acme", number)
    with pytest.raises(errors.RequestError):
        ask("acme", MAX_FLEET_VIEWS)
    half = range(MAX_FLEET_VIEWS // 2)
    assert views_of(viewers, "greedy") == [f"greedy.{number}" for number in half], "those that came first"
    assert views_of(viewers, "acme") == [f"acme.{number}" for number in half]
    ask("globex", 0)
    assert len(viewers) == MAX_FLEET_VIEWS
    viewers.close()
