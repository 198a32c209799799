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
            health=self.health,
            cleared=self._is_cleared,
            removed=removed,
            stored=list(to_runs((parent, name) for name, parent in stored)),
            started=self.started,
            finished=[*self.finished, *ended.keys],
            failed=ended.failed,
            taken=self.taken,
            stranded=self.stranded,
            guardians=self.guardians,
            fetches=self.fetches,
            legs=self.remote_prefills,
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
        self._is_cleared, self.health = False, None
        del self._removed[: len(first.removed)]
        for run in first.stored:
            for name in run.hashes:
                del self._stored[name]
        self.started, self.finished, self.taken, self.guardians = [], [], [], {}
        self.fetches, self.remote_prefills, self.stranded = [], [], []

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
