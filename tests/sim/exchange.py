"""One scripted exchange: a stream and a whole answer for the library, and a stream for a simple client, through one
router and on one worker. Another router and another worker are running beside them. A fault strikes before a chosen
message."""

from array import array
from collections.abc import Callable

from tests.sim.clients import ClientProcess, SimpleClient, SimplyAsked
from tests.sim.network import Broker, Link
from tests.sim.system import MODEL, FrontendProcess, RouterProcess, kill
from tests.sim.world import World
from tokenbus.protocol.wire import codec, internal, subjects

_NUM_TOKENS = 12
_TOKEN_S = 0.02
_PAUSE_S = 3.0
_NAMES = subjects.Subjects()
_runs = codec.Decoder(internal.Run)
_events = codec.Decoder(internal.Events)
_seals = codec.Decoder(internal.Seal)


class Record:
    """Keeps what the broker has received: one worker's log, and the runs for all workers."""

    def __init__(self, worker_id: str) -> None:
        self._events_subject = _NAMES.events(MODEL, worker_id)
        self._seal_subject = f"{self._events_subject}.seal"
        self._keys: dict[str, str] = {}
        """Request keys by reply subject."""
        self._keys_by_no: dict[int, str] = {}
        """Request keys by stream number."""
        self._token_entries: dict[str, int] = {}
        """The number of the last entry with a token of a request, by request key."""
        self._sealed_seq = -1

    def take(self, subject: str, payload: bytes) -> None:
        if subject.endswith(".run"):
            run = _runs.decode(payload)
            self._keys[run.reply] = run.request_id
        elif subject == self._seal_subject:
            self._sealed_seq = max(self._sealed_seq, _seals.decode(payload).seq)
        elif subject == self._events_subject:
            self._take_entry(_events.decode(payload))

    def was_placed(self, inbox: str) -> bool:
        """Whether a run with this reply subject was sent to a worker."""
        return inbox in self._keys

    def is_sealed(self, inbox: str) -> bool:
        """Whether the log shows that the chunks of all tokens in it have reached the broker."""
        return not self.was_placed(inbox) or self._token_entries.get(self._keys[inbox], -1) <= self._sealed_seq

    def _take_entry(self, entry: internal.Events) -> None:
        self._sealed_seq = max(self._sealed_seq, entry.seq - 1)
        self._keys_by_no |= {started.stream_no: started.id for started in entry.started}
        for stream_no in array("I", entry.stream_nos):
            if stream_no in self._keys_by_no:  # otherwise the entry that named it was lost
                self._token_entries[self._keys_by_no[stream_no]] = entry.seq


class Exchange:
    """The processes of an exchange, and the faults that may strike them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.broker = Broker(world)
        self.workers = [FrontendProcess(world, self.broker, f"w{number}", token_s=_TOKEN_S) for number in range(2)]
        self.worker = self.workers[0]
        self.routers = [RouterProcess(world, self.broker, f"r{number}") for number in range(2)]
        self.router = self.routers[0]
        self.broker.pick = lambda members: members[0]
        self.library = ClientProcess(world, self.broker, "c0")
        self.simple_client = SimpleClient(world, self.broker, "s0")
        self.record = Record(self.worker.name)
        self.struck_at: float | None = None
        self.struck_by = ""
        """The subject of the message before which the fault struck."""
        world.run(0.8)
        # later requests of this session go to the same worker, unless it is busier by more than that is worth
        self.library.ask(1, session_id="one", worker_id=self.worker.name)
        world.run(0.2)

    def __repr__(self) -> str:
        return f"<Exchange {self.library.asked} {self.simple_client.asked}>"

    @property
    def simply_asked(self) -> SimplyAsked:
        return self.simple_client.asked[0]

    def play(self, strike: "Callable[[Exchange], None]", number: int) -> bool:
        """Plays it with a fault before its n-th message; returns False if it has fewer."""
        left = number

        def before_routing(sender: Link, subject: str, payload: bytes) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                self.struck_at, self.struck_by = self.world.now, subject
                strike(self)
            if sender in self.broker.links:
                self.record.take(subject, payload)

        self.broker.before_routing = before_routing
        self.library.ask(_NUM_TOKENS, seed=1, session_id="one")
        self.library.ask(_NUM_TOKENS, seed=2, session_id="one", stream=False)
        self.simple_client.ask(_NUM_TOKENS, seed=3, session_id="one")
        self.world.run(0.01)
        self.world.run_until(self._has_ended)
        self.world.run(0.05)  # until the routers know of it
        return self.struck_at is not None

    def settle(self) -> None:
        """Waits until no process holds a request any more, and until any paused process has run again for a while."""
        self.world.run_until(self._is_idle)
        if self.worker.process.is_paused:
            assert self.struck_at is not None
            self.world.run(self.struck_at + _PAUSE_S + 1.0 - self.world.now)

    def check(self) -> None:
        """Asserts what holds after any fault: no process failed, the library has everything, no rule was broken."""
        for process in self.world.processes:
            assert process.faults == [], process
        for asked in self.library.asked:
            asked.check()
            assert asked.is_whole, asked
        self.simply_asked.check()
        for heard in (*self.library.heard.values(), *self.simple_client.heard.values()):
            heard.check(ends_are_known=not self.broker.has_lost_messages)

    def kill_worker(self, *, lingers: bool = True) -> None:
        kill(self.worker.process, self.worker.bus, self.worker.incoming, lingers=lingers)
        self.workers.remove(self.worker)

    def cut_worker(self, *, lingers: bool) -> None:
        self.worker.bus.cut(lingers=lingers)
        self.worker.incoming.cut(lingers=lingers)
        self.simply_asked.may_have_hole = not lingers

    def pause_worker(self) -> None:
        self.worker.process.is_paused = True
        self.world.at(self.world.now + _PAUSE_S, self._resume_worker)

    def cut_router(self) -> None:
        self.router.bus.cut(lingers=False)

    def kill_router(self) -> None:
        kill(self.router.process, self.router.bus)
        self.routers.remove(self.router)

    def kill_worker_and_router(self) -> None:
        self.kill_worker()
        self.kill_router()

    def drain_worker(self) -> None:
        self.worker.drain()
        self.workers.remove(self.worker)

    def stop_router(self) -> None:
        self.router.leave()
        self.routers.remove(self.router)

    def stop_router_and_worker(self) -> None:
        self.drain_worker()
        self.stop_router()

    def cut_clients(self) -> None:
        self.library.bus.cut(lingers=False)
        self.simple_client.bus.cut(lingers=False)
        self.simply_asked.may_have_hole = True

    def _resume_worker(self) -> None:
        self.worker.process.is_paused = False

    def _has_ended(self) -> bool:
        return not self.library.open() and not self.simple_client.open()

    def _is_idle(self) -> bool:
        loads = [worker.engine.load().running for worker in self.workers if worker.engine is not None]
        return not any(loads) and not any(len(router.router.flights) for router in self.routers)
