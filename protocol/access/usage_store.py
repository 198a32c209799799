"""The bucket in which all routers keep what was used."""

import datetime
from typing import NamedTuple

from tokenbus.protocol.access import usage
from tokenbus.protocol.access.usage import UsageQuery, UsageRow, UsageSum
from tokenbus.protocol.bus.bucket import Bucket, BucketLimits, Entry

BUCKET = "usage"
LIMITS = BucketLimits(max_bytes=256 * 1024 * 1024)
_DAY_S = 86_400.0


class UsageReport(NamedTuple):
    rows: list[UsageRow]
    num_unreadable: int
    """Entries that can't be read, and are not in the sums."""


class UsageStore:
    """Makes, reads and describes the bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def __repr__(self) -> str:
        return f"<UsageStore {self.bucket!r}>"

    async def create(self, num_days: int) -> None:
        """Makes the bucket unless it is there, and has it keep entries for so many days. Raises BucketError."""
        max_age_s = num_days * _DAY_S
        await self.bucket.create(LIMITS._replace(max_age_s=max_age_s))
        await self.bucket.set_max_age(max_age_s)

    async def read_day(self, day: str, query: UsageQuery) -> list[Entry]:
        """Returns a day's entries that a query may be about. Raises BucketError."""
        return (await self.bucket.changes(keys=usage.pattern_of(day, query.tenant, query.key))).entries

    async def report(self, query: UsageQuery) -> UsageReport:
        """Adds up what a query asks for, day by day. Raises BucketError, TooManyRowsError."""
        found = UsageSum(query)
        day, last = usage.to_day(query.first_day), usage.to_day(query.last_day)
        while day <= last:
            for entry in await self.read_day(day.isoformat(), query):
                found.add(entry.key, entry.value)
            found.end_day()
            day += datetime.timedelta(days=1)
        return UsageReport(found.rows(), found.num_unreadable)


def unix_time_of(written_at: str) -> float:
    """Returns the Unix time of a broker's time (RFC 3339, with up to nine decimals). Raises ValueError."""
    seconds, _, rest = written_at.removesuffix("Z").partition(".")
    whole = datetime.datetime.fromisoformat(seconds).replace(tzinfo=datetime.UTC).timestamp()
    return whole + float(f"0.{rest or 0}")
