"""Prompts that this worker computes for others, which read the blocks while it continues.

A remote prefill is a request to this worker's engine like any other, for a single token that is discarded: what
remains is the prompt in the cache. It ends with its lease."""

import asyncio
import time
from collections.abc import Callable

from tokenbus.protocol.wire import block_hash, messages
from tokenbus.protocol.wire.block_hash import TOKEN_BYTES
from tokenbus.worker.contract import contract, engine_output
from tokenbus.worker.contract.engine_request import EngineRequest, Sampling


class RemotePrefill:
    """One prompt whose blocks are all computed here."""

    def __init__(self, request_id: str, prefix: contract.CachedPrefix, block_size: int) -> None:
        self.request_id = request_id
        """The key of the request whose prompt it is."""
        self.num_tokens = len(prefix.token_ids) // TOKEN_BYTES
        self.num_computed = 0
        """Leading tokens computed so far."""
        self.outcome = ""
        """`complete`, or what ended it early: `cancelled` or `failed`; empty until it ends."""
        self.began_at = time.monotonic()
        self.on_ended: Callable[[RemotePrefill], None] = lambda remote_prefill: None
        self._prefix = prefix
        self._block_size = block_size
        self._abort: Callable[[], None] = lambda: None
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<RemotePrefill for {self.request_id}: {self.num_computed} of {self.num_tokens} tokens {self.outcome}>"

    def start(self, engine: contract.Engine, key: str, priority: int) -> None:
        """Starts it on an engine. Raises RequestError if the engine does not accept it."""
        prefix = self._prefix
        request = EngineRequest(
            key=key,
            token_ids=block_hash.unpack_token_ids(prefix.token_ids),
            sampling=Sampling(max_tokens=1),
            tenant=prefix.tenant,
            cache_salt=prefix.cache_salt,
            adapters=prefix.adapters,
            priority=priority,
            return_progress=True,
        )
        engine.generate(request, self._take)
        self._abort = lambda: engine.abort(key)

    def stop(self) -> None:
        """Ends it, if it has not ended. Computed blocks stay cached."""
        if not self.outcome:
            self._abort()

    def has(self, end: int) -> bool:
        """Whether all blocks before block `end` are computed, or will never be."""
        return bool(self.outcome) or self.num_computed >= end * self._block_size

    async def wait_for(self, end: int) -> None:
        """Returns when `has` would return True."""
        while not self.has(end):
            await self._changed.wait()

    def _take(self, output: engine_output.Output) -> None:
        if output.progress is not None:
            self.num_computed = max(self.num_computed, output.progress.processed_tokens)
        if output.finish_reason is not None:
            self._end(output.finish_reason)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _end(self, reason: messages.FinishReason) -> None:
        match reason:
            case messages.FinishReason.CANCELLED:
                self.outcome = "cancelled"
            case messages.FinishReason.ERROR:
                self.outcome = "failed"
            case _:
                self.outcome, self.num_computed = "complete", self.num_tokens
        self.on_ended(self)
