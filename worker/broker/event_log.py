"""Collects what routers must learn about a worker: numbered entries, and a snapshot in parts of bounded size."""

import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from tokenbus.protocol.wire import block_hash, codec, internal, limits, messages

ItemT = TypeVar("ItemT")


class PublishedBlocks:
    """Maps the hash of each cached block to that of the block before it. The engine's memory bounds its size."""

    def __init__(self) -> None:
        self._parents: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<PublishedBlocks {len(self._parents)}>"

    def apply(self, removed: Iterable[int], stored: Iterable[tuple[int, int]]) -> None:
        """Applies an engine's report: removed hashes, then stored `(parent, hash)` pairs."""
        for name in removed:
            del self._parents[name]
        for parent, name in stored:
            assert name not in self._parents, name
            self._parents[name] = parent

    def num_leading(self, hashes: Iterable[int]) -> int:
        """Returns how many of a prompt's leading blocks are cached."""
        return sum(1 for _ in itertools.takewhile(self._parents.__contains__, hashes))

    def clear(self) -> None:
        """Forgets every block."""
        self._parents.clear()

    def pairs(self) -> Iterator[tuple[int, int]]:
        """Yields `(parent, hash)` of every block, parents first."""
        return ((parent, name) for name, parent in self._parents.items())

    def runs(self) -> list[internal.BlockRun]:
        """Returns every block as runs."""
        return list(to_runs(self.pairs()))


def to_runs(stored: Iterable[tuple[int, int]]) -> Iterator[internal.BlockRun]:
    """Groups `(parent, hash)` pairs into runs in which every block follows the one before it."""
    first, names = 0, list[int]()
    for parent, name in stored:
        if names and parent == names[-1]:
            names.append(name)
            continue
        if names:
            yield internal.BlockRun(parent=first, hashes=names)
        first, names = parent, [name]
    if names:
        yield internal.BlockRun(parent=first, hashes=names)


_TOKEN_BYTES = 8
"""A token takes four bytes for its id, and four for its stream."""
_FIRST_TOKEN_BYTES = 128
"""The most that the report of a first token takes."""


class SampledTokens:
    """The tokens that one entry of the event log will carry, in the order in which they were sampled."""

    def __init__(self) -> None:
        self.stream_nos = array("I")
        self.token_ids = array("I")
        self.logprobs: dict[int, bytes] = {}
        self.first_tokens: list[internal.FirstToken] = []
        self._room_bytes = limits.PART_BYTES // 2

    def __repr__(self) -> str:
        return f"<SampledTokens {len(self.token_ids)}>"

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_full(self) -> bool:
        """Whether further tokens must go into another entry."""
        return self._room_bytes <= 0

    def add(
        self, stream_no: int, token_ids: Iterable[int], logprobs: bytes, first_token: internal.FirstToken | None
    ) -> None:
        """Adds tokens of a stream, with their packed log probabilities and the record of its first token, if any."""
        for token_id in token_ids:
            self.stream_nos.append(stream_no)
            self.token_ids.append(token_id)
            self._room_bytes -= _TOKEN_BYTES
        if logprobs:
            self.logprobs[stream_no] = self.logprobs.get(stream_no, b"") + logprobs
            self._room_bytes -= len(logprobs)
        if first_token is not None:
            self.first_tokens.append(first_token)
            self._room_bytes -= _FIRST_TOKEN_BYTES


def last_of(sampled: list[SampledTokens]) -> SampledTokens:
    """Returns the last entry's tokens, or another's if there is no room."""
    if sampled and not (last := sampled[-1]).is_full:
        return last
    sampled.append(SampledTokens())
    return sampled[-1]


_HASHES_PER_ENTRY = 512
"""A stored block without a successor in the same run takes about 50 bytes, so an entry, together with a step's tokens,
fits in a message of a broker that allows 64 KiB."""
_HASHES_PER_ITEM = 20
"""Anything else in an entry takes the place of so many: a started request takes up to about 1 kB."""
_ITEMS_PER_ENTRY = _HASHES_PER_ENTRY // _HASHES_PER_ITEM
_ENDS_PER_ENTRY = 24
"""A request's end takes at most about 2 kB: its key up to three times, and the rest of its report."""


