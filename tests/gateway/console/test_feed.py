"""The events of the console say what its page must show, however the fleet changes."""

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.builders import card, events, fleet_of
from tests.router.fleet.test_digests import Sender
from tokenbus.client.wire.fleet_picture import FleetPicture
from tokenbus.gateway.console.feed import FleetFeed
from tokenbus.protocol.wire import messages


class Page:
    """What a page knows: the workers by their numbers."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.running: dict[int, int] = {}

    def take(self, event: bytes) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
        if told["whole"]:
            self.names, self.running = {}, {}
        self.names |= {sheet["number"]: sheet["worker_id"] for sheet in told["joined"]}
        self.running |= {row[0]: row[2] for row in told["workers"]}
        for number in told["left"]:
            del self.names[number], self.running[number]
        return told

    @property
    def workers(self) -> dict[str, int]:
        return {name: self.running[number] for number, name in self.names.items()}


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.none() | st.integers(0, 9)), max_size=6), st.data())
@settings(max_examples=50)
def test_a_page_that_has_taken_all_events_shows_the_fleet_as_does_one_that_was_opened_later(
    changes: list[dict[str, int | None]], data: st.DataObject
) -> None:
    fleet, picture, feed, page = fleet_of(card("a")), FleetPicture(), FleetFeed(), Page()
    sender = Sender(fleet)
    sender.send(picture, whole=True)
    feed.update(picture, "", 0)
    page.take(feed.whole())
    seq = dict.fromkeys("abcd", 0)
    for changed in changes:
        for name, running in changed.items():
            if running is None:
                fleet.apply_card(card(name, state=messages.WorkerState.STOPPED), sender.now)
            else:
                fleet.apply_card(card(name), sender.now)
                fleet.apply_events("demo", events(name, seq[name], load=messages.Load(running=running)), sender.now)
                seq[name] += 1
        sender.send(picture, whole=False)
        told = page.take(feed.update(picture, "", 1))
        assert not told["whole"]
        expected = {worker.card.worker_id: worker.load.running for worker in fleet.workers_of("demo")}
        assert page.workers == expected
        later = Page()
        later.take(feed.whole())
        assert later.workers == expected


def test_while_no_router_shows_the_fleet_its_workers_stay_and_the_reason_is_told() -> None:
    picture, feed, page = FleetPicture(), FleetFeed(), Page()
    sender = Sender(fleet_of(card("a")))
    sender.send(picture, whole=True)
    feed.update(picture, "", 0)
    page.take(feed.whole())
    picture.requests(sender.now + 100.0)  # the router has been silent
    told = page.take(feed.update(picture, "no router listens on this broker", 1))
    assert told["problem"] == "no router listens on this broker"
    assert page.workers == {"a": 0}
