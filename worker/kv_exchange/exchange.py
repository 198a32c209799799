"""The exchange of KV blocks between this worker and others: fetches for its own requests, and blocks it serves."""

import asyncio
import time
from collections.abc import Callable

import structlog

from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import Bus
from tokenbus.protocol.wire import block_hash, internal, subjects
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.broker.own_subjects import OwnSubjects
from tokenbus.worker.broker.replica_state import Serving
from tokenbus.worker.contract import contract, engine_request
from tokenbus.worker.kv_exchange.fetcher import Fetch, Fetcher
from tokenbus.worker.kv_exchange.holder import Holder, RemotePrefill
from tokenbus.worker.kv_exchange.transport import BlockTransport, Connect
from tokenbus.worker.telemetry.metrics import ReplicaMetrics


class KvExchange:
    """The exchange of one worker. It is idle without an engine, or if its engine exchanges no blocks."""

    def __init__(self, announcer: Announcer, metrics: ReplicaMetrics) -> None:
        self._announcer = announcer
        self._metrics = metrics
        self._holder = Holder(lambda epoch: epoch == announcer.epoch)
        self._holder.on_remote_prefill = self._remote_prefill_changed
        self._transport: BlockTransport | None = None
        self._fetcher: Fetcher | None = None
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._counted_bytes = 0
        self._log = structlog.get_logger().bind(worker_id=announcer.worker_id)

    def __repr__(self) -> str:
        return f"<KvExchange {len(self._fetches)} fetching, {self._holder!r}>"

    @property
    def num_leases(self) -> int:
        """Other workers that are reading blocks here."""
        return self._holder.num_leases

    async def wait_no_leases(self) -> None:
        """Returns when no other worker reads blocks here."""
        await self._holder.none_leased.wait()

    async def open(self, incoming: Bus, names: subjects.Subjects, connect: Connect, own: OwnSubjects) -> None:
        """Serves other workers' requests, which arrive over `incoming`. `connect` opens a connection for blocks."""
        model, worker_id = self._announcer.model, self._announcer.worker_id
        self._transport = BlockTransport(
            incoming, connect, names, model, worker_id, self._holder, lambda: self._is_computing
        )
        self._fetcher = Fetcher(self._transport)
        await self._transport.open(own.serve)

    async def close(self) -> None:
        """Stops serving and fetching."""
        self.engine_changed(None)
        if self._transport is not None:
            await self._transport.close()

    def engine_changed(self, serving: Serving | None) -> None:
        """Serves the blocks of another engine. Fetches for a dead engine end: the next one computes their prompts."""
        self._holder.engine_changed(serving)
        for key in list(self._fetches):
            self.cancel(key)

    def may_fetch(self, run: internal.Run) -> bool:
        """Whether blocks may be fetched for a run before it is computed."""
        return (
            run.fetch_from is not None
            and run.fetch_from.worker_id != self._announcer.worker_id
            and run.params.cache_prompt is not False
            and run.params.prompt_logprobs is None  # these need the prompt to be computed
            and self._fetcher is not None
            and self._fetcher.has_room(run.fetch_from)
            and self._announcer.serving is not None
            and bool(self._announcer.serving.config.kv_identity)
        )

    def start_fetch(
        self, run: internal.Run, request: engine_request.EngineRequest, on_done: Callable[[Fetch], None]
    ) -> None:
        """Fetches blocks for a request that the engine holds back; calls `on_done` at the end, unless cancelled."""

        def failed(_: Exception) -> None:
            if self._fetches.pop(request.key, None) is not None:  # else `on_done` itself has failed
                on_done(Fetch("failed"))

        self._fetches[request.key] = tasks.background("fetch", self._fetch(run, request, on_done), failed)

    def cancel(self, key: str) -> None:
        """Ends the fetch for a request, if there is one."""
        task = self._fetches.pop(key, None)
        if task is not None:
            task.cancel()

    def tick(self, now: float) -> None:
        """Ends unused leases and connections, and counts what others have read."""
        self._holder.tick(now)
        if self._transport is not None:
            given = self._transport.given_bytes
            self._metrics.kv_given_bytes.inc(given - self._counted_bytes)
            self._counted_bytes = given
            self._transport.close_if_idle(now)

    def _remote_prefill_changed(self, remote_prefill: RemotePrefill) -> None:
        """Tells routers that a remote prefill began, so that they count it as load, or that its blocks are ready."""
        if not remote_prefill.outcome:
            self._announcer.log.remote_prefills.append(remote_prefill.request_id)
        else:
            self._metrics.remote_prefills.labels(remote_prefill.outcome).inc()
            self._log.info(
                "remote_prefill_ended",
                request_id=remote_prefill.request_id,
                outcome=remote_prefill.outcome,
                tokens=remote_prefill.num_tokens,
                duration_ms=round(1e3 * (time.monotonic() - remote_prefill.began_at), 1),
            )
        # not now: until the sink has returned, the engine still counts the remote prefill
        asyncio.get_running_loop().call_soon(self._announcer.publish_events)

    @property
    def _is_computing(self) -> bool:
        serving = self._announcer.serving
        return serving is not None and serving.engine.load().running > 0

    async def _fetch(
        self, run: internal.Run, request: engine_request.EngineRequest, on_done: Callable[[Fetch], None]
    ) -> None:
        source, serving = run.fetch_from, self._announcer.serving
        assert source is not None
        assert serving is not None
        assert self._fetcher is not None
        token_ids = run.token_ids + (run.resume_from.token_ids if run.resume_from is not None else b"")
        prefix = contract.CachedPrefix(request.tenant, request.cache_salt, request.adapters, token_ids)
        first = self._num_held(prefix, serving.config)
        fetch = await self._fetcher.fetch(source, prefix, first, serving, request.key, request.priority)
        del self._fetches[request.key]
        self._metrics.kv_fetched_bytes.inc(fetch.num_bytes)
        if source.leg_ms > 0:
            self._metrics.remote_prefills_awaited.labels(fetch.outcome).inc()
        else:
            self._metrics.kv_fetches.labels(fetch.outcome).inc()
            self._metrics.kv_fetch.observe(fetch.seconds)
        self._log.info(
            "blocks_fetched",
            request_id=request.key,
            source=source.worker_id,
            was_remote_prefill=source.leg_ms > 0,
            outcome=fetch.outcome,
            tokens=fetch.num_tokens,
            bytes=fetch.num_bytes,
            duration_ms=round(1e3 * fetch.seconds, 1),
        )
        on_done(fetch)

    def _num_held(self, prefix: contract.CachedPrefix, config: contract.EngineConfig) -> int:
        """Returns how many blocks of a prefix this worker itself has."""
        domain = block_hash.PrefixDomain(config.fingerprint, prefix.adapters, prefix.tenant, prefix.cache_salt)
        root = block_hash.root_hash(domain)
        return self._announcer.num_held(block_hash.block_hashes_of_bytes(prefix.token_ids, config.kv_block_size, root))
