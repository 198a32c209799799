"""Says how the next turns of conversations are likely to begin, so that workers can compute that while they are idle.

A chat template that drops old reasoning renders the last answer differently than it was sampled. The router still has
the conversation when its stream ends, and gets the answer from the worker: it renders both with an empty message of
whoever speaks next, and sends that worker what the last prompt lacks of the result. A request's messages are kept for
that as long as its stream is open, within a limit for all."""

import contextlib
import time

from tokenbus.protocol import tasks
from tokenbus.protocol.bus.bus import NoRespondersError, OutboundBufferLimitError, PayloadTooLargeError
from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import block_hash, codec, errors, internal, messages, subjects
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.requests.flights.flight import Flight
from tokenbus.router.requests.flights.worker_client import WorkerClient
from tokenbus.router.requests.tokenization.prompt_tokenizer import Prompt, PromptTokenizer, prompt_of

FEATURE = "next_turns"
_KEPT_S = 3_600.0
"""Streams that take longer are left alone."""
_KEPT_BYTES = 64 * 1024 * 1024
_MAX_RENDERING = 64
"""Turns that are rendered at once, or wait for it: beyond that nothing is idle."""


class NextTurns:
    """The conversations of one router's open streams."""

    def __init__(self, fleet: Fleet, prompts: PromptTokenizer, workers: WorkerClient) -> None:
        self._fleet = fleet
        self._prompts = prompts
        self._workers = workers
        self._kept: TTLCache[Prompt] = TTLCache(_KEPT_S, _KEPT_BYTES)
        self._rendering: set[str] = set()

    def __repr__(self) -> str:
        return f"<NextTurns, {self._kept!r}, {len(self._rendering)} rendering>"

    def keep(self, flight: Flight) -> None:
        """Keeps the conversation of a request whose prompt has just been tokenized, if its next turn may be wanted."""
        asked, given = flight.request, flight.request.messages
        hint = asked.cache_control
        is_single = not asked.copy_of and asked.max_tokens != 0 and not asked.continue_final_message
        is_cached = asked.cache_prompt is not False and (hint is None or hint.ttl_ms > 0)
        if given is None or asked.parse_output is False or not (is_single and is_cached):
            return
        if any(FEATURE in worker.card.features for worker in self._fleet.workers_of(flight.model)):
            self._kept.put(flight.key, prompt_of(flight), time.monotonic(), flight.held_bytes)
            flight.wants_answer, flight.wants_reasoning = True, any(one.reasoning_content for one in given)

    def forget(self, flight: Flight) -> None:
        """Forgets a conversation whose stream has ended."""
        self._kept.pop(flight.key)

    def ended(self, flight: Flight) -> None:
        """Begins to render the next turn of a conversation, if its worker has sent the answer."""
        end, prompt = flight.end, self._kept.get(flight.key, time.monotonic())
        if end is None or end.answer is None or prompt is None or flight.prompt_ids is None or not flight.is_named:
            return
        if flight.worker_id is None or flight.key in self._rendering or len(self._rendering) >= _MAX_RENDERING:
            return
        address = subjects.WorkerAddress(flight.model, flight.worker_id)
        self._rendering.add(flight.key)
        work = self._expect(prompt, flight.prompt_ids, end.answer, address)
        task = tasks.background("next_turn", work)
        task.add_done_callback(lambda _: self._rendering.discard(prompt.key))

    async def _expect(
        self, prompt: Prompt, last: bytes, answer: messages.ChatMessage, address: subjects.WorkerAddress
    ) -> None:
        """Renders a next turn and tells its worker. If that is impossible, nobody misses it."""
        worker = self._fleet.find_worker(address)
        if worker is None or FEATURE not in worker.card.features:
            return
        with contextlib.suppress(
            errors.RequestError, NoRespondersError, OutboundBufferLimitError, PayloadTooLargeError, OSError
        ):
            following = codec.replace(prompt.source, messages=following_messages(prompt.source.messages or [], answer))
            source = codec.replace(following, continue_final_message=True)
            packed = await self._prompts.pack_beside(prompt._replace(source=source), worker)
            if packed is None:
                return
            num_known = block_hash.num_common_tokens(last, packed)
            rest = packed[num_known * block_hash.TOKEN_BYTES :]
            if not rest:
                return
            turn = internal.NextTurn(
                request_id=prompt.key, epoch=worker.card.epoch, num_known=num_known, token_ids=rest
            )
            self._workers.publish(worker.card, "next_turn", turn)


def following_messages(
    conversation: list[messages.ChatMessage], answer: messages.ChatMessage
) -> list[messages.ChatMessage]:
    """Returns a conversation with an answer and the empty message of whoever speaks next."""
    calls = answer.tool_calls
    follower = (
        messages.ChatMessage(role="tool", content="", tool_call_id=calls[0]["id"] or None)
        if calls
        else messages.ChatMessage(role="user", content="")
    )
    return [*conversation, answer, follower]
