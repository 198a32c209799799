"""Which models are loaded and unloaded, and when."""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenbus.protocol.wire import errors
from tokenbus.worker.engine.memory.fit import MemoryNeed
from tokenbus.worker.on_demand.load_plan import LoadPlan, LoadState, LoadStep, Unload

PLENTY = 1 << 40
MIB = 1 << 20


def need(mib: int) -> MemoryNeed:
    return MemoryNeed(weight_bytes=mib * MIB, kv_bytes=0, compute_bytes=0)


def plan_of(budget_mib: int, idle_unload_s: float = 0.0, **needs_mib: int) -> LoadPlan:
    plan = LoadPlan(needs_mib, budget_mib * MIB, idle_unload_s)
    for name, mib in needs_mib.items():
        plan.set_need(name, need(mib))
    return plan


def load(plan: LoadPlan, name: str, now: float) -> None:
    """Has a model loaded that there is room for, and used by one request."""
    assert plan.want(name, now) is None
    assert plan.next_action(now, PLENTY) == LoadStep(name)
    plan.loaded(name, now)
    plan.used(name, idle_since=None)
    plan.used(name, idle_since=now)


def test_a_model_is_loaded_once_for_all_who_want_it() -> None:
    plan = plan_of(100, a=60)
    assert plan.want("a", 1.0) is None
    assert plan.next_action(1.0, PLENTY) == LoadStep("a")
    assert plan.want("a", 1.1) is None
    assert plan.next_action(1.1, PLENTY) is None
    plan.loaded("a", 2.0)
    assert plan.want("a", 2.1) is None
    assert plan.next_action(2.1, PLENTY) is None


def test_models_are_loaded_one_at_a_time_in_the_order_in_which_they_were_asked_for() -> None:
    plan = plan_of(100, a=30, b=30, c=30)
    for at, name in enumerate(("c", "a", "b")):
        plan.want(name, at / 10)
    assert plan.next_action(0.3, PLENTY) == LoadStep("c")
    assert plan.next_action(0.3, PLENTY) is None
    plan.loaded("c", 1.0)
    assert plan.next_action(1.0, PLENTY) == LoadStep("a")
    plan.failed("a", "no such file", 1.5)
    assert plan.next_action(1.5, PLENTY) == LoadStep("b")


def test_what_is_loaded_beside_these_models_is_taken_out_of_their_budget_until_it_is_given_back() -> None:
    plan = plan_of(100, a=50, b=50)
    load(plan, "a", 1.0)
    assert not plan.take(50 * MIB), "a budget of 0 would be none"
    assert plan.take(49 * MIB)
    plan.want("b", 5.0)
    assert plan.next_action(5.0, PLENTY) == Unload("a", "room")
    plan.unloaded("a")
    assert plan.next_action(5.1, PLENTY) == LoadStep("b")
    assert not plan.take(MIB)
    plan.failed("b", "no such file", 6.0)
    assert plan.take(MIB)
    refusal = plan.want("b", 20.0)
    assert refusal is None
    plan.give_back(50 * MIB)
    assert plan.budget_bytes == 100 * MIB
    plan.check_integrity()


def test_without_a_budget_nothing_is_taken() -> None:
    plan = plan_of(0, a=50)
    assert plan.take(1 << 50)
    plan.give_back(1 << 50)
    assert plan.budget_bytes == 0


def test_the_least_recently_used_model_makes_room() -> None:
    plan = plan_of(100, a=50, b=50, c=50)
    load(plan, "a", 1.0)
    load(plan, "b", 2.0)
    plan.used("a", idle_since=3.0)
    plan.want("c", 5.0)
    assert plan.next_action(5.0, PLENTY) == Unload("b", "room")
    assert plan.next_action(5.0, PLENTY) is None
    plan.unloaded("b")
    assert plan.next_action(5.1, PLENTY) == LoadStep("c")


def test_a_model_with_running_requests_keeps_its_place_until_the_first_in_the_order_has_waited_for_long() -> None:
    plan = plan_of(100, a=100, b=100)
    load(plan, "a", 1.0)
    plan.used("a", idle_since=None)
    for tenth in range(50):
        plan.want("b", 2.0 + tenth / 10)
        assert plan.next_action(2.0 + tenth / 10, PLENTY) is None
    plan.want("b", 7.0)
    assert plan.next_action(7.0, PLENTY) == Unload("a", "room")


