"""Keeps the results of rounds in a file to which every run appends, one line of JSON for each round."""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from tests.chaos.plans import KINDS
from tests.chaos.reading import Reading

CLIENTS = ("library", "plain", "whole")
MAX_NOTES = 20


class Ends(msgspec.Struct):
    """The ends of the streams of one kind of client, counted."""

    streams: int = 0
    well: int = 0
    """Streams that reached their full length, or that their client has cancelled."""
    wrong: int = 0
    """Streams with a byte that differs from the undisturbed text, or with anything else that must not arrive."""
    parted: int = 0
    """Streams that continued with another token at a near tie."""
    holes: int = 0
    """Streams that lost a message."""
    lost: int = 0
    """Streams that a worker had accepted, and that got no terminal."""
    unanswered: int = 0
    """Requests that no worker had accepted, and that got no terminal."""
    errors: dict[str, int] = {}

    def add(self, reading: Reading, *, was_accepted: bool, was_cancelled: bool = False) -> None:
        self.streams += 1
        self.wrong += bool(reading.problem)
        self.parted += reading.has_parted
        self.holes += reading.has_hole
        if reading.end is None:
            self.lost += was_accepted
            self.unanswered += not was_accepted
        elif reading.end == "length" or (was_cancelled and reading.end == "cancelled"):
            self.well += 1
        else:
            self.errors = {**self.errors, reading.end: self.errors.get(reading.end, 0) + 1}

    def __add__(self, other: "Ends") -> "Ends":
        mine, others = msgspec.structs.asdict(self), msgspec.structs.asdict(other)
        errors = dict(Counter(mine.pop("errors")) + Counter(others.pop("errors")))
        return Ends(errors=errors, **{name: mine[name] + others[name] for name in mine})


class Record(msgspec.Struct, kw_only=True):
    """The result of one round of one kind, with one seed."""

    kind: str
    seed: int
    engine: str
    sizes: str = ""
    """The flags that gave the system another size than the kind's own."""
    faults: int = 0
    ends: dict[str, Ends] = {}
    gaps_ms: list[int] = []
    """The pauses of plain clients' streams before another attempt continued them, at another worker or the same one
    restarted."""
    longest_silence_ms: int = 0
    """The longest time without text in any plain client's stream."""
    longest_stall_ms: int = 0
    """The longest time for which the clients' own process stood still. A broker drops clients that stand still for
    3 s, and what was on its way to them is lost: such a round says more of the machine than of the system."""
    longest_fault_s: float = 0.0
    median_stream_s: float = 0.0
    """The median time in which a stream reached its full length."""
    duration_s: float = 0.0
    failure: str = ""
    """Why the round was given up."""
    notes: list[str] = []
    """The first problems that were found."""
    machine: str
    commit: str
    date: str

    @property
    def title(self) -> str:
        """Returns the kind and the size, as flags: results with the same title add up."""
        return f"{self.kind} {self.sizes}".strip()


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def read(path: Path) -> list[Record]:
    """Returns the records of a file; none if it does not exist. A last line that was cut off is ignored."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [_decoder.decode(line) for line in lines if line]


def append(path: Path, record: Record) -> None:
    """Appends a record, in place of a partial last line that an interrupted run may have left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.read_bytes() if path.exists() else b""
    with path.open("ab") as file:
        file.truncate(whole.rfind(b"\n") + 1)
        file.write(_encoder.encode(record) + b"\n")


def next_round(records: Iterable[Record], kinds: Sequence[str], sizes: str = "") -> tuple[str, int]:
    """Returns what to try next with these sizes: the kind that is furthest from its aim in proportion, and the first
    seed that is new for it."""
    tried: Counter[str] = Counter()
    seeds: dict[str, set[int]] = {kind: set() for kind in kinds}
    for record in (one for one in records if one.sizes == sizes):
        tried[record.kind] += record.faults
        seeds.setdefault(record.kind, set()).add(record.seed)
    kind = min(kinds, key=lambda kind: tried[kind] / KINDS[kind].aim)
    return kind, first_new(seeds[kind])


def first_new(seeds: Collection[int]) -> int:
    return next(seed for seed in range(len(seeds) + 1) if seed not in seeds)


def sum_up(records: Iterable[Record]) -> dict[str, Ends]:
    """Adds up the streams of each kind of client."""
    found = {client: Ends() for client in CLIENTS}
    for record in records:
        for client, ends in record.ends.items():
            found[client] = found.get(client, Ends()) + ends
    return found


def violations(kind: str, ends: Mapping[str, Ends]) -> list[str]:
    """Returns what clients got in rounds of this kind and must not get."""
    rules = KINDS[kind]
    found = []
    for client, one in ends.items():
        is_library = client == "library"
        forbidden = {
            "wrong bytes": one.wrong,
            "holes": one.holes if is_library or not rules.may_lose_messages else 0,
            "lost terminals": one.lost if is_library or not rules.may_lose_messages else 0,
            "without an answer": one.unanswered if is_library or not rules.may_lose_requests else 0,
        }
        forbidden |= {code: count for code, count in one.errors.items() if is_library or code not in rules.errors}
        found += [f"{client}: {count} {what}" for what, count in forbidden.items() if count]
    return found


def percentile(values: Sequence[int], share: float) -> int | None:
    """Returns the smallest value that this share of the values, or more, does not exceed."""
    ranked = sorted(values)
    return ranked[math.ceil(share * len(ranked)) - 1] if ranked else None
