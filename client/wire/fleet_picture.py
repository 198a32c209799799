"""The picture of a fleet that a viewer puts together from digests. Pure.

Several routers may send digests. Of those that serve the same models one is enough, so a viewer chooses."""

from typing import NamedTuple

from msgspec import UNSET

from tokenbus.protocol.wire import codec, messages, rate_limits
from tokenbus.protocol.wire.subjects import WorkerAddress

SILENT_AFTER_S = 3.5
"""A router that has sent nothing for this long is gone, or can't be heard."""
_MAX_ROUTERS = 256


class WorkerView(NamedTuple):
    """A worker as it is now."""

    sheet: messages.WorkerSheet
    numbers: messages.WorkerNumbers
    memory: messages.WorkerMemory | None


class _RouterView:
    """One router, and the workers that its digests have told of."""

    def __init__(self) -> None:
        self.stats: messages.RouterStats | None = None
        self.heard_at = 0.0
        self.life = ""
        self.next = (0, 0)
        """The number and part of the digest that must come next."""
        self.is_complete = False
        self.sheets: dict[int, messages.WorkerSheet] = {}
        self.numbers: dict[int, messages.WorkerNumbers] = {}
        self.memory: dict[int, messages.WorkerMemory] = {}
        self.queues: list[messages.ModelQueue] = []
        self.limits: list[messages.ClientLimits] = []

    def forget_workers(self) -> None:
        self.sheets, self.numbers, self.memory, self.is_complete = {}, {}, {}, False


class FleetPicture:
    """A fleet as seen by one viewer. Times are in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._routers: dict[str, _RouterView] = {}

    def __repr__(self) -> str:
        return f"<FleetPicture of {len(self._routers)} routers>"

    def apply(self, digest: messages.FleetDigest, now: float) -> None:
        """Applies a part of a digest, or a router's answer without workers."""
        if digest.router_id not in self._routers and len(self._routers) >= _MAX_ROUTERS:
            return
        view = self._routers.setdefault(digest.router_id, _RouterView())
        view.heard_at = now
        if digest.router is not UNSET:
            view.stats = digest.router
        if not digest.parts:
            view.limits = digest.limits
            return
        if digest.part == 0:
            view.queues = digest.queues
        if digest.whole and digest.part == 0:
            view.forget_workers()
            view.life = digest.life
        elif (digest.life, digest.seq, digest.part) != (view.life, *view.next):
            view.is_complete = False
            view.next = (-1, 0)
            return
        is_last = digest.part + 1 >= digest.parts
        view.next = (digest.seq + 1, 0) if is_last else (digest.seq, digest.part + 1)
        view.is_complete |= digest.whole and is_last
        view.sheets |= {one.number: one for one in digest.joined}
        view.numbers |= {one.number: one for one in digest.workers}
        view.memory |= {one.number: one for one in digest.memory}
        for number in digest.left:
            for known in (view.sheets, view.numbers, view.memory):
                known.pop(number, None)

    def requests(self, now: float) -> list[messages.FleetRequest]:
        """Returns what is to be asked now, and again every second or two: every router who it is, and the chosen ones
        for their digests."""
        self._routers = {name: view for name, view in self._routers.items() if now - view.heard_at < SILENT_AFTER_S}
        chosen = [
            messages.FleetRequest(router_id=name, whole=not self._routers[name].is_complete) for name in self._chosen()
        ]
        for name, view in self._routers.items():
            if name not in {one.router_id for one in chosen}:  # its digests end, so they are out of date if it returns
                view.forget_workers()
        return [messages.FleetRequest(), *chosen]

    @property
    def is_complete(self) -> bool:
        """Whether all workers are known of which some router can tell."""
        chosen = self._chosen()
        return bool(chosen) and all(self._routers[name].is_complete for name in chosen)

    def routers(self) -> list[messages.RouterStats]:
        """Returns all routers that were heard of lately, by name."""
        return [view.stats for _, view in sorted(self._routers.items()) if view.stats is not None]

    def queues(self) -> dict[str, messages.ModelQueue]:
        """Returns the requests that wait in the routers, by model."""
        found: dict[str, messages.ModelQueue] = {}
        for queue in (queue for view in self._routers.values() for queue in view.queues):
            known = found.get(queue.model, messages.ModelQueue(queue.model, 0, 0))
            progress = known.progress if queue.progress is None else queue.progress
            found[queue.model] = messages.ModelQueue(
                queue.model, known.waiting + queue.waiting, known.held + queue.held, progress
            )
        return found

    def limits(self) -> list[messages.ClientLimits]:
        """Returns the limits that this viewer may see, over all routers; those with most refusals first."""
        found: dict[tuple[str, str], messages.ClientLimits] = {}
        for one in (one for view in self._routers.values() for one in view.limits):
            known = found.get((one.tenant, one.key_id))
            if known is not None:
                told = [limits for limits in (known.rate_limits, one.rate_limits) if limits]
                one = codec.replace(
                    one,
                    rate_limits=codec.unset_if_none(rate_limits.least(told)),
                    open=known.open + one.open,
                    refused=known.refused + one.refused,
                )
            found[one.tenant, one.key_id] = one
        return sorted(found.values(), key=lambda one: (-one.refused, one.tenant, one.key_id))

    def workers(self) -> list[WorkerView]:
        """Returns all workers, ordered by model and name."""
        found: dict[WorkerAddress, WorkerView] = {}
        for view in (self._routers[name] for name in self._chosen()):
            for number, numbers in view.numbers.items():
                if (sheet := view.sheets.get(number)) is not None:
                    address = WorkerAddress(sheet.model, sheet.worker_id)
                    found.setdefault(address, WorkerView(sheet, numbers, view.memory.get(number)))
        return [found[address] for address in sorted(found)]

    def _chosen(self) -> list[str]:
        """Returns the routers whose workers are shown: one that serves all models, or else one for each part; one that
        is already complete before others."""
        order = sorted(self._routers, key=lambda name: (not self._routers[name].is_complete, name))
        by_part: dict[tuple[str, ...], str] = {}
        for name in order:
            stats = self._routers[name].stats
            if stats is not None:
                by_part.setdefault(tuple(sorted(stats.models)), name)
        whole = by_part.get(())
        return list(by_part.values()) if whole is None else [whole]
