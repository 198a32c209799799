"""Reads a completion: turns its tokens into text, reasoning and tool calls, up to the token that completes it. Pure.

The same tokens give the same answer however they arrive. So whoever continues a completion reads its first tokens
again, and all that depends on them, such as text that is held back, is as if they had been sampled here."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from msgspec import UNSET, UnsetType

from tokenbus.protocol.wire import errors, messages
from tokenbus.worker.chat_format.chat_rules import ChatRules
from tokenbus.worker.chat_format.parsing import deltas
from tokenbus.worker.chat_format.parsing.parser import AnswerParser
from tokenbus.worker.contract import engine_output, engine_request
from tokenbus.worker.engine.scheduling.sequence import EngineFinishReason, FinishRule
from tokenbus.worker.engine_client.detokenizer import Detokenizer

_TOKENS_AT_ONCE = 2_048
"""Resumed tokens that are read before the time is checked."""


class Ending(NamedTuple):
    """The way in which a token completes a completion, and the text that was held back until then."""

    finish_reason: messages.FinishReason
    stop_match: str | int | None = None
    text: str = ""


class CompletionReader:
    """Reads the completion of one request."""

    def __init__(
        self, request: engine_request.EngineRequest, token_bytes: Sequence[bytes], rules: ChatRules | None = None
    ) -> None:
        """`token_bytes` are the bytes of each token, by token id. With `rules`, reasoning and tool calls are told apart
        from the text if the request wants that."""
        self._sampling = request.sampling
        self._is_constrained = request.constraint is not None
        self._detokenizer = Detokenizer(token_bytes, request.stop, request.sampling.min_tokens)
        self._answer = None if rules is None or request.parsing is None else PartsReader(rules, request)
        self.is_plain = self._answer is None and not request.stop
        """Whether a token adds its text and nothing else, unless it is the last one."""
        self.ending: Ending | None = None
        """The way in which it was completed, if it was."""

    def __repr__(self) -> str:
        return f"<CompletionReader of {self.num_tokens} tokens>"

    @property
    def num_tokens(self) -> int:
        """The tokens that were read, up to the last one that counts."""
        return self._detokenizer.num_tokens

    @property
    def reasoning_tokens(self) -> int | UnsetType:
        """Those of the reasoning, if that is told apart."""
        return UNSET if self._answer is None else self._answer.reasoning_tokens

    @property
    def has_parts(self) -> bool:
        """Whether reasoning or tool calls have been read since they were last taken."""
        return self._answer is not None and self._answer.has_parts

    def take_parts(self) -> engine_output.AnswerParts:
        """Returns the reasoning and the tool calls read since the last call."""
        assert self._answer is not None, self
        return self._answer.take_parts()

    def read(self, token_ids: Sequence[int], finish_reason: EngineFinishReason | None) -> tuple[str, int]:
        """Reads tokens up to the one that completes the completion; the last one does if there is a `finish_reason`.
        Returns their text, and how many they are."""
        if self.is_plain and len(token_ids) == 1 and finish_reason is None:  # nearly always
            return self._detokenizer.decode(token_ids[0]), 1
        text, last = "", len(token_ids) - 1
        for place, token_id in enumerate(token_ids):
            text += self._read(token_id, finish_reason if place == last else None)
            if self.ending is not None:
                return text, place + 1
        return text, len(token_ids)

    def read_resumed(
        self, token_ids: Sequence[int], end_token_ids: Sequence[int], is_late: Callable[[], bool]
    ) -> tuple[list[str], dict[int, engine_output.AnswerParts]]:
        """Reads the tokens of a completion that is continued. Returns the text that came with each, and what else came
        with some, by their places.

        Raises RequestError if any but the last of them completes it, or if it `is_late` before all are read."""
        rule = FinishRule(self._sampling, end_token_ids, constrained=self._is_constrained)
        if self._answer is None:
            return self._read_resumed_text(token_ids, rule, is_late), {}
        texts: list[str] = []
        parts: dict[int, engine_output.AnswerParts] = {}
        for place, token_id in enumerate(token_ids):
            if self.ending is not None:
                raise _ends_early(place - 1, token_ids)
            if place % _TOKENS_AT_ONCE == 0 and is_late():
                raise _takes_too_long(place, token_ids)
            texts.append(self._read(token_id, rule.finish_reason(token_id, place + 1)))
            if self._answer.has_parts:
                parts[place] = self._answer.take_parts()
        return texts, parts

    def end(self) -> Ending:
        """Returns how it was completed, with all text that was held back."""
        assert self.ending is not None, self
        reason, stop_match, held = self.ending
        is_done = reason is messages.FinishReason.STOP and isinstance(stop_match, int)
        text = self._rest(held, cut_off=not is_done)
        if is_done and self._answer is not None and self._answer.has_calls:
            return Ending(messages.FinishReason.TOOL_CALLS, None, text)
        return Ending(reason, stop_match, text)

    def cut_off(self) -> str:
        """Returns the text that was held back, since no more tokens will come."""
        return self._rest(self._detokenizer.flush(), cut_off=True)

    def forget_after(self, num_tokens: int) -> None:
        """Counts no more tokens than these: the reading of later ones has failed, and nobody got them."""
        self._detokenizer.num_tokens = num_tokens

    def _read_resumed_text(self, token_ids: Sequence[int], rule: FinishRule, is_late: Callable[[], bool]) -> list[str]:
        """All of it blocks the worker's event loop, so the work per token matters: there may be 100,000."""
        before, last = token_ids[:-1], token_ids[-1]
        texts: list[str] = []
        for at in range(0, len(before), _TOKENS_AT_ONCE):
            some = before[at : at + _TOKENS_AT_ONCE]
            texts += self._detokenizer.push_all(some)
            if len(texts) < at + len(some):  # a stop string is complete
                break
            if is_late():
                raise _takes_too_long(len(texts), token_ids)
        finishing = (place for place, token_id in enumerate(before) if rule.finish_reason(token_id, place + 1))
        place = min(len(texts), next(finishing, len(before)))
        if place < len(before):
            raise _ends_early(place, token_ids)
        return [*texts, self._read(last, rule.finish_reason(last, len(token_ids)))]

    def _read(self, token_id: int, finish_reason: EngineFinishReason | None) -> str:
        """Reads a token; returns the text that may be published now."""
        detokenizer, answer = self._detokenizer, self._answer
        if finish_reason is EngineFinishReason.STOP_TOKEN:
            detokenizer.count_hidden_token()
            self.ending = Ending(messages.FinishReason.STOP, token_id, detokenizer.flush())
            return ""
        if answer is not None and answer.is_marker(token_id):
            # held-back text precedes the marker, and no stop string contains one
            text, stop = answer.read_text(detokenizer.flush()) + answer.read(token_id, ""), None
            detokenizer.count_hidden_token()
        else:
            text, stop = detokenizer.push(token_id)
            text = text if answer is None else answer.read(token_id, text)
        if stop is not None:  # a stop string in the last token is a stop, not a length
            self.ending = Ending(messages.FinishReason.STOP, stop)
        elif finish_reason is EngineFinishReason.LENGTH:
            self.ending = Ending(messages.FinishReason.LENGTH, text=detokenizer.flush())
        return text

    def _rest(self, held: str, *, cut_off: bool) -> str:
        """Returns the answer's held-back text. `cut_off`: the model had not finished."""
        return held if self._answer is None else self._answer.read_text(held) + self._answer.finish(cut_off=cut_off)


