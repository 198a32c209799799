"""Lets idle steps compute how the next turn of a conversation begins, where its prompt will lack the reasoning.

The answer goes to the guardian, which has the conversation's messages and renders the next prompt. It sends back what
that prompt has after the part that it shares with the last one, which is kept here meanwhile. So neither messages nor
prompts are sent twice."""

import time

import structlog

from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import block_hash, errors, internal, subjects
from tokenbus.protocol.wire.checks import validation
from tokenbus.worker.adapters.adapters import Adapters
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.contract import engine_request
from tokenbus.worker.streams.stream import WorkerStream

FEATURE = "next_turns"
_KEPT_S = 10.0
"""A router renders the next prompt within milliseconds, unless it has many to render."""
_KEPT_BYTES = 32 * 1024 * 1024
_ENTRY_BYTES = 4_096
"""Upper bound of a kept run without its prompt, tools and constraint."""


class EndedTurns:
    """The prompts of conversations whose last answers have just ended."""

    def __init__(self, announcer: Announcer, adapters: Adapters) -> None:
        self._announcer = announcer
        self._adapters = adapters
        self._ended: TTLCache[internal.Run] = TTLCache(_KEPT_S, _KEPT_BYTES)
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<EndedTurns, {self._ended!r}>"

    def keep(self, stream: WorkerStream) -> None:
        """Keeps the prompt of a stream that has ended, if its guardian has got its answer."""
        run = stream.run
        if not stream.has_told_answer:
            return
        kept_bytes = len(run.token_ids) + validation.params_bytes(run.params) + _ENTRY_BYTES
        self._ended.put(run.request_id, run, time.monotonic(), kept_bytes)

    def expect(self, turn: internal.NextTurn) -> None:
        """Has the engine compute a turn, if what it needs is still here."""
        now, serving = time.monotonic(), self._announcer.serving
        self._ended.expire(now)
        run = self._ended.get(turn.request_id, now)
        if run is None or serving is None or not turn.epoch == run.epoch == self._announcer.epoch:
            return
        self._ended.pop(turn.request_id)
        known = run.token_ids[: turn.num_known * block_hash.TOKEN_BYTES]
        token_ids, config = block_hash.unpack_token_ids(known + turn.token_ids), serving.config
        is_valid = len(token_ids) < config.context_length and max(token_ids) < config.vocab_size
        if not is_valid or FEATURE not in config.features:
            return
        try:
            adapters = self._adapters.of_run(run)
        except errors.RequestError:  # one was unloaded meanwhile
            return
        tenant, asked = subjects.key_to_tenant(turn.request_id), run.params
        ttl_s = None if asked.cache_control is None else asked.cache_control.ttl_ms / 1e3
        serving.engine.expect_turn(
            engine_request.ExpectedTurn(
                token_ids=known + turn.token_ids,
                num_known=turn.num_known,
                tenant=tenant,
                cache_salt=asked.cache_salt or "",
                session_id=asked.session_id or "",
                adapters=adapters,
                cache_ttl_s=ttl_s,
            )
        )
        self._log.info(
            "next_turn_expected", request_id=turn.request_id, tokens=len(token_ids), known_tokens=turn.num_known
        )
