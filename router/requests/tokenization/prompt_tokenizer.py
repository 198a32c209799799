"""Turns prompts into token ids: with the model's tokenizer if routers can have it, otherwise by asking a worker.

Decision 0019 says which vocabularies routers have, and the cost of long prompts.
"""

import functools
import time
from collections.abc import Callable
from typing import NamedTuple

from tokenbus.protocol.process.cores import usable_cores
from tokenbus.protocol.prompt.tokenizer_bundle import PromptRules
from tokenbus.protocol.wire import block_hash, codec, errors, internal, reasoning
from tokenbus.protocol.wire.checks import validation
from tokenbus.protocol.wire.params import ReasoningOptions
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.placement import adapters
from tokenbus.router.requests.flights.flight import Flight
from tokenbus.router.requests.flights.request_telemetry import FlightTelemetry
from tokenbus.router.requests.flights.worker_client import AnyWorker, Operation, deadline, invalid_reply, workers_for
from tokenbus.router.requests.queueing.model_loads import ModelLoads
from tokenbus.router.requests.tokenization.fair_executor import FairExecutor
from tokenbus.router.requests.tokenization.piece_cache import PieceCache
from tokenbus.router.requests.tokenization.tokenizer_cache import Tokenizer, TokenizerCache
from tokenbus.router.workers.worker import Worker

_INLINE_CHARS = 2_048
"""Longer texts are tokenized on a thread: these take at most half a millisecond of the event loop."""
_MAX_THREADS = 4
_TIMEOUT_S = 4.0
_BESIDE_S = 2.0
"""A conversation that nobody waits for is queued as if it had arrived this much later."""

_TOKENIZE = Operation("tokenize", codec.Decoder(internal.TokenizeResult))
_DETOKENIZE = Operation("detokenize", codec.Decoder(internal.DetokenizeResult))


class Prompt(NamedTuple):
    """A text or a conversation that is to be tokenized, and its place among others."""

    source: internal.Tokenize
    model: str
    tenant: str
    key: str
    """Unique among the prompts in progress."""
    arrived_at: float
    num_bytes: int
    """Its size, which decides how long others may precede it."""


