"""Tells reasoning and tool calls apart from the text of one answer, while its tokens come."""

from collections.abc import Iterable, Sequence

from tokenbus.worker import contract
from tokenbus.worker.chat_format import deltas
from tokenbus.worker.chat_format.chat_format import ChatFormat
from tokenbus.worker.chat_format.parser import Parser, Rules

_PROMPT_TAIL = 256
"""Tokens at the end of a prompt among which the beginning of the answer is sought."""


class ChatRules:
    """A model's chat format, prepared for reading answers. `token_bytes` are the bytes of each token."""

    def __init__(self, chat_format: ChatFormat, token_bytes: Sequence[bytes]) -> None:
        self.rules = Rules(chat_format)
        self._turn_open = self.rules.alphabet.encode(chat_format.turn_open)
        self._token_bytes = token_bytes

    def __repr__(self) -> str:
        return f"<ChatRules {self.rules.form!r}>"

    def is_marker(self, token_id: int) -> bool:
        """Whether a token is a marker, or a part of one, and no text."""
        return token_id in self.rules.alphabet.by_token

    def generation_prompt(self, prompt: Sequence[int]) -> str | None:
        """Returns what the end of a prompt says of the answer, such as `<think>`; None if that is not to be seen."""
        if not self._turn_open:
            return None
        tail = "".join(self._texts(prompt[-_PROMPT_TAIL:]))
        at = tail.rfind(self._turn_open)
        return None if at < 0 else self.rules.alphabet.decode(tail[at + len(self._turn_open) :])

    def _texts(self, token_ids: Iterable[int]) -> Iterable[str]:
        """Yields the text of each token, in which a marker is one character that nobody can write."""
        for token_id in token_ids:
            special = self.rules.alphabet.by_token.get(token_id)
            yield self._token_bytes[token_id].decode(errors="replace") if special is None else special


class AnswerReader:
    """Reads one answer."""

    def __init__(self, rules: ChatRules, request: contract.EngineRequest) -> None:
        parsing = request.parsing
        assert parsing is not None, request
        self._rules = rules
        self._parser = Parser(
            rules.rules,
            tools=parsing.tools,
            key=request.key,
            generation_prompt=rules.generation_prompt(request.token_ids),
            hold_calls=parsing.hold_calls,
        )
        self._reasoning: list[str] = []
        self._calls: dict[int, contract.ToolCallPart] = {}
        self.reasoning_tokens = 0

    def __repr__(self) -> str:
        return f"<AnswerReader {self._parser.calls} calls>"

    @property
    def has_calls(self) -> bool:
        """Whether the answer has tool calls, all of them complete."""
        return self._parser.calls > 0 and not self._parser.has_open_call

    def is_marker(self, token_id: int) -> bool:
        """Whether a token is a marker, or a part of one: text that was held back must be read before it."""
        return self._rules.is_marker(token_id)

    def read(self, token_id: int, text: str) -> str:
        """Takes a token, with the text that may be published now; returns what is text of the answer."""
        self.reasoning_tokens += self._parser.is_reasoning
        return self._take(self._parser.feed(token_id, text))

    def read_text(self, text: str) -> str:
        """Takes text that was held back; returns what is text of the answer."""
        return self._take(self._parser.feed_text(text))

    def finish(self, *, cut_off: bool) -> str:
        """Returns the text that was held back, at the end of the answer. `cut_off`: the model was not done."""
        return self._take(self._parser.finish(cut_off=cut_off))

    def take_parts(self) -> contract.AnswerParts:
        """Returns the reasoning and the tool calls that were read since the last time."""
        parts = contract.AnswerParts("".join(self._reasoning), tuple(self._calls.values()))
        self._reasoning, self._calls = [], {}
        return parts

    def _take(self, found: Iterable[deltas.Delta]) -> str:
        text = ""
        for delta in found:
            match delta:
                case deltas.Content(more):
                    text += more
                case deltas.Reasoning(more):
                    self._reasoning.append(more)
                case deltas.CallBegin(index, call_id, name):
                    self._calls[index] = contract.ToolCallPart(index, "", call_id, name)
                case deltas.CallArguments(index, fragment):
                    part = self._calls.get(index, contract.ToolCallPart(index))
                    self._calls[index] = part._replace(arguments=part.arguments + fragment)
        return text
