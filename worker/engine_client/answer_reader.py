"""Separates the reasoning and the tool calls of an answer from its text, token by token."""

from collections.abc import Iterable

from tokenbus.worker.chat_format.chat_rules import ChatRules
from tokenbus.worker.chat_format.parsing import deltas
from tokenbus.worker.chat_format.parsing.parser import AnswerParser
from tokenbus.worker.contract import engine_output, engine_request


class AnswerReader:
    """Separates the reasoning and the tool calls of one answer from its text."""

    def __init__(self, rules: ChatRules, request: engine_request.EngineRequest) -> None:
        parsing = request.parsing
        assert parsing is not None, request
        self._rules = rules
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
        """Whether reasoning or tool calls have been read since they were last taken."""
        return bool(self._reasoning or self._calls)

    def is_marker(self, token_id: int) -> bool:
        """Whether a token is a marker, or part of one: held-back text must be read before it."""
        return self._rules.is_marker(token_id)

    def read(self, token_id: int, text: str) -> str:
        """Takes a token and the text that may be published now; returns the part that is the answer's text."""
        self.reasoning_tokens += self._parser.is_reasoning
        found = self._parser.feed(token_id, text)
        if len(found) == 1 and isinstance(found[0], deltas.Content):  # the usual case
            return found[0].text
        return self._take(found)

    def read_text(self, text: str) -> str:
        """Takes held-back text; returns the part that is the answer's text."""
        if not text:
            return ""
        return self._take(self._parser.feed_text(text))

    def finish(self, *, cut_off: bool) -> str:
        """Returns the held-back text at the end of the answer. `cut_off`: the model had not finished."""
        return self._take(self._parser.finish(cut_off=cut_off))

    def take_parts(self) -> engine_output.AnswerParts:
        """Returns the reasoning and the tool calls read since the last call."""
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
