"""Knows which workers of a model run at another site than the router that places, and what that costs."""

from typing import NamedTuple

import numpy as np

from tokenbus.protocol.wire import messages
from tokenbus.router.placement.worker_table import Floats, Rows

_UNKNOWN_TOKEN_S = 0.001
"""The time to compute a prompt token before any has been observed."""


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

    def __repr__(self) -> str:
        return f"<Distances of {int(self._is_distant.sum())} from {self._own_site.name!r}>"

    def set_worker(self, row: int, card: messages.Card | None) -> None:
        """Records what a worker's card says; without a card the row has no worker."""
        if row >= len(self._is_distant):
            self._is_distant = np.append(self._is_distant, np.zeros(row + 1 - len(self._is_distant)))
        self._is_distant[row] = card is not None and self._own_site.is_other(card)

    def in_tokens(self, rows: Rows, prefill_s: Floats) -> Floats | None:
        """Returns how many prompt tokens the fastest worker could compute in the time by which each row counts as
        slower; None if all are near. `prefill_s` is the time that each row takes for a token, 0 if unknown."""
        distant: Floats = self._is_distant[rows]
        if not distant.any():
            return None
        fastest_s = float(prefill_s.min(initial=_UNKNOWN_TOKEN_S, where=prefill_s > 0))
        return distant * (self._own_site.cost_s / fastest_s)