class _Room:
    """The room that is left in an entry."""

    def __init__(self) -> None:
        self._num_items = _ITEMS_PER_ENTRY

    @property
    def num_hashes(self) -> int:
        """The room for hashes of blocks."""
        return _HASHES_PER_ENTRY - _HASHES_PER_ITEM * (_ITEMS_PER_ENTRY - self._num_items)

    def fill(self, items: list[ItemT]) -> list[ItemT]:
        """Returns as many of `items` as fit, which take that room."""
        fitting = items[: self._num_items]
        self._num_items -= len(fitting)
        return fitting


class Ends(NamedTuple):
    """Requests whose terminals are published together."""

    keys: list[str]
    failed: list[str]
    """Those that failed in a way that need not recur elsewhere."""
    reports: list[internal.StreamEnd]

    def parts(self) -> "Iterator[Ends]":
        """Yields the same requests, as many at a time as fit in an entry."""
        failed = set(self.failed)
        for reports in _parts_of(self.reports, _answer_bytes, _ENDS_PER_ENTRY, limits.MAX_TOLD_ANSWER_BYTES):
            keys = [report.id for report in reports]
            yield Ends(keys, [key for key in keys if key in failed], reports)


NO_ENDS = Ends([], [], [])


class EventLog:
    """The event log of one epoch. An entry counts once it is marked as published; until then its content is part of the
    next entry made."""

    def __init__(self, worker_id: str, epoch: str, blocks: Iterable[tuple[int, int]] = ()) -> None:
        """Begins with `blocks` in the first entry: for each block, the hash of the block before it and its own."""
        self._worker_id = worker_id
        self._epoch = epoch
        self.next_seq = limits.FIRST_EVENT_SEQ
        self._num_writes = 0
        """The bus's `num_writes` when the newest entry was queued."""
        self._unwritten_seq = limits.FIRST_EVENT_SEQ
        """The number of the first entry queued since that write."""
        self._is_cleared = False
        self._removed: list[int] = []
        self._stored: dict[int, int] = {name: parent for parent, name in blocks}
        # what happens is added to these, and is in the next entry
        self.started: list[internal.Started] = []
        """Accepted requests."""
        self.finished: list[str] = []
        """Keys of requests that have ended without a terminal."""
        self.taken: list[str] = []
        """Keys of requests that a router has taken from here."""
        self.stranded: list[str] = []
        """Keys of requests that no engine here can continue, so that routers take them."""
        self.guardians: dict[int, str] = {}
        """The routers that have become guardians, by the number of the stream."""
        self.health: messages.WorkerHealth | None = None
        """Memory and uptime, if they were read."""
        self.fetches: list[internal.Fetched] = []
        """Ended fetches of blocks."""
        self.remote_prefills: list[str] = []
        """Keys of other workers' requests whose prompts the engine has started to compute."""

    def __repr__(self) -> str:
        return f"<EventLog at {self.next_seq}>"

    def blocks_changed(self, removed: list[int], stored: list[tuple[int, int]]) -> None:
        """Puts removed and newly cached blocks into the next entry, the latter each with the hash of the block before
        it."""
        for name in removed:
            if self._stored.pop(name, None) is None:  # otherwise no entry has announced it yet
                self._removed.append(name)
        self._stored |= {name: parent for parent, name in stored}

    def blocks_cleared(self) -> None:
        """Notes that all blocks are gone: the next entry tells routers to forget them, without listing them."""
        self._removed, self._stored, self._is_cleared = [], {}, True

    @property
    def is_empty(self) -> bool:
        """Whether the next entry would be a heartbeat, unless load or state have changed."""
        return self._has_only_tokens

    @property
    def _has_only_tokens(self) -> bool:
        """Whether the next entry holds only a step's tokens, like most entries."""
        return not (
            self.started
            or self._removed
            or self._stored
            or self.finished
            or self.taken
            or self.stranded
            or self.guardians
            or self.fetches
            or self.remote_prefills
            or self.health
            or self._is_cleared
        )

    @property
    def has_news(self) -> bool:
        """Whether routers must learn something before the same step's chunks are published."""
        return bool(self.started or self._removed or self._stored)

    @property
    def exceeds_one_entry(self) -> bool:
        """Whether there is more than fits in one entry."""
        keys = len(self.finished) + len(self.taken) + len(self.stranded) + len(self.remote_prefills)
        num_items = len(self.started) + keys + len(self.guardians) + len(self.fetches)
        return len(self._removed) + len(self._stored) + _HASHES_PER_ITEM * num_items > _HASHES_PER_ENTRY

    def make(
        self,
        load: messages.Load,
        state: messages.WorkerState,
        sampled: SampledTokens | None = None,
        ended: Ends = NO_ENDS,
    ) -> internal.Events:
        """Returns the next entry: everything that has happened, with the tokens of `sampled` and the ends of requests.

        What does not fit is left for later entries."""
        entry = self._entry(self.next_seq, load, state, sampled)
        if self._has_only_tokens and not ended.keys:
            return entry
        room = _Room()
        started = room.fill(self.started)  # first: nothing else is said of a request before its start
        finished, taken, stranded = room.fill(self.finished), room.fill(self.taken), room.fill(self.stranded)
        guardians = dict(room.fill(list(self.guardians.items())))
        fetches, remote_prefills = room.fill(self.fetches), room.fill(self.remote_prefills)
        # removals first: a block may be evicted and stored again within one entry
        removed = self._removed[: room.num_hashes]
        stored = itertools.islice(self._stored.items(), room.num_hashes - len(removed))
        return codec.replace(
            entry,
            health=self.health,
            cleared=self._is_cleared,
            removed=removed,
            stored=list(to_runs((parent, name) for name, parent in stored)),
            started=started,
            finished=[*finished, *ended.keys],
            ends=ended.reports,
            failed=ended.failed,
            taken=taken,
            stranded=stranded,
            guardians=guardians,
            fetches=fetches,
            legs=remote_prefills,
        )

    def make_next(
        self, entry: internal.Events, sampled: SampledTokens | None = None, ended: Ends = NO_ENDS
    ) -> internal.Events:
        """Returns the entry to publish together with `entry` and after it."""
        following = self._entry(entry.seq + 1, entry.load, entry.state, sampled)
        if not ended.keys:
            return following
        return codec.replace(following, finished=ended.keys, ends=ended.reports, failed=ended.failed)

    def mark_published(self, entries: Sequence[internal.Events], num_writes: int) -> None:
        """Counts these entries as published. They were queued together, and the first was made by `make`.

        `num_writes` is the number of writes of the bus so far."""
        first = entries[0]
        if num_writes != self._num_writes:
            self._num_writes, self._unwritten_seq = num_writes, first.seq
        self.next_seq = entries[-1].seq + 1
        if self._has_only_tokens:
            return
        self._is_cleared, self.health = False, None
        del self._removed[: len(first.removed)]
        for run in first.stored:
            for name in run.hashes:
                del self._stored[name]
        del self.started[: len(first.started)]
        del self.finished[: len(first.finished) - len(first.ends)]
        del self.taken[: len(first.taken)]
        del self.stranded[: len(first.stranded)]
        for stream_no in first.guardians:
            del self.guardians[stream_no]
        del self.fetches[: len(first.fetches)]
        del self.remote_prefills[: len(first.legs)]

    def last_written(self, num_writes: int) -> int:
        """Returns the number of the last entry that has left this process, or -1 if none has.

        `num_writes` is the number of writes of the bus so far."""
        last = (self._unwritten_seq if num_writes == self._num_writes else self.next_seq) - 1
        return last if last >= limits.FIRST_EVENT_SEQ else -1

    def _entry(
        self,
        seq: int,
        load: messages.Load,
        state: messages.WorkerState,
        sampled: SampledTokens | None,
    ) -> internal.Events:
        if sampled is None:
            return internal.Events(worker_id=self._worker_id, epoch=self._epoch, seq=seq, load=load, state=state)
        return internal.Events(
            worker_id=self._worker_id,
            epoch=self._epoch,
            seq=seq,
            load=load,
            state=state,
            stream_nos=block_hash.pack_token_ids(sampled.stream_nos),
            token_ids=block_hash.pack_token_ids(sampled.token_ids),
            logprobs=sampled.logprobs,
            first_tokens=sampled.first_tokens,
        )


