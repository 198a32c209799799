"""Clients' own calls for the tokens of a prompt, and for the text of tokens."""

import itertools
from typing import TypeVar

from msgspec import UNSET

from tokenbus.protocol.prompt.tokenizer_bundle import PromptRules
from tokenbus.protocol.wire import block_hash, codec, internal, messages
from tokenbus.protocol.wire.checks import validation
from tokenbus.router.fleet.fleet import Fleet
from tokenbus.router.requests.calls.client_calls import BodyT, Call, CallKind
from tokenbus.router.requests.tokenization.prompt_tokenizer import Prompt, PromptTokenizer
from tokenbus.router.telemetry.metrics import RouterMetrics

SourceT = TypeVar("SourceT", internal.Tokenize, internal.Detokenize)


class _Tokenizing(CallKind[BodyT, SourceT]):
    counts = False
    is_bounded_by_memory = True

    def __init__(self, prompts: PromptTokenizer, fleet: Fleet, metrics: RouterMetrics) -> None:
        self._prompts = prompts
        self._fleet = fleet
        self._metrics = metrics
        self._numbers = itertools.count()

    def count(self, code: str) -> None:
        self._metrics.tokenizations.labels(self.operation, code).inc()


class TokenizeCalls(_Tokenizing[messages.TokenizeRequest, internal.Tokenize]):
    """Calls for the tokens of a prompt."""

    operation = otel_operation = "tokenize"
    bodies = codec.Decoder(messages.TokenizeRequest)
    replies = messages.TokenizeReply

    def check(self, body: messages.TokenizeRequest) -> internal.Tokenize:
        validation.check_tokenize_request(body)
        return internal.Tokenize(
            text=body.prompt,
            messages=body.messages,
            chat_template_kwargs=body.chat_template_kwargs,
            tools=body.tools,
            continue_final_message=bool(body.continue_final_message),
            add_special_tokens=body.add_special_tokens is not False,
        )

    async def answer(self, call: Call[messages.TokenizeRequest, internal.Tokenize]) -> messages.TokenizeReply:
        model, tenant, _ = call.address
        key = f"{tenant}:tokenize {next(self._numbers)}"  # no request's key has a space
        prompt = Prompt(call.work, model, tenant, key, call.received_at, call.num_bytes)
        token_ids = await self._prompts.tokenize(prompt, call.remaining_s(call.body.timeout_ms))
        rules = self._prompts.rules_of(model) if call.body.return_tokenizer else None
        contexts = [worker.card.context_length for worker in self._fleet.workers_of(model)]
        return messages.TokenizeReply(
            id=call.request_id,
            model=model,
            count=len(token_ids),
            token_ids=UNSET if call.body.only_count else token_ids,
            context_length=min(contexts) if contexts else UNSET,
            continues=call.work.continue_final_message or UNSET,
            tokenizer=UNSET if rules is None else _to_info(rules),
        )


class DetokenizeCalls(_Tokenizing[messages.DetokenizeRequest, internal.Detokenize]):
    """Calls for the text of tokens."""

    operation = otel_operation = "detokenize"
    bodies = codec.Decoder(messages.DetokenizeRequest)
    replies = messages.DetokenizeReply

    def check(self, body: messages.DetokenizeRequest) -> internal.Detokenize:
        validation.check_detokenize_request(body)
        packed = block_hash.pack_token_ids(body.token_ids or [])
        return internal.Detokenize(token_ids=packed, return_pieces=bool(body.return_pieces))

    async def answer(self, call: Call[messages.DetokenizeRequest, internal.Detokenize]) -> messages.DetokenizeReply:
        model, timeout_s = call.address.model, call.remaining_s(call.body.timeout_ms)
        found = await self._prompts.detokenize(model, call.work, timeout_s)
        pieces = [messages.TokenPiece(text=one.decode(errors="replace"), bytes=list(one)) for one in found.pieces]
        return messages.DetokenizeReply(
            id=call.request_id, model=model, text=found.text, pieces=pieces if call.body.return_pieces else UNSET
        )


def _to_info(rules: PromptRules) -> messages.TokenizerInfo:
    return messages.TokenizerInfo(
        vocab_size=rules.vocab_size,
        bos_token=rules.bos_token or None,
        eos_token=rules.eos_token or None,
        adds_bos=rules.add_bos,
        chat_template=rules.chat_template or None,
    )
