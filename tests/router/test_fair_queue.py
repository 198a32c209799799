"""The order in which queued requests leave, and which are evicted when there are too many."""

import functools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenbus.router.requests.queueing.fair_queue import QUANTUM_TOKENS, FairQueue, QueuedRequest


def waiting(
    key: str, tenant: str = "a", arrived_at: float = 0.0, tokens: int = 100, priority: int = 0, needs: str | None = None
) -> QueuedRequest:
    return QueuedRequest(key, tenant, arrived_at, tokens, priority, needs)


def filled(*requests: QueuedRequest, max_requests: int = 100, max_tokens: int = 1 << 20) -> FairQueue:
    queue = FairQueue(max_requests, max_tokens)
    for request in requests:
        assert queue.enqueue(request) == []
    return queue


def order(queue: FairQueue) -> str:
    popped = []
    while queue:
        popped.append(queue.pop(0.0).key)
        queue.check_integrity()
    return "".join(popped)


def test_requests_of_a_tenant_leave_in_order_of_arrival() -> None:
    assert (
        order(filled(waiting("x", arrived_at=2.0), waiting("y", arrived_at=1.0), waiting("z", arrived_at=3.0))) == "yxz"
    )


def test_requests_that_have_begun_leave_first_and_count_against_no_limit() -> None:
    queue = filled(waiting("x", tokens=100), max_requests=1, max_tokens=100)
    for name in "bc":
        queue.enqueue_begun(waiting(name, "z", arrived_at=9.0, tokens=1_000))
    assert (len(queue), "b" in queue) == (3, True)
    assert queue.enqueue(waiting("y", arrived_at=1.0)) == [waiting("y", arrived_at=1.0)]
    queue.remove("b")
    queue.check_integrity()
    assert order(queue) == "cx"


def test_one_step_of_priority_is_worth_one_second_of_waiting() -> None:
    early, urgent = waiting("e", arrived_at=0.0), waiting("u", arrived_at=0.9, priority=-1)
    assert order(filled(early, urgent)) == "ue"
    assert order(filled(early, urgent._replace(arrived_at=1.1))) == "eu"


def test_a_tenant_with_many_requests_only_delays_itself() -> None:
    many = [waiting(str(number), "many", tokens=QUANTUM_TOKENS) for number in range(5)]
    few = [waiting(key, "few", arrived_at=9.0, tokens=QUANTUM_TOKENS) for key in "xy"]
    assert order(filled(*many, *few)) == "0x1y234"


def test_tenants_share_the_queue_by_tokens_not_by_requests() -> None:
    large = [waiting(str(number), "large", tokens=4 * QUANTUM_TOKENS) for number in range(3)]
    small = [waiting(chr(97 + number), "small", tokens=QUANTUM_TOKENS) for number in range(12)]
    popped = order(filled(*large, *small))
    assert popped.index("0") <= 5
    assert popped.index("1") in range(7, 11)
    assert popped.index("2") in range(12, 15)


def test_when_full_the_tenant_with_most_tokens_loses_its_last_request() -> None:
    queue = filled(waiting("1", "many"), waiting("2", "many"), waiting("3", "many"), max_requests=3)
    assert [one.key for one in queue.enqueue(waiting("x", "few"))] == ["3"]
    assert [one.key for one in queue.enqueue(waiting("4", "many"))] == ["4"]
    assert [one.key for one in queue.enqueue(waiting("5", "many", priority=-5))] == ["2"]
    assert order(queue) == "51x"


def test_the_token_limit_evicts_likewise_and_a_request_that_can_never_fit_evicts_only_itself() -> None:
    queue = filled(waiting("1", tokens=60), waiting("2", "b", tokens=30), max_tokens=100)
    assert [one.key for one in queue.enqueue(waiting("3", "c", tokens=20))] == ["1"]
    assert [one.key for one in queue.enqueue(waiting("4", "d", tokens=101))] == ["4"]
    assert order(queue) == "23"


def test_a_tenant_without_requests_keeps_no_credit() -> None:
    queue = filled(waiting("1", "a", tokens=1), waiting("2", "b", tokens=1))
    assert order(queue) == "12"
    for request in (waiting("3", "b", tokens=QUANTUM_TOKENS), waiting("4", "a", tokens=QUANTUM_TOKENS)):
        queue.enqueue(request)
    assert order(queue) == "34"


def test_retry_after_is_the_time_in_which_the_queued_requests_will_leave() -> None:
    queue = filled(*[waiting(str(number)) for number in range(60)])
    assert queue.retry_after_ms(0.0) == 1_000.0
    for second in range(50):
        queue.pop(float(second))
    assert queue.retry_after_ms(49.0) == pytest.approx(11_000.0, rel=0.1)


def test_a_request_that_can_not_start_is_overtaken_by_others_of_its_tenant_and_keeps_its_place() -> None:
    queue = filled(
        waiting("x", arrived_at=1.0, needs="adapter"),
        waiting("y", arrived_at=2.0),
        waiting("z", "b", arrived_at=3.0, needs="adapter"),
    )
    queue.enqueue_begun(waiting("w", needs="adapter"))
    popped = queue.pop_startable(0.0, lambda one: one.needs is None)
    assert popped is not None
    assert popped.key == "y"
    assert queue.pop_startable(0.0, lambda one: one.needs is None) is None
    queue.check_integrity()
    assert order(queue) == "wxz"


