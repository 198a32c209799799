"""Publishes a worker's card and its event log.

The event log tells routers which blocks are cached, which requests started, sent their first token and finished, and
how busy the engine is. Its messages are numbered without gaps, so that a router that misses one can ask for a snapshot.
An event with nothing new is a heartbeat."""

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence

import msgspec
import xxhash

from tokenbus.protocol.bus.bus import Bus, OutboundBufferLimitError, Outgoing
from tokenbus.protocol.prompt import tokenizer_bundle
from tokenbus.protocol.wire import block_hash, codec, internal, limits, messages, subjects
from tokenbus.worker.broker.event_log import Ends, EventLog, PublishedBlocks, SampledTokens, split_snapshot
from tokenbus.worker.broker.replica_state import ReplicaEvent, ReplicaState, Serving, after
from tokenbus.worker.contract import contract

_NO_HEARTBEAT_S = 0.2 * limits.HEARTBEAT_S
"""An event that is younger makes a heartbeat unnecessary: the next tick still comes within the promised interval."""
_MAX_ENDED_EPOCHS = 16
"""The number of this process's ended epochs that a card lists."""


def new_epoch() -> str:
    """Returns `<unix ms>-<random>`, which is greater for a later epoch."""
    return f"{time.time_ns() // 1_000_000}-{secrets.token_hex(4)}"


