"""The reply to `models`: everything if it fits, pages that name each worker once, and refusals by name."""

import time

import pytest

from tests.router.builders import DRAINING, at, card, events, fleet_of
from tokenbus.protocol.wire import codec, errors, messages
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.requests.models import ModelCatalog

_MIB = 1_048_576
_replies = codec.Decoder(messages.ModelsReply)
ENCODINGS = list(codec.Encoding)


class NoParts:
    num_uploads = held_bytes = 0


class NoQueue:
    def __len__(self) -> int:
        return 0


def ask(
    fleet: Fleet,
    *,
    most: int = _MIB,
    encoding: codec.Encoding = codec.Encoding.JSON,
    tenant: str = "default",
    **fields: object,
) -> messages.ModelsReply:
    catalog = ModelCatalog(fleet, NoQueue(), "r1", 65_536)  # type: ignore[arg-type]
    asked = messages.ModelsRequest(**fields)  # type: ignore[arg-type]
    payload = codec.encode(catalog.page(asked, encoding, most, NoParts(), tenant), encoding)  # type: ignore[arg-type]
    assert len(payload) <= most
    return _replies.decode(payload, encoding)


def pages(fleet: Fleet, **fields: object) -> list[messages.ModelsReply]:
    found = [ask(fleet, **fields)]  # type: ignore[arg-type]
    while found[-1].next:
        found.append(ask(fleet, after=found[-1].next, **fields))  # type: ignore[arg-type]
        assert len(found) < 10_000
    return found


def names(reply: messages.ModelsReply) -> list[tuple[str, str]]:
    return [(one.model, one.worker_id) for one in reply.cards]


def fleet_with(**counts: int) -> Fleet:
    return fleet_of(*(card(f"w{number:04}", model=model) for model, count in counts.items() for number in range(count)))


def test_a_fleet_that_fits_is_listed_in_one_message() -> None:
    reply = ask(fleet_with(a=3, b=2))
    assert names(reply) == [("a", "w0000"), ("a", "w0001"), ("a", "w0002"), ("b", "w0000"), ("b", "w0001")]
    assert not reply.truncated
    assert not reply.next
    assert reply.router


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_fleet_that_does_not_fit_is_listed_without_workers_and_counted(encoding: codec.Encoding) -> None:
    reply = ask(fleet_with(a=2_000, b=1), encoding=encoding)
    assert reply.truncated
    assert not reply.next
    assert reply.router
    assert [(one.model, one.workers) for one in reply.models] == [("a", messages.UNSET), ("b", messages.UNSET)]
    assert reply.summary
    assert (reply.summary.models, reply.summary.workers) == (2, 2_001)
    assert reply.models[0].summary
    assert reply.models[0].summary.states == {"ready": 2_000}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("limit", [None, 1, 7, 1_024])
def test_pages_have_every_worker_once(limit: int | None, encoding: codec.Encoding) -> None:
    counts = {"a": 40, "a.b": 1, "b": 300, "c": 7}
    fleet = fleet_with(**counts)
    found = pages(fleet, limit=limit or 256, encoding=encoding, most=65_536)
    listed = [name for page in found for name in names(page)]
    assert listed == [(model, f"w{number:04}") for model, count in counts.items() for number in range(count)]
    assert all(len(page.cards) <= (limit or 256) for page in found)
    assert all(page.cards for page in found)


def test_a_page_is_filled_as_far_as_the_message_allows() -> None:
    few, more = (len(ask(fleet_with(a=1_000), limit=1_024, most=most).cards) for most in (65_536, 131_072))
    assert 50 < few < 2 * few < more < 1_000


def test_a_worker_that_comes_or_goes_between_two_pages_moves_no_other() -> None:
    fleet = fleet_with(a=6)
    first = ask(fleet, limit=3)
    fleet.apply_card(card("w0002", model="a", state=messages.WorkerState.STOPPED), 0.0)
    fleet.apply_card(card("w00015", model="a"), 0.0)
    assert names(ask(fleet, limit=3, after=first.next)) == [("a", "w0003"), ("a", "w0004"), ("a", "w0005")]


