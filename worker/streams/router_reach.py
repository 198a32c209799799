"""Knows which routers can be reached, and which of them are beyond a link between brokers (decision 0012).

A worker asks its guardians, again and again, whether they still guard its streams. An answer says at which *network*
the router is: a cluster of brokers, or a single one. A router of another network than the worker's own is *distant*: a
link lies between them, which may be down while both ends are well. Then the router gives up the worker after two
seconds, although the worker's own broker still answers its pings. So a worker publishes the stream of a distant
guardian only for `FENCE_S` after the guardian has last confirmed it, counted from when it was asked.

If a distant router can't be reached, either that router is gone or the link is down. The link is suspect if no router
of its network can be reached."""

import functools
from collections.abc import Callable

from tokenbus.protocol.wire import subjects
from tokenbus.worker.broker.fence import FENCE_S

_MAX_ROUTERS = 256
_MAX_ASKED = 8
"""The most routers that are asked although they guard no stream here."""
_RECENT_S = 600.0
"""A router that was last heard longer ago says nothing about a link."""
_MAX_OUTSTANDING = 64
_UNNOTICED_S = 1.0
"""Two notices that are further apart say nothing about the time between: distant routers are asked twice a second."""

token_of = functools.lru_cache(1_024)(subjects.escape)


class _Router:
    """One router, as this worker knows it. Times are seconds of `protocol.bus.bus.lease_time`."""

    __slots__ = ("confirmed_at", "heard_at", "network", "router_id", "sent", "unanswered_since", "unheard_at")

    def __init__(self, router_id: str, now: float) -> None:
        self.router_id = router_id
        self.network = ""
        """The network of its broker; empty until it has told it."""
        self.heard_at = now
        self.confirmed_at = now
        """When the newest check was sent that it has answered."""
        self.sent: dict[int, float] = {}
        """When each check without an answer was sent, by number."""
        self.unanswered_since: float | None = None
        """When the first check after the last answer was sent."""
        self.unheard_at: float | None = None
        """When the broker last reported that its subject has no subscriber; None once it has answered again."""

    def is_unreachable(self, now: float) -> bool:
        waited_s = 0.0 if self.unanswered_since is None else now - self.unanswered_since
        return self.unheard_at is not None or waited_s >= FENCE_S


class RouterReach:
    """The routers that have placed requests at one worker, by the tokens of their subjects."""

    def __init__(self, own_network: Callable[[], str]) -> None:
        """`own_network` returns the network of this worker's own broker, as far as it is known."""
        self._own_network = own_network
        self._network = ""
        self._routers: dict[str, _Router] = {}

    def __repr__(self) -> str:
        return f"<RouterReach of {len(self._routers)} routers from {self.network}>"

    @property
    def network(self) -> str:
        """The network of this worker's own broker."""
        self._update_network()
        return self._network

    def _update_network(self) -> None:
        """Brings the networks of near routers up to date: a single broker has another one after a restart, and so have
        the routers that are at the same one."""
        network = self._own_network()
        if network != self._network:
            for router in self._routers.values():
                if router.network == self._network:
                    router.network = network
            self._network = network

    def heard(self, router_id: str, now: float, network: str = "") -> None:
        """Notes that a router has placed a stream here, or taken its guard over: a sign that it can be reached."""
        self._update_network()  # before the router's: both may be at a broker that was restarted
        router = self._routers.pop(token_of(router_id), None) or _Router(router_id, now)
        self._routers[token_of(router_id)] = router  # the last, since it was heard last
        router.heard_at = router.confirmed_at = now
        router.network = network or router.network
        if len(self._routers) > _MAX_ROUTERS:
            del self._routers[next(iter(self._routers))]

    def asked(self, router_id: str, number: int, now: float) -> None:
        """Notes that a check with this number was sent."""
        if (router := self._routers.get(token_of(router_id))) is None:
            return
        router.sent[number] = now
        if len(router.sent) > _MAX_OUTSTANDING:
            del router.sent[next(iter(router.sent))]
        if router.unanswered_since is None:
            router.unanswered_since = now

    def answered(self, token: str, number: int, network: str, now: float) -> None:
        """Notes the answer to a check."""
        self._update_network()
        router = self._routers.get(token)
        if router is None or (sent_at := router.sent.pop(number, None)) is None:
            return
        router.network, router.heard_at, router.unheard_at = network, now, None
        router.confirmed_at = max(router.confirmed_at, sent_at)
        router.sent = {later: at for later, at in router.sent.items() if later > number}
        router.unanswered_since = next(iter(router.sent.values()), None)

    def no_responders(self, token: str, now: float) -> bool:
        """Handles the broker's notice that a router's subject has no subscriber; returns whether it is the first since
        the router has answered, or since checks had neither answers nor notices, as where packets vanish."""
        if (router := self._routers.get(token)) is None:
            return False
        is_first = router.unheard_at is None or now - router.unheard_at >= _UNNOTICED_S
        router.unheard_at = now
        return is_first

    def is_distant(self, router_id: str | None) -> bool:
        """Whether a link lies between this worker and a router."""
        router = self._routers.get(token_of(router_id)) if router_id else None
        return router is not None and self._is_distant(router)

    def publish_until(self, router_id: str | None) -> float:
        """Returns until when a stream of this guardian may be published: `inf` unless it is distant."""
        if not router_id or not self.is_distant(router_id):
            return float("inf")
        return self._routers[token_of(router_id)].confirmed_at + FENCE_S

    def confirms(self, router_id: str | None, now: float) -> bool:
        """Whether a guardian is known to guard its streams still; one that is not distant counts as if it were."""
        is_gone = self.is_distant(router_id) and self._routers[token_of(router_id or "")].unheard_at is not None
        return not is_gone and now < self.publish_until(router_id)

    def has_ruled(self, router_id: str | None, since: float, now: float) -> bool:
        """Whether a guardian has confirmed its streams, or turned out to be gone, in answer to a check that was sent
        after `since`. One that is not distant need not."""
        if not router_id or not self.is_distant(router_id):
            return True
        router = self._routers[token_of(router_id)]
        if router.unheard_at is not None:
            return router.unheard_at >= since
        return since <= router.confirmed_at and now - router.confirmed_at < FENCE_S

    def is_link_suspect(self, now: float) -> bool:
        """Whether there is a network none of whose routers can be reached any more."""
        reachable: dict[str, bool] = {}
        for router in self._recent(now):
            reachable[router.network] = reachable.get(router.network, False) or not router.is_unreachable(now)
        return not all(reachable.values())

    def to_ask(self, now: float) -> list[str]:
        """Returns some distant routers, the last heard first, that show whether their links are up."""
        return [router.router_id for router in reversed(self._recent(now))][:_MAX_ASKED]

    def _recent(self, now: float) -> list[_Router]:
        recent = [one for one in self._routers.values() if now - one.heard_at < _RECENT_S and self._is_distant(one)]
        return sorted(recent, key=lambda router: router.heard_at)

    def _is_distant(self, router: _Router) -> bool:
        own = self.network
        return bool(router.network and own) and router.network != own
