"""Random histories of cards, events and silence keep the fleet consistent."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.router.builders import DRAINING, READY, STOPPED, at, candidates, card, events, expired, known, named, part
from tokenbus.protocol.wire import messages
from tokenbus.router.fleet.fleet import Fleet, FleetUpdate
from tokenbus.router.placement.placement import PlacementRequest

NAMES = ["w1", "w2", "w3"]
EPOCHS = ["1-a", "1-b", "20-a"]


class Expected:
    """The expected state of one worker."""

    def __init__(self, epoch: str, state: messages.WorkerState, now: float) -> None:
        self.epoch, self.state, self.last_seen_at = epoch, state, now
        self.seq = -1
        self.behind = True
        self.reported = 0
        self.bookings: dict[str, float] = {}


class FleetHistory(RuleBasedStateMachine):
    """Compares the fleet with expectations kept by hand. Times are quarters of a second, so that they are exact."""

    @initialize()
    def make(self) -> None:
        self.fleet = Fleet(began_at=0.0)
        self.expected: dict[str, Expected] = {}
        self.superseded_at: dict[tuple[str, str], float] = {}
        self.now = 0.0

    @rule(quarters=st.integers(1, 5))
    def wait(self, quarters: int) -> None:
        self.now += quarters / 4

    @rule(
        name=st.sampled_from(NAMES),
        epoch=st.sampled_from(EPOCHS),
        state=st.sampled_from([READY, READY, DRAINING, STOPPED]),
    )
    def publish_card(self, name: str, epoch: str, state: messages.WorkerState) -> None:
        update = self.fleet.apply_card(card(name, epoch=epoch, state=state), self.now)
        expect = self.expected.get(name)
        lost, left = None, False
        if expect is None:
            if state is not STOPPED:
                self.expected[name] = Expected(epoch, state, self.now)
        elif expect.epoch == epoch:
            expect.state = state
            if state is STOPPED:
                del self.expected[name]
                left = True
        elif state is not STOPPED and (
            EPOCHS.index(epoch) > EPOCHS.index(expect.epoch) or self.now - expect.last_seen_at >= 2
        ):
            lost = (expect.epoch, expect.behind)
            self.superseded_at[name, expect.epoch] = self.now
            self.expected[name] = Expected(epoch, state, self.now)
        assert update.left is left
        assert (update.lost and (update.lost.card.epoch, update.lost.log.is_behind)) == lost

    @rule(
        name=st.sampled_from(NAMES),
        epoch=st.sampled_from(EPOCHS),
        ahead=st.integers(-1, 3),
        running=st.integers(0, 4),
        started=st.sets(st.sampled_from("abc")),
        finished=st.sets(st.sampled_from("abc")),
    )
    def publish_events(
        self, name: str, epoch: str, ahead: int, running: int, started: set[str], finished: set[str]
    ) -> None:
        expect = self.expected.get(name)
        seq = max(0, (expect.seq if expect else -1) + ahead)
        said = events(
            name,
            seq,
            epoch=epoch,
            load=messages.Load(running=running),
            started=tuple(started),
            finished=tuple(finished),
        )
        update = self.fleet.apply_events("demo", said, self.now)
        if expect is None or expect.epoch != epoch:
            is_late = self.now - self.superseded_at.get((name, epoch), -9.0) < 2
            assert (update is not None) == is_late
        elif seq <= expect.seq:
            assert update == FleetUpdate()
        else:
            follows = seq == 0 or (not expect.behind and seq == expect.seq + 1)
            expect.behind = not follows
            assert update == FleetUpdate(known(self.fleet, name), (said,) if follows else (), tuple(finished))
            expect.seq, expect.last_seen_at, expect.state, expect.reported = seq, self.now, READY, running
            for key in started | finished if follows else ():
                expect.bookings.pop(key, None)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), running=st.sets(st.sampled_from("abc")))
    def publish_snapshot(self, data: st.DataObject, running: set[str]) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        expect = self.expected[name]
        asked = name in named(self.fleet.snapshots_due(self.now, 0.0))
        update = self.fleet.apply_snapshot_part(
            "demo", part(name, expect.seq, epoch=expect.epoch, running=tuple(running)), self.now
        )
        assert asked == expect.behind == (update.snapshot is not None)
        expect.last_seen_at, expect.behind = self.now, False
        for key in running if update.snapshot else ():
            expect.bookings.pop(key, None)

    @precondition(lambda self: self.expected)
    @rule(data=st.data(), key=st.sampled_from("abc"))
    def book(self, data: st.DataObject, key: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        self.fleet.book(at(name), PlacementRequest(key, 1), self.now)
        self.expected[name].bookings[key] = self.now

    @rule(name=st.sampled_from(NAMES), key=st.sampled_from("abc"))
    def unbook(self, name: str, key: str) -> None:
        self.fleet.unbook(at(name), key)
        if name in self.expected:
            self.expected[name].bookings.pop(key, None)

    @rule()
    def expire_leases(self) -> None:
        silent = {name for name, expect in self.expected.items() if self.now - expect.last_seen_at >= 2}
        assert self.fleet.has_expired_leases(self.now) == bool(silent)
        assert set(expired(self.fleet, self.now)) == silent
        for name in silent:
            self.fleet.remove(known(self.fleet, name).card)
        for name in silent:
            del self.expected[name]

    @rule()
    def sweep(self) -> None:
        self.fleet.sweep(self.now)
        for expect in self.expected.values():
            expect.bookings = {key: at for key, at in expect.bookings.items() if self.now - at < 5}

    @rule()
    def renew_all_leases(self) -> None:
        self.fleet.renew_all_leases(self.now)
        for expect in self.expected.values():
            expect.last_seen_at = self.now

    @invariant()
    def agrees_with_the_expectations(self) -> None:
        self.fleet.check_integrity()
        assert set(named(self.fleet.workers_of("demo"))) == set(self.expected)
        for name, expect in self.expected.items():
            worker = known(self.fleet, name)
            assert (worker.card.epoch, worker.state, worker.log.is_behind) == (
                expect.epoch,
                expect.state,
                expect.behind,
            )
            assert worker.num_requests == expect.reported + len(expect.bookings)
        may = {name for name, b in self.expected.items() if b.state is READY and self.now - b.last_seen_at < 1}
        assert set(candidates(self.fleet, self.now)) == may


TestFleetHistory = FleetHistory.TestCase
TestFleetHistory.settings = settings(max_examples=80, stateful_step_count=40)