REQUESTS_PER_PART = 48
"""A running request takes at most about 700 bytes without tokens, so a part stays below `PART_BYTES`."""
TOKEN_BYTES_PER_PART = 8 * 1024
"""Bytes of sampled tokens and their log probabilities, in addition to the rest of `REQUESTS_PER_PART` requests."""
HASHES_PER_PART = 2_560
"""A hash takes 9 bytes and a run of one block about 40, so with `RUNS_PER_PART` a part stays below `PART_BYTES`."""
RUNS_PER_PART = 512


def split_snapshot(
    worker_id: str,
    epoch: str,
    seq: int,
    running: list[internal.RunningRequest],
    runs: list[internal.BlockRun],
    load: messages.Load,
    ends: Sequence[internal.StreamEnd] = (),
) -> list[internal.SnapshotPart]:
    """Returns at least one part; together they state what the worker held after event `seq`, and how those of `ends`
    have ended. A request with many tokens spans several parts, in token order."""
    contents: list[tuple[list[internal.RunningRequest], list[internal.BlockRun], list[internal.StreamEnd]]] = []
    requests = _parts_of(_cut_requests(running), _token_bytes, REQUESTS_PER_PART, TOKEN_BYTES_PER_PART)
    blocks = _parts_of(_cut_runs(runs), lambda run: len(run.hashes), RUNS_PER_PART, HASHES_PER_PART)
    contents += [(part, [], []) for part in requests]
    contents += [([], part, []) for part in blocks]
    contents += [([], [], part) for part in _parts_of(ends, lambda _: 0, REQUESTS_PER_PART, 1)]
    contents = contents or [([], [], [])]
    return [
        internal.SnapshotPart(
            worker_id=worker_id,
            epoch=epoch,
            seq=seq,
            part=number,
            parts=len(contents),
            runs=part_runs,
            running=part_running,
            load=load,
            ends=part_ends,
        )
        for number, (part_running, part_runs, part_ends) in enumerate(contents)
    ]


