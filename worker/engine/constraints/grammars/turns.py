"""Waiting work, served to tenants in turn."""

from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from typing import Generic, TypeVar

Work = TypeVar("Work")


class TenantTurns(Generic[Work]):
    """Tenants take turns in order of arrival: each gets one piece of work done before the first gets its next."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Work]] = OrderedDict()
        """The work of each tenant; the first tenant is next."""

    def __repr__(self) -> str:
        return f"<TenantTurns, {len(self)} waiting>"

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, tenant: str, work: Work) -> None:
        self._waiting.setdefault(tenant, deque()).append(work)

    def take(self, without: Collection[str] = ()) -> tuple[str, Work] | None:
        """Removes and returns the next work and its tenant; None if only the tenants in `without` have any."""
        tenant = next((tenant for tenant in self._waiting if tenant not in without), None)
        if tenant is None:
            return None
        several = self._waiting.pop(tenant)
        work = several.popleft()
        if several:
            self._waiting[tenant] = several
        return tenant, work

    def remove(self, is_unwanted: Callable[[Work], bool]) -> None:
        """Drops waiting work."""
        for tenant, several in list(self._waiting.items()):
            kept = deque(work for work in several if not is_unwanted(work))
            if kept:
                self._waiting[tenant] = kept
            else:
                del self._waiting[tenant]
