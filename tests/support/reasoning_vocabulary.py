"""Vocabularies of single bytes and the special tokens of a chat format, for reasoning that is closed."""

import re
from collections.abc import Sequence

import msgspec

from tokenbus.worker.chat_format.chat_rules import ChatRules
from tokenbus.worker.chat_format.known_formats import KNOWN_FORMATS, with_tokens
from tokenbus.worker.chat_format.parsing.parser import AnswerParser
from tokenbus.worker.chat_format.reasoning_budget import ReasoningBudget, ReasoningCloser, closing_marker
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.chat_format import ChatFormat

SPECIAL = re.compile(r"<\|[^|>]+\|>|\[/?[A-Z_]+\]|</?think>|<channel\|>|<\|channel>")
KNOWN = {known.name: known.format for known in KNOWN_FORMATS if closing_marker(known.format)}
TOOLS: dict[str, dict[str, object]] = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}}


class ReasoningVocabulary:
    """A token for each byte, for each special text of a format, and for any other bytes that are asked for."""

    def __init__(self, form: ChatFormat, *, has_special: bool = True) -> None:
        texts = sorted(set(SPECIAL.findall(str(msgspec.to_builtins(form))))) if has_special else []
        self.token_bytes = [bytes([byte]) for byte in range(256)] + [b"" for _ in texts]
        self.form = with_tokens(form, {text: 256 + place for place, text in enumerate(texts)})
        self.rules = ChatRules(self.form, self.token_bytes)
        self.closer = ReasoningCloser(self.rules, self.encode)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def tokens(self, text: str) -> list[int]:
        """Returns special tokens where the text spells them, and bytes."""
        pieces = self.rules.rules.alphabet.split(text)
        return [token for one in pieces for token in ([one] if isinstance(one, int) else self.encode(one))]

    def token(self, data: bytes) -> int:
        self.token_bytes.append(data)
        return len(self.token_bytes) - 1

    def text(self, token_ids: Sequence[int]) -> str:
        special = {token: text.encode() for text, token in self.form.tokens.items()}
        return b"".join(special.get(one, self.token_bytes[one]) for one in token_ids).decode(errors="replace")

    def budget(self, max_tokens: int, *, prompt: str | None = None, message: str = "") -> ReasoningBudget:
        parsing = engine_request.OutputParsing(tools=TOOLS, generation_prompt=prompt)
        limit = engine_request.ReasoningLimit(max_tokens=max_tokens, parsing=parsing, message=message)
        return ReasoningBudget(self.closer, limit)

    def counted(self, token_ids: Sequence[int], prompt: str | None) -> int:
        """Returns the tokens of an answer that its reader takes for reasoning."""
        parser = AnswerParser(self.rules.rules, tools=TOOLS, key="", generation_prompt=prompt)
        count = 0
        for token_id in token_ids:
            count += parser.is_reasoning
            data = b"" if self.rules.is_marker(token_id) else self.token_bytes[token_id]
            parser.feed(token_id, data.decode(errors="replace"))
        return count