def test_models_come_in_pages_without_workers() -> None:
    fleet = fleet_of(*(card("w", model=f"model-{number:04}") for number in range(900)))
    found = pages(fleet, limit=0, most=65_536)
    assert [one.model for page in found for one in page.models] == [f"model-{number:04}" for number in range(900)]
    assert all(not page.cards for page in found)
    assert len(found) > 2


def test_more_models_than_fit_are_truncated_with_the_place_of_the_next() -> None:
    fleet = fleet_of(*(card("w", model=f"model-{number:04}") for number in range(900)))
    reply = ask(fleet, most=65_536)
    assert reply.truncated
    assert reply.summary
    assert reply.summary.models == 900
    assert ask(fleet, limit=0, after=reply.next, most=65_536).models[0].model == f"model-{len(reply.models):04}"


def test_one_model_is_listed_and_counted_alone() -> None:
    found = pages(fleet_with(a=2, b=3, c=1), model="b", limit=2)
    assert [names(page) for page in found] == [[("b", "w0000"), ("b", "w0001")], [("b", "w0002")]]
    assert found[0].summary
    assert (found[0].summary.models, found[0].summary.workers) == (1, 3)
    assert not found[1].summary
    assert not found[1].models[0].summary


def test_workers_are_counted_in_the_state_that_people_see() -> None:
    fleet = fleet_of(card("a"), card("b"), card("c", state=DRAINING), card("d", state=DRAINING, loadable=True))
    fleet.apply_events("demo", events("a", load=messages.Load(running=2, waiting=1, generated_tokens=7)), 0.0)
    fleet.renew_lease(card("a"), 100.0)
    for worker in fleet.workers_of("demo"):
        worker.last_seen_at = 0.0 if worker.card.worker_id == "b" else 100.0
    fleet.expire_leases(100.0)
    summary = ask(fleet).summary
    assert summary
    assert summary.states == {"ready": 1, "silent": 1, "draining": 1, "loadable": 1}
    assert (summary.running, summary.waiting, summary.generated_tokens) == (2, 1, 7)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"limit": -1}, "limit"),
        ({"limit": 1_025}, "limit"),
        ({"model": ""}, "model"),
        ({"model": "a" * 129}, "model"),
        ({"model": "a", "after": "b.w0000"}, "after"),
        ({"model": "a", "after": "b"}, "after"),
        ({"after": ""}, "after"),
        ({"after": "a.w0000.x"}, "after"),
        ({"after": "a b"}, "after"),
        ({"after": "=41"}, "after"),
        ({"after": "a.*"}, "after"),
    ],
)
def test_a_page_that_is_not_allowed_is_refused_by_the_fields_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(errors.RequestError) as refusal:
        ask(fleet_with(a=2, b=2), **fields)  # type: ignore[arg-type]
    assert (refusal.value.error.code, refusal.value.error.param) == (errors.Code.INVALID_REQUEST, param)


def test_a_model_that_is_not_served_is_refused_like_a_request_for_it() -> None:
    fleet = fleet_with(a=1)
    fleet._began_at = time.monotonic()
    with pytest.raises(errors.RequestError, match="nothing serves 'x' now"):
        ask(fleet, model="x")
    fleet._began_at = -1e9
    with pytest.raises(errors.RequestError, match="no worker has ever served 'x'"):
        ask(fleet, model="x")


def test_cards_and_adapters_that_fit_nowhere_do_not_stop_the_pages() -> None:
    adapters = [messages.CardAdapter(name=f"adapter-{number:05}", digest="d" * 16) for number in range(1_200)]
    fleet = fleet_of(card("a", adapters=adapters), card("b"))
    found = pages(fleet, limit=1, most=65_536)
    assert [name for page in found for name in names(page)] == [("demo", "b")]
    assert found[0].summary
    assert found[0].summary.workers == 2
    assert at("a") in {worker.card.address for worker in fleet.workers_of("demo")}