def test_a_tenant_with_nothing_to_start_saves_no_credit() -> None:
    queue = filled(*[waiting(str(number), "a", tokens=QUANTUM_TOKENS, needs="adapter") for number in range(4)])
    for key in "xyz":
        queue.enqueue(waiting(key, "b", tokens=QUANTUM_TOKENS))
        queue.pop_startable(0.0, lambda one: one.needs is None)
    for key in "xyz":
        queue.enqueue(waiting(key, "b", tokens=QUANTUM_TOKENS))
    assert order(queue) in ("0x1y2z3", "x0y1z23")


class RoundByRound(FairQueue):
    """The queue as it is defined: tenants take turns, and each saves a quantum until one can afford its request."""

    def pop_startable(self, now: float, can_start: Callable[[QueuedRequest], bool]) -> QueuedRequest | None:
        num_idle = 0
        while num_idle < len(self._round):
            tenant = self._tenants[self._round[0]]
            first = tenant.first(can_start)
            if first is not None and first.tokens <= tenant.deficit:
                tenant.deficit -= first.tokens
                return self.remove(first.key)
            tenant.deficit += QUANTUM_TOKENS if first is not None else 0
            num_idle = 0 if first is not None else num_idle + 1
            self._round.rotate(-1)
        return None


def saved(queue: FairQueue) -> list[tuple[str, int]]:
    """Returns what each tenant has saved, in the order of their turns."""
    return [(name, queue._tenants[name].deficit) for name in queue._round]


def _lacks(need: str, request: QueuedRequest) -> bool:
    return request.needs != need


_PUTS = st.tuples(
    st.sampled_from("abcde"), st.integers(0, 20 * QUANTUM_TOKENS), st.sampled_from([None, "one", "other"])
)
_POPS = st.sampled_from(["nothing", "one", "other"])


@given(st.lists(_PUTS | _POPS, max_size=60))
def test_rounds_that_are_skipped_would_have_served_nobody(steps: list[tuple[str, int, str | None] | str]) -> None:
    queue, model = FairQueue(1_000, 1 << 40), RoundByRound(1_000, 1 << 40)
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            tenant, tokens, needs = step
            for one in (queue, model):
                one.enqueue(waiting(str(number), tenant, tokens=tokens, needs=needs))
        else:
            can_start = functools.partial(_lacks, step)
            popped, expected = (one.pop_startable(0.0, can_start) for one in (queue, model))
            assert popped == expected
        assert saved(queue) == saved(model)
    assert [queue.pop(0.0).key for _ in range(len(queue))] == [model.pop(0.0).key for _ in range(len(model))]


def test_what_a_request_costs_does_not_change_what_it_costs_to_choose_it() -> None:
    queue = filled(
        *(waiting(f"{number}", f"t{number}", tokens=100_000) for number in range(200)),
        max_requests=200,
        max_tokens=1 << 30,
    )
    asked: list[str] = []

    def can_start(request: QueuedRequest) -> bool:
        asked.append(request.key)
        return True

    assert queue.pop_startable(0.0, can_start) is not None
    assert sorted(asked) == sorted(f"{number}" for number in range(200))  # once each, and not in each of 391 rounds


class FairQueueHistory(RuleBasedStateMachine):
    """Puts, pops and removals in any order: none is lost or repeated, the limits hold, and no tenant starves."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue(6, 8_000)
        self.inside: dict[str, QueuedRequest] = {}
        self.count = 0
        self.passed_over: dict[str, int] = {}

    @rule(
        tenant=st.sampled_from("abc"),
        tokens=st.integers(1, 5_000),
        arrived_at=st.floats(0, 10),
        priority=st.integers(-3, 3),
        needs=st.sampled_from([None, "one", "other"]),
    )
    def put(self, tenant: str, tokens: int, arrived_at: float, priority: int, needs: str | None) -> None:
        self.count += 1
        request = waiting(str(self.count), tenant, arrived_at, tokens, priority, needs)
        self.inside[request.key] = request
        for refused in self.queue.enqueue(request):
            assert self.inside.pop(refused.key) == refused

    @precondition(lambda self: self.inside)
    @rule()
    def pop(self) -> None:
        popped = self.queue.pop(1.0)
        assert self.inside.pop(popped.key) == popped
        for request in self.inside.values():
            if request.tenant == popped.tenant:
                assert request.arrived_at + request.priority >= popped.arrived_at + popped.priority
        waiting_tenants = {request.tenant for request in self.inside.values()} - {popped.tenant}
        self.passed_over = {tenant: self.passed_over.get(tenant, 0) + popped.tokens for tenant in waiting_tenants}
        assert all(tokens <= 2 * (5_000 + 3 * QUANTUM_TOKENS) + 5_000 for tokens in self.passed_over.values())

    @rule(busy=st.sampled_from([None, "one", "other"]))
    def pop_what_can_start(self, busy: str | None) -> None:
        popped = self.queue.pop_startable(1.0, lambda one: one.needs != busy)
        able = [one for one in self.inside.values() if one.needs != busy]
        assert (popped is None) == (not able)
        self.passed_over.clear()
        if popped is not None:
            assert self.inside.pop(popped.key) == popped
            assert popped.needs != busy
            for request in able:
                if request.tenant == popped.tenant:
                    assert request.arrived_at + request.priority >= popped.arrived_at + popped.priority

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.inside)))
        assert self.queue.remove(key) == self.inside.pop(key)

    @invariant()
    def adds_up(self) -> None:
        self.queue.check_integrity()
        assert len(self.queue) == len(self.inside) <= 6
        assert sum(request.tokens for request in self.inside.values()) <= 8_000
        assert all(key in self.queue for key in self.inside)


TestFairQueueHistory = FairQueueHistory.TestCase