class Announcer:
    """Collects what happens and publishes it in the next event; holds it back while the broker is away."""

    def __init__(
        self,
        connection: Bus,
        names: subjects.Subjects,
        model: str,
        worker_id: str,
        role: messages.WorkerRole = messages.WorkerRole.BOTH,
        site: str = "",
        epoch: str | None = None,
        process: str = "",
        process_run: str = "",
    ) -> None:
        """`process` speaks for the worker while it is idle, and hears that `process_run` is alive."""
        self._connection = connection
        self._names = names
        self._card_subject = names.card(model, worker_id)
        self._events_subject = names.events(model, worker_id)
        self._unheard_subject = names.unheard(model, worker_id)
        self._seal_subject = names.seal(model, worker_id)
        self.model = model
        self.worker_id = worker_id
        self._role = role
        self._process = process
        self.process_run = process_run
        self._site = site
        self.epoch = new_epoch() if epoch is None else epoch
        self.state = ReplicaState.STARTING
        self.serving: Serving | None = None
        """The engine that serves; None while there is none."""
        self.last_served: Serving | None = None
        """The same or, while there is none, the one before: open streams can still be ended there."""
        self.listing: contract.EngineConfig | None = None
        """Stands in for the configuration of an engine that has never served."""
        self._digest: str | None = None
        """That of the tokenizer of the last engine."""
        self.adapters: Callable[[], list[messages.CardAdapter]] = list
        """Returns the adapters to show in the card."""
        self.has_streams: Callable[[], bool] = lambda: False
        """Returns whether any stream is open, so that the broker is to report at once if no router hears the events."""
        self.health: messages.WorkerHealth | None = None
        """Memory and uptime as last read."""
        self.published_at = 0.0
        """When the last event was published, by `time.monotonic`."""
        self._published_load: messages.Load | None = None
        self.is_muted = False
        """Whether nothing may be published: the old epoch is over and the new one has no connection yet."""
        self._published_blocks = PublishedBlocks()
        self.log = EventLog(worker_id, self.epoch)
        """The news since the last event. Call `publish_events` after adding what can't wait."""
        self._ended_epochs: list[messages.PreviousEpoch] = []
        """The epochs that this process has ended, the latest first."""

    def __repr__(self) -> str:
        return f"<Announcer {self.worker_id} {self.state} {self.log!r}>"

    def gone_subject(self, key: str) -> str:
        """Returns the subject on which the broker reports that a chunk of this request found no subscriber."""
        return self._names.gone(self.model, self.worker_id, key)

    def start_epoch(self, epoch: str) -> None:
        """Ends the epoch, begins this one, and mutes the announcer until `announce_epoch`."""
        self.is_muted = True
        last_written = self.log.last_written(self._connection.num_writes)
        ended = messages.PreviousEpoch(epoch=self.epoch, seq=last_written)
        self._ended_epochs = [ended, *self._ended_epochs[: _MAX_ENDED_EPOCHS - 1]]
        self.epoch = epoch

    def announce_epoch(self) -> None:
        """Publishes the new epoch's card and first event, which stores every cached block again; no request
        survives."""
        # routers know nothing of the new epoch: it has to store every block again
        self.log = EventLog(self.worker_id, self.epoch, self._published_blocks.pairs())
        self.is_muted = False
        self.publish_card()
        self.publish_events()

    def snapshot(
        self, running: list[internal.RunningRequest], ends: Sequence[internal.StreamEnd] = ()
    ) -> list[internal.SnapshotPart]:
        """Returns everything that the worker holds after its last event, and these ends; or nothing before it has a
        card."""
        if self._config is None or self.is_muted:
            return []
        # a snapshot continues the event log, so what is pending has to be in the log first
        self.publish_events()
        return split_snapshot(
            self.worker_id,
            self.epoch,
            self.log.next_seq - 1,
            running,
            self._published_blocks.runs(),
            self._load(),
            ends,
        )

    @property
    def has_card(self) -> bool:
        """Whether there is something to announce; before that, no router knows of this worker."""
        return self._config is not None

    @property
    def _config(self) -> contract.EngineConfig | None:
        """The configuration to show in the card; None before there is one."""
        return self.last_served.config if self.last_served is not None else self.listing

    def engine_started(self, serving: Serving) -> None:
        """Announces that a new engine serves."""
        self.serving = self.last_served = serving
        bundle = serving.engine.tokenizer_bundle()
        self._digest = tokenizer_bundle.bundle_digest(bundle) if bundle else None
        self.change(ReplicaEvent.ENGINE_SERVES)

    def engine_died(self) -> None:
        """Announces that there is no engine, and that its cache is lost."""
        self.serving = None
        self._published_blocks.clear()
        self.log.blocks_cleared()
        self.change(ReplicaEvent.ENGINE_DIED)

    def change(self, event: ReplicaEvent) -> None:
        """Changes the state, and publishes it at once."""
        self.state = after(self.state, event)
        self.publish_card()
        self.publish_events()

    def publish_card(self) -> None:
        """Publishes the card, once a first engine has started or the model is loadable."""
        if self._config is not None and not self.is_muted:
            with contextlib.suppress(OutboundBufferLimitError):  # the broker is away: reconnecting publishes the card
                self._connection.publish(self._card_subject, codec.encode(self._card(self._config)))

    def blocks_changed(self, removed: list[int], stored: list[tuple[int, int]]) -> None:
        """Puts removed and newly cached blocks into the next event, each with the hash of the block before it."""
        self._published_blocks.apply(removed, stored)
        self.log.blocks_changed(removed, stored)

    def num_held(self, hashes: Sequence[int]) -> int:
        """Returns how many of a prompt's leading blocks are cached here."""
        return self._published_blocks.num_leading(hashes)

    def publish_events(self) -> None:
        """Publishes what has happened since the last event, in as many events as necessary. If the broker is away, the
        next events carry all of it."""
        if self._config is None or self.is_muted:
            return
        while True:
            entry = self.log.make(self._load(), self.state.on_wire)
            # one event is enough, unless there is more than fits
            if not self._publish([entry], [self._to_message(entry)]) or self.log.is_empty:
                return

    def publish_step(self, sampled: Sequence[SampledTokens], chunks: Sequence[Outgoing], ended: Ends) -> bool:
        """Publishes chunks between what routers must learn before and after them, all or nothing: an event for each of
        `sampled`, the chunks, and events with the requests that they end, or else a seal.

        Returns whether it was published. If not, the broker is away: try again later."""
        if self._config is None or self.is_muted:
            return False
        if self.log.exceeds_one_entry:
            self.publish_events()
            if self.log.exceeds_one_entry:
                return False
        before, behind = self._step_entries(sampled, ended)
        outgoing = [*map(self._to_message, before), *chunks, *map(self._to_message, behind)]
        if sampled and not behind:
            seal = internal.Seal(epoch=self.epoch, seq=before[-1].seq)
            outgoing.append(Outgoing(self._seal_subject, codec.encode(seal)))
        return self._publish(before + behind, outgoing)

    def _step_entries(
        self, sampled: Sequence[SampledTokens], ended: Ends
    ) -> tuple[list[internal.Events], list[internal.Events]]:
        """Returns the events before a step's chunks and those after them."""
        before: list[internal.Events] = []
        behind: list[internal.Events] = []
        if sampled or self.log.has_news:
            before = [self.log.make(self._load(), self.state.on_wire, sampled[0] if sampled else None)]
            for more in sampled[1:]:
                before.append(self.log.make_next(before[-1], more))
        for some in ended.parts():
            if last := (behind or before)[-1:]:
                behind.append(self.log.make_next(last[0], ended=some))
            else:
                behind.append(self.log.make(self._load(), self.state.on_wire, ended=some))
        return before, behind

    def _publish(self, entries: Sequence[internal.Events], outgoing: Sequence[Outgoing]) -> bool:
        """Publishes messages and counts the entries among them; returns False if the broker is away."""
        try:
            self._connection.publish_all(outgoing)
        except OutboundBufferLimitError:
            return False
        if entries:
            self.log.mark_published(entries, self._connection.num_writes)
            self.published_at, self._published_load = time.monotonic(), entries[-1].load
        return True

    def _to_message(self, entry: internal.Events) -> Outgoing:
        reply = self._unheard_subject if self.has_streams() else ""
        return Outgoing(self._events_subject, codec.encode(entry), reply)

    @property
    def is_idle(self) -> bool:
        """Whether the engine has nothing to do."""
        load = self._load()
        return not (load.running or load.waiting)

    @property
    def last_seq(self) -> int | None:
        """The number of the epoch's last event; None before the first."""
        is_first = self.is_muted or self.log.next_seq == limits.FIRST_EVENT_SEQ
        return None if is_first else self.log.next_seq - 1

    def tick(self, now: float, *, is_silent: bool) -> None:
        """Publishes an event if none was published for a while; if `is_silent`, only if there is something to tell.
        Call it each 0.2 s."""
        has_news = not self.log.is_empty or self._published_load != self._load()
        if (has_news or not is_silent) and now - self.published_at >= _NO_HEARTBEAT_S:
            self.publish_events()

    def _load(self) -> messages.Load:
        return self.serving.engine.load() if self.serving is not None else messages.Load()

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
            state=self.state.on_wire,
            host=socket.gethostname(),
            pids=messages.Pids(front=os.getpid(), engine=config.pid if self.serving is not None else 0),
            versions=config.versions,
            # None tells routers that prefixes can't be reused here
            kv_block_size=config.kv_block_size if config.prefix_cache else None,
            total_kv_blocks=config.total_kv_blocks if config.prefix_cache else None,
            host_kv_blocks=config.host_kv_blocks if config.prefix_cache else None,
            kv_checkpoints=config.checkpoint_sizes is not None,
            kv_identity=config.kv_identity,
            kv_token_bytes=0 if config.kv_format is None else -(-config.kv_format.num_bytes // config.kv_block_size),
            tokenizer_digest=self._digest,
            chat_format_digest=_format_digest(config),
            previous=self._ended_epochs[0] if self._ended_epochs else None,
            earlier=self._ended_epochs[1:],
            adapters=self.adapters(),
            embeddings=config.embeddings,
            role=self._role,
            process=self._process,
            process_run=self.process_run,
            broker=self._connection.broker_id,
            network=self._connection.network,
            site=self._site,
            loadable=self.state.is_loadable,
            takes_passed_on=True,
        )


def _format_digest(config: contract.EngineConfig) -> str | None:
    if config.chat_format is None:
        return None
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(config.chat_format, order="deterministic"))


def _features(config: contract.EngineConfig) -> list[str]:
    """Returns the features of the engine, and those that every frontend adds. None are known before the first load."""
    if not config.features:
        return []
    added = ("explain", "resume") if "generate" in config.features else ("explain",)
    return [*config.features, *added]
