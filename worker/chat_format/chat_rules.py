"""A model's chat format, prepared for its vocabulary, as a worker needs it for every request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenbus.worker.chat_format.parsing.markers import Rules
from tokenbus.worker.chat_format.parsing.parser import AnswerParser
from tokenbus.worker.contract.chat_format import ChatFormat

_PROMPT_TAIL = 256
"""The number of tokens at the end of a prompt that are searched for the beginning of the answer."""

_SOME_TEXT = "text"


class ChatRules:
    """The rules for reading a model's answers. `token_bytes` are the bytes of each token."""

    def __init__(self, chat_format: ChatFormat, token_bytes: Sequence[bytes]) -> None:
        self.format = chat_format
        self.rules = Rules(chat_format)
        self._turn_open = self.rules.alphabet.encode(chat_format.turn_open)
        self.token_bytes = token_bytes
        opening = ""
        if chat_format.calls is not None:
            opening = (chat_format.calls.section_open or chat_format.calls.call_open).strip()
        first = next((text for text in chat_format.tokens if opening.startswith(text)), None)
        self.call_tokens = () if first is None else (chat_format.tokens[first],)
        """The token that opens calls, if that is a single token."""

    def __repr__(self) -> str:
        return f"<ChatRules {self.format!r}>"

    def is_marker(self, token_id: int) -> bool:
        """Returns whether a token is a marker, or part of one."""
        return token_id in self.rules.alphabet.by_token

    def generation_prompt(self, prompt: Sequence[int]) -> str:
        """Returns the beginning of the answer found at the end of a prompt, such as `<think>`. If there is none, it is
        what the template writes after every prompt."""
        tail = "".join(self._texts(prompt[-_PROMPT_TAIL:])) if self._turn_open else ""
        at = tail.rfind(self._turn_open) if tail else -1
        if at < 0:
            return self.format.generation_prompt
        return self.rules.alphabet.decode(tail[at + len(self._turn_open) :])

    def continued_prompt(self) -> str:
        """Returns a beginning of an answer after which its text continues, in place of the one in the prompt: what the
        client has written is all text, and after it reasoning is over."""
        form = self.format
        if form.channels is not None:
            before = f"{form.channels.channel}{form.channels.content[0]}{form.channels.body}"
        else:
            before = "" if form.reasoning is None else f"{form.reasoning.open}{form.reasoning.close}"
        return f"{before}{form.content_open}{_SOME_TEXT}"

    @property
    def calls_follow_text(self) -> bool:
        """Whether a call may come after text in the same message: it has a marker of its own."""
        return self.format.channels is None and self.rules.calls is not None and not self.rules.calls.is_bare

    def begins_in_reasoning(self, generation_prompt: str) -> bool:
        """Returns whether an answer after this begins inside the reasoning."""
        return AnswerParser(self.rules, tools=None, key="", generation_prompt=generation_prompt).is_reasoning

    def has_reasoned(self, generation_prompt: str) -> bool:
        """Returns whether an answer after this begins after the reasoning."""
        close = self.format.reasoning.close.strip() if self.format.reasoning is not None else ""
        return bool(close) and close in generation_prompt and not self.begins_in_reasoning(generation_prompt)

    def _texts(self, token_ids: Iterable[int]) -> Iterable[str]:
        """Yields the text of each token, with a marker as one character that no text can contain."""
        for token_id in token_ids:
            special = self.rules.alphabet.by_token.get(token_id)
            yield self.token_bytes[token_id].decode(errors="replace") if special is None else special
