"""A simulated broker and its connections: messages are in order on each connection, in any order between connections,
and may be lost when one breaks."""

import functools
from collections import deque
from collections.abc import Callable, Set
from typing import Protocol

from nats.aio.msg import Msg

from tests.sim.world import Process, World
from tokenbus.protocol.bus import bus

_LINGER_S = 0.05
"""The time that the broker takes to read what is left of a connection that has ended."""


class Owner(Protocol):
    """The end of a connection that is not the broker's."""

    process: Process

    def receive(self, link: "Link", subscription: "Subscription | None", message: Msg | None) -> None:
        """Handles a message or, without one, the answer to a ping."""
        ...

    def broke(self, link: "Link") -> None:
        """Handles the end of a connection."""
        ...


@functools.lru_cache(4_096)
def _matches(pattern: str, subject: str) -> bool:
    mine, tokens = pattern.split("."), subject.split(".")
    for number, one in enumerate(mine):
        if one == ">":
            return number < len(tokens)
        if number >= len(tokens) or (one != "*" and one != tokens[number]):
            return False
    return len(tokens) == len(mine)


class Subscription:
    def __init__(self, subject: str, callback: bus.Callback, queue: str) -> None:
        self.subject = subject
        self.callback = callback
        self.queue = queue

    def takes(self, subject: str) -> bool:
        """Whether it matches a subject."""
        return _matches(self.subject, subject)


class Link:
    """One TCP connection, with a queue of messages each way. Messages in transit are lost when it breaks."""

    def __init__(self, broker: "Broker", owner: Owner) -> None:
        self.broker = broker
        self.owner = owner
        self.subscriptions: list[Subscription] = []
        self.is_open = True
        self.hears = True
        """Whether messages from the broker still arrive."""
        self._stalled: list[Callable[[Link], None]] | None = None
        """Actions sent since the path to the broker was blocked; None while it is open."""
        self._stalled_until = 0.0
        self.lag_s = 0.0
        """The time for which messages from the broker lie unread, in seconds."""
        self._to_broker_at = 0.0
        self._to_owner_at = 0.0

    def stall(self, seconds: float) -> None:
        """Blocks the path to the broker for that time, while the path back stays open."""
        self._stalled = self._stalled or []
        self._stalled_until = max(self._stalled_until, self.broker.world.now + seconds)
        self.broker.world.at(self.broker.world.now + seconds, self._go_on)

    def _go_on(self) -> None:
        if self.broker.world.now < self._stalled_until:
            return
        stalled, self._stalled = self._stalled or [], None
        if self.is_open:
            for action in stalled:
                self.send(action)

    def send(self, action: Callable[["Link"], None]) -> None:
        """Sends to the broker, after everything sent before."""
        if self._stalled is not None:
            self._stalled.append(action)
            return
        world = self.broker.world
        self._to_broker_at = max(self._to_broker_at, world.now + self.broker.delay())
        world.at(self._to_broker_at, lambda: self.broker.take(self, action))

    def deliver(self, subscription: Subscription | None, message: Msg | None) -> None:
        """Sends to the owner, after everything delivered before; without a message it is the answer to a ping."""
        world = self.broker.world
        self._to_owner_at = max(self._to_owner_at, world.now + self.broker.delay() + self.lag_s)
        world.at(self._to_owner_at, lambda: self._arrive(subscription, message))

    def _arrive(self, subscription: Subscription | None, message: Msg | None) -> None:
        if self.hears:
            self.owner.process.call(self.owner.receive, self, subscription, message)


