"""Publishes a worker's card and its event log.

The event log tells routers which blocks are cached, which requests started, sent their first token and finished, and
how busy the engine is. Its messages are numbered without gaps, so that a router that misses one asks for a snapshot. An
event with nothing new is a heartbeat."""

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
import time

from tokenbus.protocol.bus.bus import Bus, OutboundBufferLimitError
from tokenbus.protocol.wire import block_hash, codec, internal, limits, messages, subjects
from tokenbus.worker import contract
from tokenbus.worker.broker.published_blocks import PublishedBlocks, to_runs
from tokenbus.worker.broker.snapshot import split

_HASHES_PER_EVENT = 4_096
"""A stored block that no other follows takes about 50 bytes, so an event stays far below a broker's largest message."""
_HEARTBEAT_INTERVAL_S = 0.8 * limits.HEARTBEAT_S
"""Less than the promised interval, since the event loop may be busy."""


def new_epoch() -> str:
    """Returns `<unix ms>-<random>`, which is larger for a later epoch."""
    return f"{time.time_ns() // 1_000_000}-{secrets.token_hex(4)}"


class Announcer:
    """Collects what happens and publishes it in the next event; holds it back while the broker is away."""

    def __init__(self, connection: Bus, names: subjects.Subjects, model: str, worker_id: str) -> None:
        self._connection = connection
        self._names = names
        self._card_subject = names.card(model, worker_id)
        self._events_subject = names.events(model, worker_id)
        self.model = model
        self.worker_id = worker_id
        self.epoch = new_epoch()
        self.state = messages.WorkerState.STARTING
        self._config: contract.EngineConfig | None = None
        self._digest: str | None = None
        self._engine_pid = 0
        self._engine: contract.Engine | None = None
        self._seq = 0
        self._published_at = 0.0
        self.is_muted = False
        """Nothing is published: the old epoch is over and the new one has no connection yet."""
        self._cleared = False
        self._published_blocks = PublishedBlocks()
        self._removed: list[int] = []
        self._stored: dict[int, int] = {}
        self._started: list[internal.Started] = []
        self._first_token_sent: list[str] = []
        self._finished: list[str] = []

    def __repr__(self) -> str:
        return f"<Announcer {self.worker_id} {self.state} event {self._seq}>"

    def gone_subject(self, key: str) -> str:
        """Returns the subject on which the broker reports that nobody listened to a chunk of this request."""
        return self._names.gone(self.model, self.worker_id, key)

    def start_epoch(self) -> None:
        """Ends this epoch and mutes the announcer until `announce_epoch`."""
        self.is_muted = True
        self.epoch = new_epoch()

    def announce_epoch(self) -> None:
        """Publishes the new epoch's card and first event, which stores every cached block again; no request
        survives."""
        self._seq = 0
        self._started, self._first_token_sent, self._finished = [], [], []
        # routers know nothing of the new epoch: it has to store every block again
        self._removed, self._stored = [], {name: parent for parent, name in self._published_blocks.pairs()}
        self.is_muted = False
        self.publish_card()
        self.publish_events()

    def snapshot(self, running: list[internal.RunningRequest]) -> list[internal.SnapshotPart]:
        """Returns everything that the worker holds after its last event, or nothing before the first engine has
        started."""
        if self._config is None or self.is_muted:
            return []
        # a snapshot continues the event log, so what is pending has to be in the log first
        self.publish_events()
        return split(self.worker_id, self.epoch, self._seq - 1, running, self._published_blocks.runs(), self._load())

    def engine_started(self, engine: contract.Engine, config: contract.EngineConfig, digest: str | None) -> None:
        """Announces that a new engine serves."""
        self._engine, self._config, self._digest, self._engine_pid = engine, config, digest, config.pid
        self.set_state(messages.WorkerState.READY)

    def engine_died(self) -> None:
        """Announces that the engine is restarting and that its cache is lost."""
        self._engine, self._engine_pid = None, 0
        self._published_blocks.clear()
        # `cleared` tells routers to forget all blocks, so none has to be listed
        self._removed, self._stored, self._cleared = [], {}, True
        self.set_state(messages.WorkerState.RESTARTING)

    def set_state(self, state: messages.WorkerState) -> None:
        """Publishes a new state at once."""
        self.state = state
        self.publish_card()
        self.publish_events()

    def publish_card(self) -> None:
        """Publishes the card, once a first engine has started."""
        if self._config is not None and not self.is_muted:
            with contextlib.suppress(OutboundBufferLimitError):  # the broker is away: reconnecting publishes the card
                self._connection.publish(self._card_subject, codec.encode(self._card(self._config)))

    def blocks_changed(self, removed: list[int], stored: list[tuple[int, int]]) -> None:
        """Puts removed and newly cached blocks into the next event, each with the hash of the block before it."""
        self._published_blocks.apply(removed, stored)
        for name in removed:
            if self._stored.pop(name, None) is None:  # else no event has mentioned it yet
                self._removed.append(name)
        self._stored |= {name: parent for parent, name in stored}

    def request_started(self, key: str, prompt_tokens: int) -> None:
        """A request was accepted. Call `publish_events` at once, before its head is published."""
        self._started.append(internal.Started(id=key, prompt_tokens=prompt_tokens, overlap_blocks=0))

    def first_token_sent(self, key: str) -> None:
        """A stream is about to send its first token. Call `publish_events` before that chunk is published."""
        self._first_token_sent.append(key)

    def request_finished(self, key: str) -> None:
        """A stream has ended. Call `publish_events` after its terminal is published."""
        self._finished.append(key)

    @property
    def has_events_before_chunks(self) -> bool:
        """Whether routers must learn of something before the chunks of the same step are published."""
        return bool(self._first_token_sent or self._removed or self._stored)

    def publish_events(self) -> None:
        """Publishes what has happened since the last event, in as many events as it takes."""
        if self._config is None or self.is_muted:
            return
        while True:
            # removals first: a block may be evicted and stored again within one event
            removed = self._removed[:_HASHES_PER_EVENT]
            stored = list(itertools.islice(self._stored.items(), _HASHES_PER_EVENT - len(removed)))
            try:
                self._connection.publish(self._events_subject, codec.encode(self._events(removed, stored)))
            except OutboundBufferLimitError:
                return  # the broker is away: the next event carries all of it
            self._mark_published(removed, stored)
            # one event is enough, unless there are more blocks than fit
            if not self._removed and not self._stored:
                return

    async def run_heartbeat(self) -> None:
        """Publishes an event whenever none was published for a while; runs until cancelled."""
        while True:
            due_in_s = self._published_at + _HEARTBEAT_INTERVAL_S - time.monotonic()
            if due_in_s <= 0:
                self.publish_events()
                due_in_s = _HEARTBEAT_INTERVAL_S
            await asyncio.sleep(due_in_s)

    def _mark_published(self, removed: list[int], stored: list[tuple[int, int]]) -> None:
        self._seq += 1
        self._published_at = time.monotonic()
        self._cleared = False
        del self._removed[: len(removed)]
        for name, _ in stored:
            del self._stored[name]
        self._started, self._first_token_sent, self._finished = [], [], []

    def _events(self, removed: list[int], stored: list[tuple[int, int]]) -> internal.Events:
        return internal.Events(
            worker_id=self.worker_id,
            epoch=self.epoch,
            seq=self._seq,
            load=self._load(),
            state=self.state,
            cleared=self._cleared,
            removed=removed,
            stored=list(to_runs((parent, name) for name, parent in stored)),
            started=self._started,
            first_token_sent=self._first_token_sent,
            finished=self._finished,
        )

    def _load(self) -> messages.Load:
        return self._engine.load() if self._engine is not None else messages.Load()

    def _card(self, config: contract.EngineConfig) -> messages.Card:
        return messages.Card(
            worker_id=self.worker_id,
            epoch=self.epoch,
            model=self.model,
            source=config.source,
            engine=config.engine,
            engine_version=config.engine_version,
            context_length=config.context_length,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            hash_scheme=block_hash.scheme_of(config.fingerprint),
            features=_features(config),
            state=self.state,
            host=socket.gethostname(),
            pids=messages.Pids(front=os.getpid(), engine=self._engine_pid),
            versions=config.versions,
            # None tells routers that prefixes can't be reused here
            kv_block_size=config.kv_block_size if config.prefix_cache else None,
            total_kv_blocks=config.total_kv_blocks if config.prefix_cache else None,
            host_kv_blocks=config.host_kv_blocks if config.prefix_cache else None,
            tokenizer_digest=self._digest,
        )


def _features(config: contract.EngineConfig) -> list[str]:
    """Returns the features of the engine, and those that every frontend adds."""
    added = ("explain", "resume") if "generate" in config.features else ("explain",)
    return [*config.features, *added]