class PartsReader:
    """Separates the reasoning and the tool calls of one answer from its text."""

    def __init__(self, rules: ChatRules, request: engine_request.EngineRequest) -> None:
        parsing = request.parsing
        assert parsing is not None, request
        self.is_marker = rules.is_marker
        """Whether a token is a marker, or part of one: held-back text must be read before it."""
        self._parser = AnswerParser(
            rules.rules,
            tools=parsing.tools,
            key=request.key,
            generation_prompt=parsing.generation_prompt,
            continues=parsing.continues,
            hold_calls=parsing.hold_calls,
        )
        self._reasoning: list[str] = []
        self._calls: dict[int, engine_output.ToolCallPart] = {}
        self.reasoning_tokens = 0

    @property
    def has_calls(self) -> bool:
        """Whether the answer has tool calls, all complete."""
        return self._parser.calls > 0 and not self._parser.has_incomplete_call

    @property
    def has_parts(self) -> bool:
        return bool(self._reasoning or self._calls)

    def read(self, token_id: int, text: str) -> str:
        """Takes a token and the text that may be published now; returns the part that is the answer's text."""
        self.reasoning_tokens += self._parser.is_reasoning
        found = self._parser.feed(token_id, text)
        if len(found) == 1 and isinstance(found[0], deltas.Content):  # the usual case
            return found[0].text
        return self._take(found)

    def read_text(self, text: str) -> str:
        """Takes held-back text; returns the part that is the answer's text."""
        return self._take(self._parser.feed_text(text)) if text else ""

    def finish(self, *, cut_off: bool) -> str:
        return self._take(self._parser.finish(cut_off=cut_off))

    def take_parts(self) -> engine_output.AnswerParts:
        parts = engine_output.AnswerParts("".join(self._reasoning), tuple(self._calls.values()))
        self._reasoning, self._calls = [], {}
        return parts

    def _take(self, found: Iterable[deltas.Delta]) -> str:
        text = ""
        for delta in found:
            match delta:
                case deltas.Content(more):
                    text += more
                case deltas.ReasoningDelta(more):
                    self._reasoning.append(more)
                case deltas.CallBegin(index, call_id, name):
                    self._calls[index] = engine_output.ToolCallPart(index, "", call_id, name)
                case deltas.CallArguments(index, fragment):
                    part = self._calls.get(index, engine_output.ToolCallPart(index))
                    self._calls[index] = part._replace(arguments=part.arguments + fragment)
        return text


def _ends_early(place: int, token_ids: Sequence[int]) -> errors.RequestError:
    problem = f"the completion ends with token {place + 1} of the {len(token_ids)} given ones"
    return errors.request_error(errors.Code.INVALID_REQUEST, problem, param="resume_from")


def _takes_too_long(num_read: int, token_ids: Sequence[int]) -> errors.RequestError:
    problem = f"resume_from: its {len(token_ids)} tokens take too long to read, the first {num_read} alone did"
    return errors.request_error(errors.Code.UNSUPPORTED, problem, param="resume_from")
