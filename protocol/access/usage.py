"""Usage: requests and tokens by day, tenant, key and model. Pure.

Each router adds up what it has seen end, and keeps each sum in an entry of its own (a *shard*) of the bucket
`<prefix>_usage`, whose value is always the whole sum: written twice, it is counted once. The key of an entry is
`<day>.<tenant>.<key id>.<model>.<shard>`, and its value has a row for each operation and adapter."""

import datetime
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec

from tokenbus.protocol.wire import subjects

Dimension = Literal["day", "tenant", "key", "model", "adapter", "operation"]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
OTHER = "(other)"
"""Shown in place of a name that is not known: that of a model that nobody serves, and every name beyond what a router
keeps apart."""
MAX_GROUPS = 100_000
"""Rows of one report."""
MAX_DAYS = 3_660
FOLDED = "folded"
"""The shard that holds the sum of others, which are gone."""
_VERSION = 1
_NO_KEY = "-"
_UNKNOWN = "="
"""Stands for an empty name: no name has this token."""
_TOKENS = 5

Number = Annotated[int, msgspec.Meta(ge=0)]


class UsageName(NamedTuple):
    """The name of an entry: what its requests have in common. An empty key id stands for requests without one, other
    empty names for `OTHER`."""

    day: str
    """In UTC, as `2026-11-24`."""
    tenant: str
    key: str
    model: str


class UsageKind(NamedTuple):
    """The name of a row in an entry."""

    operation: str
    """The verb of its subjects: `generate`, `embed`, `rerank`, `tokenize` or `detokenize`."""
    adapter: str = ""
    """The names of its adapters, with `+` between them."""


class Counts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A number of requests, and what they have used."""

    requests: Number = 0
    """All that have ended, also in an error."""
    prompt_tokens: Number = 0
    cached_tokens: Number = 0
    """Those of `prompt_tokens` that did not have to be computed."""
    completion_tokens: Number = 0
    errors: dict[str, Number] = {}
    """The number of those that ended in an error, or were cancelled, by its code."""

    def add(self, other: "Counts") -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens
        for code, number in other.errors.items():
            self.errors[code] = self.errors.get(code, 0) + number

    def subtract(self, other: "Counts") -> None:
        """Takes away what was counted earlier."""
        self.requests -= other.requests
        self.prompt_tokens -= other.prompt_tokens
        self.cached_tokens -= other.cached_tokens
        self.completion_tokens -= other.completion_tokens
        self.errors = {
            code: left for code, number in self.errors.items() if (left := number - other.errors.get(code, 0))
        }

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


Rows = dict[UsageKind, Counts]


def add_rows(rows: Rows, others: Mapping[UsageKind, Counts]) -> None:
    """Adds the counts of other rows to those of the same kind."""
    for kind, counts in others.items():
        rows.setdefault(kind, Counts()).add(counts)


class _Row(Counts, kw_only=True, omit_defaults=True):
    operation: str
    adapter: str = ""


class FoldedShard(msgspec.Struct, frozen=True):
    """An entry that is about to be removed, with what it said."""

    revision: int
    rows: list[_Row]


class _Entry(msgspec.Struct, kw_only=True, omit_defaults=True):
    v: int = _VERSION
    rows: list[_Row] = []
    pending: dict[str, FoldedShard] = {}
    folded: list[str] = []


class Stored(NamedTuple):
    """The value of an entry."""

    rows: Rows
    pending: dict[str, FoldedShard] = {}
    """In a folded entry: others by shard, whose counts it has as well, unless they are still there."""
    folded: list[str] = []
    """In a folded entry: the shards that are part of its rows. Whatever is in their own entries does not count."""


_entries = msgspec.json.Decoder(_Entry)


def encode_rows(rows: Mapping[UsageKind, Counts]) -> bytes:
    """Encodes the value of an entry that is not folded."""
    return msgspec.json.encode(_Entry(rows=_to_list(rows)))


def encode(stored: Stored) -> bytes:
    """Encodes the value of an entry."""
    return msgspec.json.encode(_Entry(rows=_to_list(stored.rows), pending=stored.pending, folded=stored.folded))


def decode(value: bytes) -> Stored:
    """Reverses `encode`. Raises ValueError."""
    entry = _entries.decode(value)
    return Stored(to_rows(entry.rows), entry.pending, entry.folded)


def to_rows(rows: Iterable[_Row]) -> Rows:
    """Returns rows by their kinds."""
    found: Rows = {}
    for row in rows:
        found.setdefault(UsageKind(row.operation, row.adapter), Counts()).add(row)
    return found


def shard_of(revision: int, rows: Mapping[UsageKind, Counts]) -> FoldedShard:
    return FoldedShard(revision, _to_list(rows))


def _to_list(rows: Mapping[UsageKind, Counts]) -> list[_Row]:
    return [_Row(**kind._asdict(), **msgspec.structs.asdict(counts)) for kind, counts in rows.items()]


def entry_key(name: UsageName, shard: str) -> str:
    """Returns the key of an entry."""
    tenant, model = (subjects.encode_name(one) if one else _UNKNOWN for one in (name.tenant, name.model))
    return f"{name.day}.{tenant}.{subjects.encode_name(name.key) if name.key else _NO_KEY}.{model}.{shard}"


def parse_key(key: str) -> tuple[UsageName, str]:
    """Returns the name and the shard in an entry's key. Raises ValueError."""
    tokens = key.split(".")
    if len(tokens) != _TOKENS:
        raise ValueError(f"{key[:200]!r} is not the key of an entry")
    day, tenant, key_id, model, shard = tokens
    to_day(day)
    names = ["" if one == _UNKNOWN else subjects.decode_name(one) for one in (tenant, model)]
    return UsageName(day, names[0], "" if key_id == _NO_KEY else subjects.decode_name(key_id), names[1]), shard


