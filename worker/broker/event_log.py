"""Collects what routers must learn about a worker, and turns it into numbered entries."""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tokenbus.protocol.wire import block_hash, codec, internal, messages
from tokenbus.worker.broker.published_blocks import to_runs
from tokenbus.worker.broker.sampled_tokens import SampledTokens

_HASHES_PER_ENTRY = 512
"""A stored block without a successor in the same run takes about 50 bytes, so an entry, together with a step's tokens,
fits in a message of a broker that allows 64 KiB."""


class Ends(NamedTuple):
    """Requests whose terminals are published together."""

    keys: list[str]
    failed: list[str]
    """Those that failed in a way that need not recur elsewhere."""


NO_ENDS = Ends([], [])


class EventLog:
    """The event log of one epoch. An entry counts once it is marked as published; until then its content is part of the
    next entry made."""

    def __init__(self, worker_id: str, epoch: str, blocks: Iterable[tuple[int, int]] = ()) -> None:
        """Begins with `blocks` in the first entry: for each block, the hash of the block before it and its own."""
        self._worker_id = worker_id
        self._epoch = epoch
        self.next_seq = 0
        self._num_writes = 0
        """The bus's `num_writes` when the newest entry was queued."""
        self._unwritten_seq = 0
        """The number of the first entry queued since that write."""
        self._is_cleared = False
        self._removed: list[int] = []
        self._stored: dict[int, int] = {name: parent for parent, name in blocks}
        self._started: list[internal.Started] = []
        self._finished: list[str] = []
        self._taken: list[str] = []
        self._stranded: list[str] = []
        self._guardians: dict[int, str] = {}
        self._health: messages.WorkerHealth | None = None
        self._fetches: list[internal.Fetched] = []
        self._remote_prefills: list[str] = []

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

    def request_started(self, started: internal.Started) -> None:
        self._started.append(started)

    def request_finished(self, key: str) -> None:
        self._finished.append(key)

    def request_taken(self, key: str) -> None:
        self._taken.append(key)

    def requests_stranded(self, keys: list[str]) -> None:
        self._stranded = keys

    def health_read(self, health: messages.WorkerHealth) -> None:
        self._health = health

    def blocks_fetched(self, fetched: internal.Fetched) -> None:
        self._fetches.append(fetched)

    def remote_prefill_started(self, key: str) -> None:
        self._remote_prefills.append(key)

    def guardian_changed(self, stream_no: int, router_id: str) -> None:
        """Names a stream's new guardian in the next entry."""
        self._guardians[stream_no] = router_id

    @property
    def _has_only_tokens(self) -> bool:
        """Whether the next entry holds only a step's tokens, like most entries."""
        return not (
            self._started
            or self._removed
            or self._stored
            or self._finished
            or self._taken
            or self._stranded
            or self._guardians
            or self._fetches
            or self._remote_prefills
            or self._health
            or self._is_cleared
        )

    @property
    def has_news(self) -> bool:
        """Whether routers must learn something before the same step's chunks are published."""
        return bool(self._started or self._removed or self._stored)

    @property
    def has_blocks(self) -> bool:
        """Whether there are blocks for another entry."""
        return bool(self._removed or self._stored)

    @property
    def exceeds_one_entry(self) -> bool:
        """Whether there are more blocks than fit in one entry."""
        return len(self._removed) + len(self._stored) > _HASHES_PER_ENTRY

    def make(
        self,
        load: messages.Load,
        state: messages.WorkerState,
        sampled: SampledTokens | None = None,
        ended: Ends = NO_ENDS,
    ) -> internal.Events:
        """Returns the next entry: everything that has happened, with the tokens of `sampled` and the ends of requests.

        Blocks that don't fit are left for later entries."""
        entry = self._entry(self.next_seq, load, state, sampled)
        if self._has_only_tokens and not ended.keys:
            return entry
        # removals first: a block may be evicted and stored again within one entry
        removed = self._removed[:_HASHES_PER_ENTRY]
        stored = itertools.islice(self._stored.items(), _HASHES_PER_ENTRY - len(removed))
        return codec.replace(
            entry,
            health=self._health,
            cleared=self._is_cleared,
            removed=removed,
            stored=list(to_runs((parent, name) for name, parent in stored)),
            started=self._started,
            finished=[*self._finished, *ended.keys],
            failed=ended.failed,
            taken=self._taken,
            stranded=self._stranded,
            guardians=self._guardians,
            fetches=self._fetches,
            legs=self._remote_prefills,
        )

    def make_next(
        self, entry: internal.Events, sampled: SampledTokens | None = None, ended: Ends = NO_ENDS
    ) -> internal.Events:
        """Returns the entry to publish together with `entry` and after it."""
        following = self._entry(entry.seq + 1, entry.load, entry.state, sampled)
        return codec.replace(following, finished=ended.keys, failed=ended.failed) if ended.keys else following

    def mark_published(self, entries: Sequence[internal.Events], num_writes: int) -> None:
        """Counts these entries as published. They were queued together, and the first was made by `make`.

        `num_writes` is the number of writes of the bus so far."""
        first = entries[0]
        if num_writes != self._num_writes:
            self._num_writes, self._unwritten_seq = num_writes, first.seq
        self.next_seq = entries[-1].seq + 1
        if self._has_only_tokens:
            return
        self._is_cleared, self._health = False, None
        del self._removed[: len(first.removed)]
        for run in first.stored:
            for name in run.hashes:
                del self._stored[name]
        self._started, self._finished, self._taken, self._guardians = [], [], [], {}
        self._fetches, self._remote_prefills, self._stranded = [], [], []

    def last_written(self, num_writes: int) -> int:
        """Returns the number of the last entry that has left this process, or -1 if none has.

        `num_writes` is the number of writes of the bus so far."""
        return (self._unwritten_seq if num_writes == self._num_writes else self.next_seq) - 1

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