def test_nothing_is_unloaded_while_that_alone_would_not_make_enough_room() -> None:
    plan = plan_of(100, busy=80, small=20, large=90)
    load(plan, "busy", 1.0)
    load(plan, "small", 1.0)
    plan.used("busy", idle_since=None)
    plan.want("large", 2.0)
    assert plan.next_action(2.0, PLENTY) is None
    plan.used("busy", idle_since=3.0)
    plan.want("large", 3.5)
    assert plan.next_action(3.5, PLENTY) == Unload("small", "room")


def test_a_model_that_was_just_used_or_loaded_stays_for_a_moment() -> None:
    plan = plan_of(100, a=100, b=100)
    plan.want("a", 1.0)
    assert plan.next_action(1.0, PLENTY) == LoadStep("a")
    plan.loaded("a", 2.0)
    plan.want("b", 2.0)
    plan.want("b", 3.9)
    assert plan.next_action(3.9, PLENTY) is None, "its first request is on its way"
    plan.used("a", idle_since=None)
    plan.used("a", idle_since=3.95)
    assert plan.next_action(4.1, PLENTY) is None
    assert plan.next_action(4.15, PLENTY) == Unload("a", "room")


def test_a_model_that_nobody_asks_for_any_more_is_not_loaded() -> None:
    plan = plan_of(100, a=100, b=10)
    plan.want("b", 0.0)
    assert plan.next_action(0.0, PLENTY) == LoadStep("b")
    plan.want("a", 0.1)
    plan.loaded("b", 3.2)
    assert plan.next_action(3.2, PLENTY) is None
    assert plan.state_of("b") is LoadState.LOADED


def test_free_memory_is_needed_only_while_a_model_is_wanted() -> None:
    plan = plan_of(100, idle_unload_s=60.0, a=50, b=20)
    assert not plan.has_wanted
    plan.want("a", 0.0)
    assert plan.has_wanted
    assert plan.next_action(0.1, PLENTY) == LoadStep("a")
    assert not plan.has_wanted
    plan.loaded("a", 1.0)
    plan.want("a", 1.5)
    assert not plan.has_wanted
    assert plan.next_action(62.0, 0) == Unload("a", "idle")


def test_an_idle_model_is_unloaded_after_its_time_and_not_before() -> None:
    plan = plan_of(0, 60.0, a=10, b=10)
    load(plan, "a", 1.0)
    load(plan, "b", 2.0)
    plan.used("b", idle_since=None)
    assert plan.next_action(60.9, PLENTY) is None
    assert plan.next_action(61.0, PLENTY) == Unload("a", "idle")
    assert plan.next_action(1_000.0, PLENTY) is None


def test_a_model_above_the_budget_is_refused_with_the_figures() -> None:
    plan = plan_of(100, fits=100, large=101)
    assert plan.want("fits", 0.0) is None
    refusal = plan.want("large", 0.0)
    assert refusal is not None
    assert refusal.code is errors.Code.INSUFFICIENT_MEMORY
    assert "101 MiB (weights 101 MiB" in refusal.message
    assert "budget for all models is 100 MiB" in refusal.message


def test_a_model_above_the_free_memory_is_refused_once_nothing_is_left_to_unload() -> None:
    plan = plan_of(0, a=10, b=50)
    load(plan, "a", 0.0)
    plan.want("b", 1.0)
    assert plan.next_action(1.0, 45 * MIB) == Unload("a", "room")
    plan.unloaded("a")
    assert plan.next_action(1.0, 49 * MIB) is None
    refusal = plan.want("b", 1.1)
    assert refusal is not None
    assert refusal.code is errors.Code.INSUFFICIENT_MEMORY
    assert "49 MiB of memory are free" in refusal.message
    plan.want("b", 12.0)
    assert plan.next_action(12.0, 50 * MIB) == LoadStep("b")


def test_a_failed_load_is_repeated_to_all_who_ask_and_tried_again_only_after_a_while() -> None:
    plan = plan_of(100, a=10)
    plan.want("a", 0.0)
    plan.next_action(0.0, PLENTY)
    plan.failed("a", "no such file", 1.0)
    refusal = plan.want("a", 10.9)
    assert refusal is not None
    assert "no such file" in refusal.message
    assert plan.next_action(10.9, PLENTY) is None
    assert plan.want("a", 11.0) is None
    assert plan.next_action(11.0, PLENTY) == LoadStep("a")


