"""Digests of a fleet, and the picture that a viewer puts together from them."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.builders import card, events, fleet_of, known
from tokenbus.client.wire.fleet_picture import SILENT_AFTER_S, FleetPicture
from tokenbus.protocol.wire import codec, messages
from tokenbus.router.fleet.digests import FleetDigests
from tokenbus.router.fleet.fleet import Fleet

JSON = codec.Encoding.JSON
LARGE = 1_000_000
decoder = codec.Decoder(messages.FleetDigest)


def stats(fleet: Fleet, router_id: str = "r1", models: tuple[str, ...] = ()) -> messages.RouterStats:
    return codec.replace(fleet.router_view(router_id, 0, 0.0), models=list(models))


class Sender:
    """A router that sends digests of its fleet."""

    def __init__(self, fleet: Fleet, router_id: str = "r1", models: tuple[str, ...] = ()) -> None:
        self.fleet = fleet
        self.stats = stats(fleet, router_id, models)
        self.digests = FleetDigests(fleet, f"life of {router_id}")
        self.now = 0.0

    def send(
        self, *pictures: FleetPicture, whole: bool, most: int = LARGE, encoding: codec.Encoding = JSON
    ) -> list[bytes]:
        self.now += 1.0
        self.digests.update(self.stats, [], self.now)
        sent = (self.digests.whole if whole else self.digests.changes)(most, encoding)
        for picture in pictures:
            deliver(sent, picture, self.now, encoding)
        return sent


def deliver(sent: list[bytes], picture: FleetPicture, now: float, encoding: codec.Encoding = JSON) -> None:
    for payload in sent:
        picture.apply(decoder.decode(payload, encoding), now)


def names(picture: FleetPicture) -> list[str]:
    return [view.sheet.worker_id for view in picture.workers()]


def test_a_viewer_sees_all_workers_at_first_and_then_what_changes() -> None:
    fleet, picture = fleet_of(card("a"), card("b")), FleetPicture()
    sender = Sender(fleet)
    sender.send(picture, whole=True)
    assert names(picture) == ["a", "b"]
    assert picture.is_complete
    fleet.apply_events("demo", events("b", load=messages.Load(running=3, generated_tokens=50)), 1.0)
    (sent,) = sender.send(picture, whole=False)
    assert [one.number for one in decoder.decode(sent, JSON).workers] == [1], "what has not changed is not sent"
    (_, b) = picture.workers()
    assert (b.numbers.running, b.numbers.tokens_per_s) == (3, 50.0)
    fleet.apply_card(card("a", state=messages.WorkerState.STOPPED), 2.0)
    fleet.apply_card(card("c"), 2.0)
    sender.send(picture, whole=False)
    assert names(picture) == ["b", "c"]


def test_what_does_not_change_costs_no_more_than_its_routers_state() -> None:
    sender = Sender(fleet_of(*(card(f"w{number}") for number in range(100))))
    sender.send(whole=True)
    (sent,) = sender.send(whole=False)
    digest = decoder.decode(sent, JSON)
    assert (digest.joined, digest.workers, digest.memory, digest.left) == ([], [], [], [])


def test_a_worker_that_restarts_is_another_one() -> None:
    fleet, picture = fleet_of(card("a")), FleetPicture()
    sender = Sender(fleet)
    sender.send(picture, whole=True)
    fleet.apply_card(card("a", epoch="200-b"), 1.0)
    sender.send(picture, whole=False)
    (worker,) = picture.workers()
    assert worker.sheet.since_ms == 200


def test_a_lost_worker_is_shown_until_it_is_back_or_ten_minutes_have_passed() -> None:
    fleet, picture = fleet_of(card("a"), card("b"), card("c")), FleetPicture()
    sender = Sender(fleet)
    sender.send(picture, whole=True)

    def states() -> list[str]:
        sender.send(picture, whole=False)
        return [f"{view.sheet.worker_id} {view.numbers.state}" for view in picture.workers()]

    for name in ("a", "b"):
        fleet.give_up(known(fleet, name))
    assert states() == ["a lost", "b lost", "c ready"]
    one, other = fleet.lost.all(sender.now)
    one.has_successor = other.has_successor = True
    assert states() == ["a loading", "b loading", "c ready"]
    fleet.apply_card(card("b", epoch="200-b"), 1.0)
    assert states() == ["a loading", "b ready", "c ready"]
    sender.now = 700.0
    assert states() == ["b ready", "c ready"]


def test_a_digest_that_is_missing_makes_the_viewer_ask_for_a_whole_one() -> None:
    fleet, picture = fleet_of(card("a")), FleetPicture()
    sender = Sender(fleet)
    sender.send(picture, whole=True)
    fleet.apply_card(card("b"), 1.0)
    sender.send(whole=False)
    sender.send(picture, whole=False)
    assert not picture.is_complete
    assert picture.requests(sender.now)[1:] == [messages.FleetRequest(router_id="r1", whole=True)]
    sender.send(picture, whole=True)
    assert names(picture) == ["a", "b"]
    assert picture.requests(sender.now)[1:] == [messages.FleetRequest(router_id="r1")]


@given(st.data())
@settings(max_examples=60)
def test_whatever_part_is_lost_the_picture_is_right_or_known_to_be_incomplete(data: st.DataObject) -> None:
    fleet, picture = fleet_of(), FleetPicture()
    sender = Sender(fleet)
    seq = dict.fromkeys("abcdef", 0)
    epochs = dict.fromkeys("abcdef", 100)
    for _ in range(data.draw(st.integers(1, 8))):
        for name in data.draw(st.sets(st.sampled_from("abcdef"))):
            match data.draw(st.sampled_from(["card", "load", "stop", "restart"])):
                case "card":
                    fleet.apply_card(card(name, epoch=f"{epochs[name]}-a"), sender.now)
                case "load":
                    load = messages.Load(running=data.draw(st.integers(0, 9)), generated_tokens=seq[name])
                    fleet.apply_events(
                        "demo", events(name, seq[name], epoch=f"{epochs[name]}-a", load=load), sender.now
                    )
                    seq[name] += 1
                case "stop":
                    stopped = card(name, epoch=f"{epochs[name]}-a", state=messages.WorkerState.STOPPED)
                    fleet.apply_card(stopped, sender.now)
                case "restart":
                    epochs[name] += 1
                    fleet.apply_card(card(name, epoch=f"{epochs[name]}-a"), sender.now)
        sent = sender.send(whole=not picture.is_complete, most=data.draw(st.sampled_from([600, 1_500, LARGE])))
        lost = data.draw(st.sets(st.integers(0, len(sent) - 1), max_size=1))
        deliver([one for number, one in enumerate(sent) if number not in lost], picture, sender.now)
        if picture.is_complete and not lost:
            expected = [
                (worker.card.worker_id, worker.load.running, worker.card.epoch.split("-")[0])
                for _, workers in fleet.models()
                for worker in sorted(workers, key=lambda worker: worker.card.worker_id)
            ]
            seen = [(one.sheet.worker_id, one.numbers.running, str(one.sheet.since_ms)) for one in picture.workers()]
            assert seen == expected
    sender.send(picture, whole=True)
    assert picture.is_complete


@pytest.mark.parametrize("encoding", list(codec.Encoding))
def test_a_digest_of_a_large_fleet_comes_in_parts_that_fit(encoding: codec.Encoding) -> None:
    fleet = fleet_of(*(card(f"worker-{number:04}") for number in range(1_000)))
    picture = FleetPicture()
    sent = Sender(fleet).send(picture, whole=True, most=20_000, encoding=encoding)
    assert max(map(len, sent)) <= 20_000
    assert len(picture.workers()) == 1_000
    assert picture.is_complete


def test_memory_is_told_again_only_after_it_has_changed_by_a_hundredth() -> None:
    fleet, picture = fleet_of(card("a")), FleetPicture()
    sender = Sender(fleet)
    told = []
    for seq, mib in enumerate((1_000, 1_005, 1_009, 1_011)):
        device = messages.DeviceHealth(name="host", kind="cpu", total_bytes=8 << 30, free_bytes=4 << 30)
        health = messages.WorkerHealth(
            devices=[device], front_bytes=0, engine_bytes=mib << 20, uptime_s=9.0, engine_uptime_s=5.0
        )
        fleet.apply_events("demo", msgspec.structs.replace(events("a", seq), health=health), 1.0)
        sender.send(picture, whole=seq == 0)
        memory = picture.workers()[0].memory
        told.append(memory and memory.engine_mib)
    assert told == [1_000, 1_000, 1_000, 1_011]
    assert known(fleet, "a").health is not None


def test_of_routers_with_the_same_models_one_is_asked_and_another_if_that_falls_silent() -> None:
    fleet, picture = fleet_of(card("a")), FleetPicture()
    first, second = Sender(fleet, "r1"), Sender(fleet, "r2")
    for sender in (first, second):
        picture.apply(messages.FleetDigest(router_id=sender.stats.router_id, router=sender.stats), 0.0)
    assert picture.requests(0.0) == [
        messages.FleetRequest(),
        messages.FleetRequest(router_id="r1", whole=True),
    ]
    first.send(picture, whole=True)
    later = first.now + SILENT_AFTER_S
    picture.apply(messages.FleetDigest(router_id="r2", router=second.stats), later)
    assert picture.requests(later)[1:] == [messages.FleetRequest(router_id="r2", whole=True)]
    assert not picture.is_complete


def test_routers_of_several_parts_make_one_picture_and_one_of_all_models_is_enough() -> None:
    picture = FleetPicture()
    chat, embed = fleet_of(card("a", model="chat")), fleet_of(card("b", model="embed"))
    parts = [Sender(chat, "r1", ("chat",)), Sender(embed, "r2", ("embed",))]
    for sender in parts:
        sender.send(picture, whole=True)
    assert names(picture) == ["a", "b"]
    whole = Sender(fleet_of(card("a", model="chat"), card("b", model="embed"), card("c", model="x")), "r3")
    whole.send(picture, whole=True)
    assert names(picture) == ["a", "b", "c"]
    assert [one.router_id for one in picture.requests(1.0)[1:]] == ["r3"]
    assert [one.router_id for one in picture.routers()] == ["r1", "r2", "r3"]