class Broker:
    """Routes messages. It can be paused, and it can die and come back."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.name = "broker"
        self.bridge: Bridge | None = None
        """The link to another broker, if there is one."""
        self.links: list[Link] = []
        self.is_up = True
        self.is_paused = False
        self.slowest_s = 0.002
        self.has_lost_messages = False
        """Whether a connection has ended in a way that may have lost messages."""
        self.before_routing: Callable[[Link, str, bytes], None] = lambda sender, subject, payload: None
        """Called with each message that has arrived, before anybody else gets it. If it cuts the sender's connection
        without lingering, nobody gets the message."""
        self.pick: Callable[[list[tuple[Link, Subscription]]], tuple[Link, Subscription]] = world.rng.choice
        """Chooses the member of a queue group that gets a message."""
        self._waiting: deque[tuple[Link, Callable[[Link], None]]] = deque()
        self._lingering: list[Link] = []
        """Connections that ended while the broker was paused, the rest of which it has yet to read."""

    def delay(self) -> float:
        return self.world.rng.uniform(0.0001, self.slowest_s)

    def take(self, link: Link, action: Callable[[Link], None]) -> None:
        if self.is_paused:
            self._waiting.append((link, action))
        elif link in self.links:
            action(link)

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        """Handles what has arrived meanwhile: in order on each connection, in random order between them."""
        self.is_paused = False
        lines: dict[int, deque[tuple[Link, Callable[[Link], None]]]] = {}
        for link, action in self._waiting:
            lines.setdefault(id(link), deque()).append((link, action))
        self._waiting.clear()
        while lines:
            name = self.world.rng.choice(list(lines))
            self.take(*lines[name].popleft())
            if not lines[name]:
                del lines[name]
        for link in self._lingering:
            self._drop(link)
        self._lingering.clear()

    def die(self) -> None:
        self.is_up = self.is_paused = False
        self._waiting.clear()
        self._lingering.clear()
        for link in list(self.links):
            self.cut(link)

    def restart(self) -> None:
        self.is_up = True

    def cut(self, link: Link, *, lingers: bool = False) -> None:
        """Breaks a connection. With `lingers` the broker still handles what was sent over it, for a moment.

        What lies unread at the owner's side isn't lost: the owner notices the end after reading it."""
        link.is_open = False
        self.has_lost_messages |= not lingers
        if lingers:
            self.world.at(self.world.now + _LINGER_S, lambda: self._drop_later(link))
        else:
            self._drop(link)
        if link.lag_s:
            self.world.at(self.world.now + link.lag_s, lambda: self._end(link))
        else:
            self._end(link)

    def _end(self, link: Link) -> None:
        link.hears = False
        link.owner.process.call(link.owner.broke, link)

    def _drop_later(self, link: Link) -> None:
        """Drops a connection that lingers. A broker that is paused will first read what has arrived over it."""
        if self.is_paused:
            self._lingering.append(link)
        else:
            self._drop(link)

    def _drop(self, link: Link) -> None:
        if link in self.links:
            self.links.remove(link)

    def route(self, sender: Link, subject: str, payload: bytes, reply: str, headers: dict[str, str] | None) -> None:
        self.before_routing(sender, subject, payload)
        if sender not in self.links:
            return
        message = Msg(_client=None, subject=subject, reply=reply, data=payload, headers=headers)  # type: ignore[arg-type]
        queues: dict[tuple[str, str], list[tuple[Link, Subscription]]] = {}
        reached = False
        for link in self.links:
            for subscription in link.subscriptions:
                if not subscription.takes(subject):
                    continue
                reached = True
                if subscription.queue:
                    queues.setdefault((subscription.queue, subscription.subject), []).append((link, subscription))
                else:
                    link.deliver(subscription, message)
        for members in queues.values():
            link, subscription = self.pick(members)
            link.deliver(subscription, message)
        if self.bridge is not None:
            reached |= self.bridge.carry(self, message, {queue for queue, _ in queues})
        if not reached and reply:
            self._notice(sender, reply)

    def take_over(self, message: Msg, without: Set[str]) -> None:
        """Delivers a message that has come from another broker, which has given it to members of some queue groups."""
        queues: dict[tuple[str, str], list[tuple[Link, Subscription]]] = {}
        for link, subscription in self.takers(message.subject, without):
            if subscription.queue:
                queues.setdefault((subscription.queue, subscription.subject), []).append((link, subscription))
            else:
                link.deliver(subscription, message)
        for members in queues.values():
            link, subscription = self.pick(members)
            link.deliver(subscription, message)

    def takers(self, subject: str, without: Set[str]) -> list[tuple[Link, Subscription]]:
        """Returns the subscriptions here to a subject, except those of some queue groups."""
        return [
            (link, subscription)
            for link in self.links
            for subscription in link.subscriptions
            if subscription.takes(subject) and subscription.queue not in (without or {None})
        ]

    def _notice(self, sender: Link, reply: str) -> None:
        message = Msg(_client=None, subject=reply, reply="", data=b"", headers={"Status": "503"})  # type: ignore[arg-type]
        for subscription in sender.subscriptions:
            if subscription.takes(reply):
                sender.deliver(subscription, message)


class Bridge:
    """The link between the brokers of two sites. It can be cut, so that each broker sees that the other's clients are
    not there, and it can stand still, so that neither does, and what is sent arrives later. Before it is cut, it can
    swallow what is sent for a while, as where packets vanish: brokers don't know yet.

    Members of a queue group at the broker that gets a message have precedence."""

    def __init__(self, world: World, here: Broker, there: Broker) -> None:
        self._world = world
        self._brokers = (here, there)
        here.bridge = there.bridge = self
        self.is_up = True
        self.swallows = False
        self.latency_s = 0.0
        self._stands_until = 0.0
        self._generation = 0
        self._arrivals = dict.fromkeys(self._brokers, 0.0)

    def carry(self, sender: Broker, message: Msg, served: Set[str]) -> bool:
        """Takes a message to the other broker; returns whether anybody there seems to want it."""
        here, there = self._brokers
        other = there if sender is here else here
        if not self.is_up or not other.takers(message.subject, served):
            return False
        if self.swallows:
            return True
        begun = max(self._world.now, self._stands_until)
        arrives = max(self._arrivals[other], begun + self.latency_s + other.delay())
        self._arrivals[other] = arrives
        generation = self._generation
        self._world.at(arrives, lambda: self._deliver(generation, arrives, other, message, served))
        return True

    def cut(self, seconds: float) -> None:
        """Loses everything that is on its way, and carries nothing for that time."""
        self.is_up = self.swallows = False
        self._generation += 1
        generation = self._generation
        self._world.at(self._world.now + seconds, lambda: self._restore(generation))

    def vanish(self, seconds: float, cut_s: float) -> None:
        """Swallows everything for some seconds, until brokers notice, and is then cut."""
        self.swallows = True
        self._world.at(self._world.now + seconds, lambda: self.cut(cut_s))

    def stand_still(self, seconds: float) -> None:
        self._stands_until = max(self._stands_until, self._world.now + seconds)

    def heal(self) -> None:
        self.is_up, self.swallows, self._stands_until = True, False, self._world.now

    def _restore(self, generation: int) -> None:
        if generation == self._generation:
            self.is_up = True

    def _deliver(self, generation: int, due_at: float, other: Broker, message: Msg, served: Set[str]) -> None:
        if generation != self._generation:
            return
        if self._world.now < self._stands_until:  # it has stopped since this was sent
            again = max(self._stands_until, due_at)
            self._world.at(again, lambda: self._deliver(generation, again, other, message, served))
            return
        other.take_over(message, served)