class PromptTokenizer:
    """Tokenizes the prompts of one router, fairly among tenants."""

    def __init__(
        self,
        fleet: Fleet,
        tokenizers: TokenizerCache,
        any_worker: AnyWorker,
        loads: ModelLoads,
        telemetry: FlightTelemetry,
        pieces: PieceCache,
    ) -> None:
        self._fleet = fleet
        self._tokenizers = tokenizers
        self._any_worker = any_worker
        self._loads = loads
        self._telemetry = telemetry
        self._pieces = pieces
        self._executor = FairExecutor(max(1, min(_MAX_THREADS, usable_cores() - 1)), "tokenize")

    def __repr__(self) -> str:
        return f"<PromptTokenizer {self._executor!r}>"

    async def wait_served(self, flight: Flight) -> None:
        """Returns once a flight's model is loaded, or nothing can be waited for. Raises RequestError."""
        began_at = time.monotonic()
        try:
            await self._loads.wait_served(flight.model, flight.remaining_s(began_at), lambda: flight.cancelled)
        finally:
            flight.way.held_s += time.monotonic() - began_at

    def must_wait(self, flight: Flight) -> bool:
        """Whether `wait_served` would wait."""
        return self._loads.must_wait(flight.model)

    def check(self, flight: Flight) -> list[Worker]:
        """Returns a few workers of a flight's model. Raises RequestError if there is none, or if the model lacks what
        the request needs."""
        workers = workers_for(self._fleet, flight.model, time.monotonic())
        self._telemetry.model_found(flight)
        self._check_features(flight, workers[0])
        if flight.request.lora:  # an unknown one is found before anything is computed
            cards = (worker.card for worker in self._fleet.workers_of(flight.model))
            adapters.resolve(cards, flight.request.lora, flight.tenant)
        validation.check_resume(flight.request, workers[0].card.hash_scheme)
        return workers

    def pack_given(self, flight: Flight, workers: list[Worker]) -> bytes | None:
        """Returns a prompt that is given as token ids, packed by `check_request`; None for any other. `workers` are
        those of `check`. Raises RequestError if it does not fit the longest context of its model."""
        packed = flight.request.token_ids
        if not isinstance(packed, bytes):
            return None
        num_tokens = len(packed) // block_hash.TOKEN_BYTES
        if num_tokens >= workers[0].card.context_length:  # the longest one takes longer to find
            _check_length(num_tokens, self._longest_context(flight.model, workers))
        return packed

    async def pack(self, flight: Flight, workers: list[Worker]) -> bytes:
        """Does the same for any prompt, which is tokenized if necessary."""
        if (given := self.pack_given(flight, workers)) is not None:
            return given
        remaining_s, prompt = flight.remaining_s(time.monotonic()), prompt_of(flight)
        with self._telemetry.tokenizing(flight):
            packed = await self._tokenize(prompt, workers, remaining_s, lambda: flight.cancelled, is_bounded=True)
        _check_length(len(packed) // block_hash.TOKEN_BYTES, self._longest_context(flight.model, workers))
        return packed

    async def pack_beside(self, prompt: Prompt, worker: Worker) -> bytes | None:
        """Returns the packed tokens of a conversation that nobody waits for, with the tokenizer of a worker that has
        been fetched; None if there is none. It comes after the tenant's own. Raises RequestError."""
        tokenizer = self._tokenizers.find_fetched([worker])
        if tokenizer is None:
            return None
        beside = prompt._replace(key=f"{prompt.key} next", arrived_at=time.monotonic() + _BESIDE_S)
        return await self._pack(beside, tokenizer, worker.card.context_length - 1)

    async def tokenize(self, prompt: Prompt, timeout_s: float) -> list[int]:
        """Returns the token ids of a prompt, however many they are. Raises RequestError."""
        await self._loads.wait_served(prompt.model, timeout_s)
        workers = workers_for(self._fleet, prompt.model, time.monotonic())
        if prompt.source.tools:
            _require(validation.RequiredFeature("tools", "tools"), workers[0])
        if prompt.source.continue_final_message:
            needed = validation.RequiredFeature(validation.CONTINUE, validation.CONTINUE)
            _require(needed, self._able_worker(prompt.model, needed.feature) or workers[0])
        packed = await self._tokenize(prompt, workers, timeout_s, lambda: False, is_bounded=False)
        return block_hash.unpack_token_ids(packed).tolist()

    def rules_of(self, model: str) -> PromptRules | None:
        """Returns the rules of a model's prompts; None while no tokenizer of it is known."""
        tokenizer = self._tokenizers.find_fetched(workers_for(self._fleet, model, time.monotonic()))
        return None if tokenizer is None else tokenizer.builder.rules

    async def detokenize(self, model: str, message: internal.Detokenize, timeout_s: float) -> internal.DetokenizeResult:
        """Returns the text of tokens, as a worker writes them into a completion. Raises RequestError."""

        async def attempt(worker: Worker) -> internal.DetokenizeResult:
            found = await self._any_worker.ask(worker, _DETOKENIZE, message, _TIMEOUT_S)
            if message.return_pieces and len(found.pieces) * block_hash.TOKEN_BYTES != len(message.token_ids):
                raise errors.unsupported_field("return_pieces", "the workers are of an earlier version")
            return found

        async with deadline(timeout_s):
            await self._loads.wait_served(model, None)
            return await self._any_worker.first_result(model, lambda: self._candidates(model), attempt)

    def drop_unused(self, now: float) -> None:
        """Drops what is kept for models that no worker has any more."""
        self._tokenizers.drop_unused(now)

    async def _tokenize(
        self,
        prompt: Prompt,
        workers: list[Worker],
        timeout_s: float | None,
        is_cancelled: Callable[[], bool],
        *,
        is_bounded: bool,
    ) -> bytes:
        """`is_bounded`: raises RequestError(prompt_too_long) early if the text certainly leaves no room for a token."""

        def max_tokens(some: list[Worker]) -> int | None:
            return self._longest_context(prompt.model, some) - 1 if is_bounded else None

        async def attempt(worker: Worker) -> bytes:
            if (tokenizer := await self._tokenizers.fetch(worker)) is not None:
                return await self._pack(prompt, tokenizer, max_tokens([worker]))
            source = codec.replace(prompt.source, max_tokens=max_tokens([worker]))
            packed = (await self._any_worker.ask(worker, _TOKENIZE, source, _TIMEOUT_S)).token_ids
            if packed is None or len(packed) % block_hash.TOKEN_BYTES:
                raise invalid_reply(worker.card.worker_id, "it has no token ids")
            return packed

        async with deadline(timeout_s):
            if (tokenizer := self._tokenizers.find_fetched(workers)) is not None:
                return await self._pack(prompt, tokenizer, max_tokens(workers))
            model, feature = prompt.model, validation.CONTINUE if prompt.source.continue_final_message else ""
            candidates = functools.partial(self._candidates, model, feature)
            return await self._any_worker.first_result(model, candidates, attempt, is_cancelled)

    def _candidates(self, model: str, feature: str = "") -> list[Worker]:
        """Returns the workers that may be asked, which have a feature if it is named: first those of the router's own
        site, last those whose tokenizers are known to be unusable. Raises RequestError if there are none."""
        now = time.monotonic()
        able = self._fleet.model(model).eligible(now) or workers_for(self._fleet, model, now)
        able = [worker for worker in able if not feature or feature in worker.card.features]
        if not able:
            raise errors.request_error(errors.Code.NO_WORKER, f"no worker with the feature {feature} is available")
        return sorted(able, key=lambda worker: (self._tokenizers.is_broken(worker), self._fleet.is_distant(worker)))

    async def _pack(self, prompt: Prompt, tokenizer: Tokenizer, max_tokens: int | None) -> bytes:
        remembering = functools.partial(self._pieces.packer, tokenizer.name, prompt.tenant)
        work = functools.partial(tokenizer.builder.pack, prompt.source, max_tokens, remembering)
        text, suffix = prompt.source.text, prompt.source.suffix or ""
        if text is not None and len(text) + len(suffix) <= _INLINE_CHARS:
            return work()
        executor = self._executor if text is not None else tokenizer.renderer
        return await executor.run(prompt.key, prompt.tenant, prompt.arrived_at, prompt.num_bytes, work)

    def _check_features(self, flight: Flight, worker: Worker) -> None:
        """Raises RequestError if the model's workers, of which `worker` is one, lack a feature."""
        if "generate" not in worker.card.features:
            if worker.card.loadable:  # what it can do is not known until it is loaded
                raise errors.request_error(errors.Code.NO_WORKER, "the workers that had this model loaded are gone")
            raise errors.request_error(errors.Code.UNSUPPORTED, "this model generates nothing", param="model")
        if flight.feature:  # it is enough if any of them has it
            worker = self._able_worker(flight.model, flight.feature) or worker
        for need in validation.required_features(flight.request):
            _require(need, worker)

    def _able_worker(self, model: str, feature: str) -> Worker | None:
        """Returns a worker of the model that has a feature, if any has it."""
        return next((one for one in self._fleet.workers_of(model) if feature in one.card.features), None)

    def _longest_context(self, model: str, workers: list[Worker]) -> int:
        """The longest context of the model's workers, including those of `workers` that have left meanwhile."""
        longest = max(worker.card.context_length for worker in workers)
        return max(longest, self._fleet.model(model).max_context_length)


def prompt_of(flight: Flight) -> Prompt:
    """Returns the prompt of a request that is not tokenized yet."""
    request = flight.request
    asked = request.reasoning or ReasoningOptions()
    source = internal.Tokenize(
        text=request.prompt,
        suffix=request.suffix,
        messages=request.messages,
        chat_template_kwargs=reasoning.template_arguments(asked.effort, request.chat_template_kwargs, asked.max_tokens),
        tools=request.tools,
        continue_final_message=bool(request.continue_final_message),
    )
    return Prompt(source, flight.model, flight.tenant, flight.key, flight.received_at, flight.held_bytes)


def _require(need: validation.RequiredFeature, worker: Worker) -> None:
    if need.feature not in worker.card.features:
        raise errors.request_error(
            errors.Code.UNSUPPORTED, f"{need.param} is not served by this model's engine", param=need.param
        )


def _check_length(num_tokens: int, context_length: int) -> None:
    if not num_tokens:
        raise errors.request_error(errors.Code.INVALID_REQUEST, "the prompt has no tokens", param="prompt")
    if num_tokens + 1 > context_length:
        raise errors.prompt_too_long(num_tokens, context_length)