def pattern_of(day: str | None = None, tenant: str | None = None, key: str | None = None) -> str:
    """Returns the pattern of the keys of entries; None stands for all. An empty `key` is that of requests without."""
    tokens = [
        day or "*",
        "*" if tenant is None else subjects.encode_name(tenant),
        "*" if key is None else subjects.encode_name(key) if key else _NO_KEY,
    ]
    return f"{'.'.join(tokens)}.*.*"


def day_at(unix_time: float) -> str:
    """Returns the day of a Unix time."""
    return datetime.datetime.fromtimestamp(unix_time, datetime.UTC).date().isoformat()


def to_day(text: str) -> datetime.date:
    """Parses a day in the one form that has no other. Raises ValueError."""
    try:
        day = datetime.date.fromisoformat(text)
    except ValueError:
        day = None
    if day is None or day.isoformat() != text:
        raise ValueError(f"must be a day such as 2026-11-24, got {text[:50]!r}")
    return day


class UsageQuery(NamedTuple):
    """Which usage is asked for."""

    first_day: str
    last_day: str
    """This day is included."""
    group_by: tuple[Dimension, ...] = ("day", "model")
    tenant: str | None = None
    """None: all tenants."""
    key: str | None = None
    """None: all keys; empty: requests without a key."""
    model: str | None = None
    operation: str | None = None

    def matches(self, name: UsageName) -> bool:
        return (
            self.first_day <= name.day <= self.last_day
            and self.tenant in (None, name.tenant)
            and self.key in (None, name.key)
            and self.model in (None, name.model)
        )


def check_days(first: str, last: str) -> None:
    """Raises ValueError for days of which there is no usage to report."""
    num_days = (to_day(last) - to_day(first)).days + 1
    if num_days < 1:
        raise ValueError(f"the first day, {first}, is after the last, {last}")
    if num_days > MAX_DAYS:
        raise ValueError(f"at most {MAX_DAYS} days can be reported at a time, not {num_days}")


def parse_group_by(text: str) -> tuple[Dimension, ...]:
    """Parses names of dimensions with commas between them. Raises ValueError."""
    asked = [one.strip() for one in text.split(",") if one.strip()]
    for one in asked:
        if one not in DIMENSIONS:
            raise ValueError(f"must be some of {', '.join(DIMENSIONS)}, got {one[:50]!r}")
    return tuple(one for one in DIMENSIONS if one in asked)


def parse_day(text: str, today: str) -> str:
    """Returns the day that a text means: `2026-11-24`, `today`, `yesterday`, or `7d`: the first of the last 7 days,
    today included. Raises ValueError."""
    back = {"today": 0, "yesterday": 1}.get(text)
    if (
        back is None
        and text.endswith("d")
        and text[:-1].isascii()
        and text[:-1].isdigit()
        and len(text) < len("10000d")
    ):
        back = max(0, int(text[:-1]) - 1)
    if back is not None:
        return (to_day(today) - datetime.timedelta(days=back)).isoformat()
    try:
        return to_day(text).isoformat()
    except ValueError as error:
        raise ValueError(f"{error}, today, yesterday, or a number of days such as 7d") from None