def _token_bytes(request: internal.RunningRequest) -> int:
    return len(request.token_ids) + len(request.logprobs)


def _cut_requests(running: Iterable[internal.RunningRequest]) -> Iterator[internal.RunningRequest]:
    """Splits requests so that each has at most `TOKEN_BYTES_PER_PART`."""
    for request in running:
        if _token_bytes(request) <= TOKEN_BYTES_PER_PART:
            yield request
            continue
        for at in range(0, len(request.token_ids), TOKEN_BYTES_PER_PART):
            yield codec.replace(request, token_ids=request.token_ids[at : at + TOKEN_BYTES_PER_PART], logprobs=b"")
        for at in range(0, len(request.logprobs), TOKEN_BYTES_PER_PART):
            yield codec.replace(request, token_ids=b"", logprobs=request.logprobs[at : at + TOKEN_BYTES_PER_PART])


def _cut_runs(runs: Iterable[internal.BlockRun]) -> Iterator[internal.BlockRun]:
    """Splits runs so that each has at most `HASHES_PER_PART` hashes."""
    for run in runs:
        for at in range(0, len(run.hashes), HASHES_PER_PART):
            # a split run continues after the last hash of the previous part
            parent = run.hashes[at - 1] if at else run.parent
            yield internal.BlockRun(parent=parent, hashes=run.hashes[at : at + HASHES_PER_PART])


def _answer_bytes(report: internal.StreamEnd) -> int:
    return 0 if report.answer is None else len(codec.encode(report.answer))


def _parts_of(
    items: Iterable[ItemT], size: Callable[[ItemT], int], max_items: int, max_size: int
) -> Iterator[list[ItemT]]:
    """Groups items into parts within both limits."""
    part: list[ItemT] = []
    part_size = 0
    for item in items:
        # a part is full when either limit is reached
        if part and (len(part) == max_items or part_size + size(item) > max_size):
            yield part
            part, part_size = [], 0
        part.append(item)
        part_size += size(item)
    if part:
        yield part