def test_a_model_whose_size_is_unknown_waits_and_holds_up_no_other() -> None:
    plan = LoadPlan(("a", "b"), 100 * MIB)
    plan.set_need("b", need(10))
    plan.want("a", 0.0)
    plan.want("b", 1.0)
    assert plan.next_action(1.0, PLENTY) == LoadStep("b")
    plan.loaded("b", 1.5)
    plan.set_need("a", need(10))
    assert plan.next_action(1.5, PLENTY) == LoadStep("a")


def test_what_an_operator_wants_unloaded_is_even_if_it_is_busy_and_loaded_again_for_the_next_request() -> None:
    plan = plan_of(100, a=50)
    plan.want("a", 0.0)
    assert plan.next_action(0.0, PLENTY) == LoadStep("a")
    plan.release("a")  # not loaded yet: nothing
    plan.loaded("a", 1.0)
    assert plan.next_action(1.0, PLENTY) is None
    plan.used("a", idle_since=None)
    plan.release("a")
    assert plan.next_action(2.0, PLENTY) == Unload("a", "operator")
    plan.unloaded("a")
    assert plan.next_action(3.0, PLENTY) is None
    plan.want("a", 4.0)
    assert plan.next_action(4.0, PLENTY) == LoadStep("a")
    plan.loaded("a", 5.0)
    assert plan.next_action(5.0, PLENTY) is None


NAMES = ("a", "b", "c", "d")
NEEDS = {"a": 40, "b": 30, "c": 30, "d": 60}


class RandomUse(RuleBasedStateMachine):
    """Models that are asked for, used, loaded and unloaded at random."""

    def __init__(self) -> None:
        super().__init__()
        self.plan = plan_of(100, 30.0, **NEEDS)
        self.now = 0.0
        self.running = dict.fromkeys(NAMES, 0)
        self.idle_since = dict.fromkeys(NAMES, 0.0)

    @rule(name=st.sampled_from(NAMES))
    def ask(self, name: str) -> None:
        self.plan.want(name, self.now)

    @rule(name=st.sampled_from(NAMES))
    def release(self, name: str) -> None:
        self.plan.release(name)

    @rule(seconds=st.floats(0.01, 6.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(name=st.sampled_from(NAMES))
    def begin_request(self, name: str) -> None:
        if self.plan.state_of(name) is LoadState.LOADED:
            self.running[name] += 1

    @rule(name=st.sampled_from(NAMES))
    def end_request(self, name: str) -> None:
        if self.running[name]:
            self.running[name] -= 1
            self.idle_since[name] = self.now

    @rule()
    def act(self) -> None:
        for name in NAMES:
            if self.plan.state_of(name) is LoadState.LOADED and self.idle_since[name] >= 0:
                self.plan.used(name, idle_since=None if self.running[name] else self.idle_since[name])
        busy = {name for name in NAMES if self.running[name]}
        match self.plan.next_action(self.now, PLENTY):
            case LoadStep(name):
                assert not busy & {name}
            case Unload(name, "idle"):
                assert name not in busy
            case _:
                pass

    @precondition(lambda self: any(self.plan.state_of(name) is LoadState.LOADING for name in NAMES))
    @rule(succeeds=st.booleans())
    def end_load(self, succeeds: bool) -> None:
        name = next(name for name in NAMES if self.plan.state_of(name) is LoadState.LOADING)
        self.idle_since[name] = self.now
        if succeeds:
            self.plan.loaded(name, self.now)
        else:
            self.plan.failed(name, "it broke", self.now)

    @rule()
    def end_unload(self) -> None:
        for name in NAMES:
            if self.plan.state_of(name) is LoadState.UNLOADING and not self.running[name]:
                self.plan.unloaded(name)

    @invariant()
    def is_consistent(self) -> None:
        self.plan.check_integrity()
        assert all(self.plan.state_of(name) is not LoadState.UNLOADED for name in NAMES if self.running[name])

    def teardown(self) -> None:
        """Whatever has happened, each model that is asked for is loaded once all requests end."""
        for name in NAMES:
            self.running[name] = 0
        self.now += 20.0  # failures are forgotten
        for name in NAMES:
            for _ in range(40):
                if self.plan.want(name, self.now) is None and self.plan.state_of(name) is LoadState.LOADED:
                    break
                self.now += 0.3
                self.act()
                self.end_unload()
                if LoadState.LOADING in map(self.plan.state_of, NAMES):
                    self.end_load(succeeds=True)
            assert self.plan.state_of(name) is LoadState.LOADED, self.plan


TestRandomUse = RandomUse.TestCase