class UsageRow(NamedTuple):
    """One row of a report."""

    group: tuple[str, ...]
    """The values of the dimensions by which it is grouped, in their order; empty for what is not known."""
    counts: Counts


class TooManyRowsError(ValueError):
    """A report would have more than `MAX_GROUPS` rows."""


class UsageSum:
    """Adds up entries. All of a day come together, in the order of their revisions, before those of another."""

    def __init__(self, query: UsageQuery, max_groups: int = MAX_GROUPS) -> None:
        self._query = query
        self._max_groups = max_groups
        self._totals: dict[tuple[str, ...], Counts] = {}
        self._folded: dict[UsageName, Stored] = {}
        self._seen: dict[tuple[UsageName, str], Rows] = {}
        """The rows of the other entries of this day."""
        self.num_unreadable = 0
        """Entries that can't be read."""

    def add(self, key: str, value: bytes | None) -> None:
        """Adds an entry. Raises TooManyRowsError."""
        if value is None:
            return
        try:
            name, shard = parse_key(key)
            stored = decode(value)
        except ValueError:
            self.num_unreadable += 1
            return
        if not self._query.matches(name):
            return
        # each may come again, with more in it, if it was written while entries were read
        if shard == FOLDED:
            self._folded[name] = stored
        else:
            self._seen[name, shard] = stored.rows

    def end_day(self) -> None:
        """Adds the entries of a day to the sums. Raises TooManyRowsError."""
        for name, folded in self._folded.items():
            self._add_rows(name, folded.rows)
            for shard, pending in folded.pending.items():
                if (name, shard) not in self._seen:
                    self._add_rows(name, to_rows(pending.rows))
            for shard in folded.folded:
                self._seen.pop((name, shard), None)
        for (name, _), rows in self._seen.items():
            self._add_rows(name, rows)
        self._folded.clear()
        self._seen.clear()

    def rows(self) -> list[UsageRow]:
        """Returns the sums, ordered by group."""
        return [UsageRow(group, self._totals[group]) for group in sorted(self._totals)]

    def _add_rows(self, name: UsageName, rows: Rows) -> None:
        for kind, counts in rows.items():
            if self._query.operation not in (None, kind.operation):
                continue
            values = {**name._asdict(), **kind._asdict()}
            group = tuple(values[one] for one in self._query.group_by)
            known = self._totals.get(group)
            if known is None:
                if len(self._totals) >= self._max_groups:
                    raise TooManyRowsError(
                        f"more than {self._max_groups} rows: ask for fewer days, or group by less than "
                        f"{', '.join(self._query.group_by)}"
                    )
                known = self._totals[group] = Counts()
            known.add(counts)


def total_of(rows: Iterable[UsageRow]) -> Counts:
    """Returns the sum of all rows."""
    total = Counts()
    for row in rows:
        total.add(row.counts)
    return total


def shown(dimension: Dimension, value: str) -> str:
    """Returns how a value of a group is shown to people and programs."""
    return value or {"tenant": OTHER, "model": OTHER}.get(dimension, "")


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
CSV_COUNTS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "total_tokens", "errors")


def csv_lines(group_by: tuple[Dimension, ...], rows: Iterable[UsageRow]) -> Iterator[str]:
    """Yields the lines of a table as CSV (RFC 4180), the head first.

    Names are made up by others, so one that a spreadsheet could take for a formula gets an apostrophe in front."""
    yield ",".join((*group_by, *CSV_COUNTS)) + "\r\n"
    for group, counts in rows:
        names = [_csv_cell(shown(one, value)) for one, value in zip(group_by, group, strict=True)]
        numbers = (
            *(counts.requests, counts.prompt_tokens, counts.cached_tokens, counts.completion_tokens),
            *(counts.total_tokens, sum(counts.errors.values())),
        )
        yield ",".join((*names, *map(str, numbers))) + "\r\n"


def _csv_cell(text: str) -> str:
    text = f"'{text}" if text.startswith(_FORMULA) else text
    return '"' + text.replace('"', '""') + '"' if any(one in text for one in ',"\r\n') else text
