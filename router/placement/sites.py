"""Knows which workers of a model run at another site than the router that places, and what that costs."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tokenbus.protocol.wire import limits, messages
from tokenbus.router.placement.worker_table import Floats, Rows
from tokenbus.router.workers.worker import Worker


class OwnSite(NamedTuple):
    """The site of the router that places: the place where it runs."""

    name: str = ""
    """If empty, all workers count as near."""
    cost_s: float = 0.0
    """Seconds by which a worker of another site counts as slower."""

    def is_other(self, card: messages.Card) -> bool:
        """Whether a worker says that it runs elsewhere."""
        return bool(self.name and card.site) and card.site != self.name


class Distances:
    """The workers of one model at other sites, by row."""

    def __init__(self, own_site: OwnSite) -> None:
        self._own_site = own_site
        self._is_distant = np.zeros(0)
        self._has_distant = False

    def __repr__(self) -> str:
        return f"<Distances of {int(self._is_distant.sum())} from {self._own_site.name!r}>"

    def set_worker(self, row: int, card: messages.Card | None) -> None:
        """Records what a worker's card says; without a card the row has no worker."""
        if row >= len(self._is_distant):
            self._is_distant = np.append(self._is_distant, np.zeros(row + 1 - len(self._is_distant)))
        self._is_distant[row] = card is not None and self._own_site.is_other(card)
        self._has_distant = bool(self._is_distant.any())

    def in_seconds(self, rows: Rows) -> Floats | None:
        """Returns the seconds by which each row counts as slower; None if all are near."""
        if not self._has_distant:
            return None
        distant: Floats = self._is_distant[rows]
        return distant * self._own_site.cost_s if distant.any() else None


class HeardSites:
    """Knows when the workers of each site were last heard."""

    def __init__(self) -> None:
        self._heard_at: dict[str, float] = {}
        self._looked_at = -math.inf

    def __repr__(self) -> str:
        return f"<HeardSites {sorted(self._heard_at)}>"

    def is_heard_after(self, lost: Worker, workers: Iterable[Worker], now: float) -> bool:
        """Whether any of these workers, of the site of one that is lost, is heard, and was heard so long after it that
        not both can have fallen silent at the same moment."""
        if now - self._looked_at >= limits.TICK_S:  # not all of them for each of a lost worker's streams
            self._looked_at, self._heard_at = now, {}
            for one in workers:
                site = one.card.site
                self._heard_at[site] = max(self._heard_at.get(site, -math.inf), one.last_seen_at)
        heard_at = self._heard_at.get(lost.card.site, -math.inf)
        return heard_at >= max(lost.last_seen_at + limits.BEAT_S, now - limits.WORKER_LOST_AFTER_S)
