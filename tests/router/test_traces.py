"""How requests went is remembered, a bounded number of them, and told to their own tenant."""

from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.router.builders import card, fleet_of, flight, known
from tokenbus.protocol.wire import codec, errors, internal, messages
from tokenbus.router.placement.placement import Placement
from tokenbus.router.requests.flights.ends import RequestEnds
from tokenbus.router.requests.flights.flight import Flight, Flights
from tokenbus.router.requests.flights.way import MAX_STEPS, Way
from tokenbus.router.requests.traces import RequestTraces

FLEET = fleet_of(card("w1", kv_block_size=16), card("w2", kv_block_size=16))
GAPS = [0, 0, 0, 5, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]


class Testbed:
    """The traces of one router, whose clock the test sets."""

    __test__ = False

    def __init__(self, capacity: int = 8, max_payload: int = 1 << 20) -> None:
        self.flights = Flights(100, 1_000_000)
        self.sent: list[messages.TraceReply] = []
        decoder = codec.Decoder(messages.TraceReply)
        replies: Any = SimpleNamespace(
            send=lambda reply, payload, headers: self.sent.append(decoder.decode(payload, codec.Encoding.JSON))
        )
        self.traces = RequestTraces(replies, "router-1", self.flights, lambda: max_payload, capacity)
        self.ends = RequestEnds("router-1")
        self.ends.on_flight = self.traces.keep

    def ended(self, request_id: str, code: errors.Code | None = None, **fields: Any) -> None:
        self.ends.tell_flight(flight(request_id, **fields), "error" if code else "stop", code)

    def find(self, tenant: str = "default", **asked: Any) -> list[messages.RequestTrace]:
        return self.traces.find(messages.TraceRequest(**asked), tenant, 1e9, 1e9)[0]

    def ids(self, tenant: str = "default", **asked: Any) -> list[str]:
        return [one.id for one in self.find(tenant, **asked)]


def placed(one: Flight, worker_id: str, now: float, **fields: Any) -> None:
    one.way.add(Placement(known(FLEET, worker_id), "kv", **fields), now, len(one.completion))


def test_a_request_that_survived_its_worker_shows_both_and_when_the_first_was_last_heard_of() -> None:
    bed, one = Testbed(), flight("r1", received_at=10.0)
    placed(one, "w1", 10.001, overlap_blocks=2, num_candidates=2, most_held_blocks=3, wait_s=0.05)
    one.way.accepted("w1", 10.002)
    one.completion.append(7, 1)
    one.way.left(13.0, heard_at=11.0)
    placed(one, "w2", 13.001, num_candidates=1)
    one.way.accepted("w2", 13.002)
    assert one.way.is_paused
    one.way.continued(13.5)
    one.end = internal.StreamEnd(
        id=one.key,
        router_id="router-1",
        finish_reason=messages.FinishReason.STOP,
        prompt_tokens=40,
        cached_tokens=32,
        completion_tokens=7,
        queue_ms=1.5,
        prefill_ms=20.0,
        gaps=GAPS,
    )
    bed.ends.tell_ended_by_worker(one)
    (trace,) = bed.find(id="r1")
    first, second = trace.attempts
    assert (first.worker_id, first.begun_ms, first.accepted_ms, first.heard_ms, first.left_ms, first.left) == (
        "w1", 1.0, 2.0, 1_000.0, 3_000.0, "lost",
    )  # fmt: skip
    assert (first.held_tokens, first.most_held_tokens, first.candidates, first.wait_ms) == (32, 48, 2, 50.0)
    assert (first.continued_ms, second.continued_ms, one.way.is_paused) == (None, 3_500.0, False)
    assert (second.worker_id, second.accepted_ms, second.tokens, second.left) == ("w2", 3_002.0, 1, "")
    assert (trace.state, trace.worker_queue_ms, trace.prefill_ms, trace.gaps) == ("stop", 1.5, 20.0, GAPS)
    assert (trace.prompt_tokens, trace.cached_tokens, trace.completion_tokens) == (40, 32, 7)


def test_a_worker_that_ended_a_request_before_its_accept_was_read_is_among_its_workers() -> None:
    bed, one = Testbed(), flight("r1", received_at=10.0)
    placed(one, "w1", 10.001)
    one.ended_by = "w1"
    bed.ends.tell_ended_by_worker(one)
    (attempt,) = bed.find(id="r1")[0].attempts
    assert (attempt.worker_id, attempt.accepted_ms is not None) == ("w1", True)


def test_a_request_in_flight_is_told_before_those_that_have_ended() -> None:
    bed = Testbed()
    bed.ended("old")
    waiting = flight("new")
    bed.flights.add(waiting, 10)
    waiting.way.queue_s = 2.5
    found = bed.find()
    assert [(one.id, one.state, one.queue_ms) for one in found] == [("new", "waiting", 2_500.0), ("old", "stop", 0.0)]


def test_only_the_last_ends_are_remembered_the_latest_first() -> None:
    bed = Testbed(capacity=3)
    for number in range(5):
        bed.ended(f"r{number}")
    assert bed.ids() == ["r4", "r3", "r2"]
    assert bed.ids(id="r1") == []
    bed.ended("r3", errors.Code.NO_WORKER)
    bed.ended("r5")
    assert [(one.id, one.code) for one in bed.find(id="r3")] == [("r3", "no_worker")], "the last one of that id"
    assert len(bed.traces) == 3


