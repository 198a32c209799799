"""Lets idle steps compute how the next turn of a conversation begins, where its prompt will lack the reasoning.

The answer goes to the guardian, which has the conversation's messages and renders the next prompt. It sends back what
that prompt has after the part that it shares with the last one, which is kept here meanwhile. So neither messages nor
prompts are sent twice."""

import time
from collections.abc import Sequence

import structlog

from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import block_hash, errors, internal, messages, subjects
from tokenbus.protocol.wire.checks import validation
from tokenbus.worker.adapters.adapters import Adapters
from tokenbus.worker.broker.announcer import Announcer
from tokenbus.worker.contract import contract
from tokenbus.worker.streams.replay_buffer import Segment

FEATURE = "next_turns"
_KEPT_S = 10.0
"""A router renders the next prompt within milliseconds, unless it has many to render."""
_KEPT_BYTES = 32 * 1024 * 1024
_ENTRY_BYTES = 4_096
"""Upper bound of a kept run without its prompt, tools and constraint."""


class NextTurns:
    """The prompts of conversations whose last answers have just ended."""

    def __init__(self, announcer: Announcer, adapters: Adapters) -> None:
        self._announcer = announcer
        self._adapters = adapters
        self._ended: TTLCache[internal.Run] = TTLCache(_KEPT_S, _KEPT_BYTES)
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<NextTurns, {self._ended!r}>"

    def keep(self, run: internal.Run) -> None:
        """Keeps the prompt of a stream that has ended and whose guardian has got its answer."""
        kept_bytes = len(run.token_ids) + validation.params_bytes(run.params) + _ENTRY_BYTES
        self._ended.put(run.request_id, run, time.monotonic(), kept_bytes)

    def clear(self) -> None:
        """Forgets all of them, because a new epoch begins."""
        self._ended.clear()

    def expect(self, turn: internal.NextTurn) -> None:
        """Has the engine compute a turn, if what it needs is still here."""
        now, serving = time.monotonic(), self._announcer.serving
        self._ended.expire(now)
        run = self._ended.get(turn.request_id, now)
        if run is None or serving is None or turn.epoch != self._announcer.epoch:
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
        prefix = contract.CachedPrefix(tenant, asked.cache_salt or "", adapters, known + turn.token_ids)
        ttl_s = None if asked.cache_control is None else asked.cache_control.ttl_ms / 1e3
        serving.engine.expect_turn(contract.ExpectedTurn(prefix, turn.num_known, asked.session_id or "", ttl_s))
        self._log.info(
            "next_turn_expected", request_id=turn.request_id, tokens=len(token_ids), known_tokens=turn.num_known
        )


def to_message(parts: Sequence[Segment | messages.Chunk], *, with_reasoning: bool) -> messages.ChatMessage:
    """Returns an answer that comes in these parts as the message in which a client sends it back."""
    calls: dict[int, dict[str, str]] = {}
    for part in parts:
        for delta in part.tool_calls or ():
            call = calls.setdefault(delta.index, {"id": delta.id or "", "name": delta.function.name or "", "said": ""})
            call["said"] += delta.function.arguments
    return messages.ChatMessage(
        role="assistant",
        content="".join(part.text for part in parts),
        reasoning_content="".join(part.reasoning or "" for part in parts) if with_reasoning else None,
        tool_calls=[
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["said"]}}
            for call in calls.values()
        ]
        or None,
    )