def test_a_tenant_with_many_requests_makes_the_router_forget_none_of_the_others() -> None:
    bed = Testbed(capacity=6)
    bed.ended("a", tenant="acme")
    bed.ended("b", tenant="globex")
    for number in range(20):
        bed.ended(f"r{number}")
    assert (bed.ids("acme"), bed.ids("globex")) == (["a"], ["b"])
    assert bed.ids() == ["r19", "r18", "r17", "r16"]
    for number in range(20):
        bed.ended(f"c{number}", tenant="acme")
    assert [len(bed.ids(tenant)) for tenant in ("acme", "globex", "default")] == [2, 1, 3]
    for number in range(20):
        bed.ended("d", tenant=f"t{number}")
    assert len(bed.traces) == len(bed.traces._ends) == 6


@given(st.lists(st.sampled_from("abcdefg"), max_size=80), st.integers(1, 8))
def test_who_loses_an_end_has_most_of_them_or_more_than_its_share(tenants: list[str], capacity: int) -> None:
    bed, counts = Testbed(capacity), Counter[str]()
    for tenant in tenants:
        bed.ended("r", tenant=tenant)
        counts[tenant] += 1
        now = Counter({one: len(ends) for one, ends in bed.traces._ends.items()})
        if counts.total() > capacity:
            (loser,) = (counts - now).elements()
            has_more_than_its_share = loser == tenant and counts[tenant] * len(counts) > capacity
            assert counts[loser] == max(counts.values()) or has_more_than_its_share
        assert now.total() <= capacity
        assert bed.traces._most == max(now.values())
        counts = now


class Unseen(dict[str, Any]):
    """What nobody may look through."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("somebody looks at every tenant")


def test_an_end_is_forgotten_without_a_look_at_every_tenant() -> None:
    bed = Testbed(capacity=100)
    for number in range(100):
        bed.ended("r", tenant=f"t{number}")
    bed.ended("q", tenant="t7")
    bed.traces._ends = Unseen(bed.traces._ends)
    bed.ended("r", tenant="new")
    assert len(bed.traces) == 100


def test_a_tenant_finds_its_own_requests_only_and_none_by_a_part_of_an_id() -> None:
    bed = Testbed()
    bed.ended("r1", tenant="acme")
    bed.ended("r1-2f", tenant="globex")
    bed.ended("r10", tenant="globex")
    assert bed.ids("acme") == ["r1"]
    assert bed.ids("globex", id="r1") == ["r1-2f"], "what a gateway has added to its client's id is found, too"
    assert bed.ids("globex", id="r10") == ["r10"]
    assert bed.ids("acme", id="r1-2f") == bed.ids("glob", id="r1") == bed.ids() == []


def test_errors_and_slow_requests_can_be_asked_for_alone() -> None:
    bed = Testbed()
    bed.ended("failed", errors.Code.NO_WORKER)
    quick = flight("quick", received_at=0.0)
    placed(quick, "w1", 0.001)
    quick.way.accepted("w1", 0.002)
    quick.completion.first_token = internal.FirstToken(stream_no=1, cached_tokens=0, queue_ms=5.0, prefill_ms=5.0)
    bed.ends.tell_flight(quick, "stop")
    assert bed.ids(failed=True) == ["failed"]
    assert bed.ids(slower_than_ms=100.0) == ["failed"], "it has waited for a first token all its time"
    assert bed.ids(slower_than_ms=10.0) == ["quick", "failed"]


def test_an_answer_that_would_not_fit_in_a_message_is_cut_and_says_so() -> None:
    bed = Testbed(capacity=100, max_payload=12_000)
    for number in range(60):
        bed.ended(f"r{number}")
    bed.traces.answer("_INBOX.a", messages.TraceRequest(limit=60), codec.Encoding.JSON, "default")
    (reply,) = bed.sent
    assert 1 <= len(reply.requests) < 60
    assert reply.truncated
    assert reply.requests[0].id == "r59"


def test_a_request_that_many_workers_refuse_keeps_its_first_and_last_steps() -> None:
    way = Way()
    for number in range(3 * MAX_STEPS):
        way.add(Placement(known(FLEET, "w1"), f"policy {number}"), float(number), 0)
        way.refused("overloaded")
    policies = [one.policy for one in way.attempts(0.0)]
    assert len(policies) == MAX_STEPS
    assert (policies[0], policies[-1]) == ("policy 0", f"policy {3 * MAX_STEPS - 1}")


def test_a_trace_keeps_nothing_long_of_what_a_worker_reports() -> None:
    bed, one = Testbed(), flight("r1")
    one.end = internal.StreamEnd(
        id=one.key,
        router_id="router-1",
        finish_reason=messages.FinishReason.STOP,
        code="x" * 100_000,
        completion_tokens=9,
        gaps=GAPS + [1] * 100_000,
    )
    bed.ends.tell_ended_by_worker(one)
    (kept,) = bed.traces._ends["default"]
    assert kept.end is not None
    assert len(codec.encode(kept.end)) < 1_000
    assert bed.find()[0].gaps == GAPS
