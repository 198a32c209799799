"""Limits the reasoning of an answer: when its budget is spent, it is closed with the format's own marker.

    counting    the reasoning still has tokens left
    spent       it has none; the marker waits until a character, or a potential marker, is complete
    closing     each token of the marker is forced in turn
    closed      the model can neither reason again nor close its reasoning a second time

The state is a function of the answer's tokens, so an engine that continues the answer decides the same. It counts the
same tokens as reasoning as the answer's reader does, since both use the same parser.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as Listing

from tokenbus.worker.chat_format.chat_rules import ChatRules
from tokenbus.worker.chat_format.parsing.parser import AnswerParser
from tokenbus.worker.contract import engine_request
from tokenbus.worker.contract.chat_format import ChatFormat

MAX_WAIT = 16
"""The most tokens for which the marker waits: one is nearly always enough, but each token that ends a character may
begin another."""


def closing_marker(form: ChatFormat) -> str:
    """Returns the text that ends reasoning; empty if the format has none.

    If answers consist of messages, it ends the message and begins the next one."""
    channels = form.channels
    if channels is not None:
        return channels.ends[0] + channels.start if channels.reasoning else ""
    if form.reasoning is None or not form.reasoning.close.strip():
        return ""
    return form.reasoning.close


class ReasoningCloser:
    """The tokens that close a model's reasoning. `encode` tokenizes part of an answer."""

    def __init__(self, rules: ChatRules, encode: Callable[[str], Listing[int]]) -> None:
        form = rules.format
        self.rules = rules
        self._encode = encode
        self._marker = closing_marker(form)
        self._edge = self._marker[: len(self._marker) - len(self._marker.lstrip())]
        """Whitespace before the marker itself."""
        around = () if form.reasoning is None else (form.reasoning.open.strip(), form.reasoning.close.strip())
        # Tokens that are not special but are never cut, such as Qwen3's, are found by the tokenizer alone.
        found = [[form.tokens[one]] if one in form.tokens else encode(one) for one in around if one]
        self.markers = tuple(tokens[0] for tokens in found if len(tokens) == 1)
        """The markers around reasoning that are one token each."""
        channels = form.channels
        self.channel = None if channels is None else form.tokens.get(channels.channel)
        """The token before the name of a channel."""
        names = () if channels is None else channels.reasoning
        self.channel_names = tuple(tokens[0] for name in names if (tokens := encode(name)))
        """The first tokens of the names of reasoning channels."""

    def __repr__(self) -> str:
        return f"<ReasoningCloser {self._marker!r}>"

    def tokens(self, message: str = "", *, behind: str = "") -> list[int]:
        """Returns the tokens that close reasoning whose text ends with `behind`.

        `message` becomes a separate paragraph before the marker; a marker at its own end is dropped as a mistake."""
        message = message.strip().removesuffix(self._marker.strip()).rstrip()
        found = list(self._encode(f"\n\n{message}")) if message else []
        marker = self._marker
        if self._edge and not message and behind.endswith(self._edge):
            marker = marker[len(self._edge) :]
        for piece in self.rules.rules.alphabet.split(marker):
            found += [piece] if isinstance(piece, int) else self._encode(piece)
        return found

    def can_close(self, end_token_ids: Collection[int]) -> bool:
        """Returns whether the tokens really close reasoning and none of them ends the answer."""
        if not self._marker or set(self.tokens()) & set(end_token_ids):
            return False
        form, opening = self.rules.format, self.rules.format.generation_prompt
        if form.channels is not None:
            opening = f"{form.channels.channel}{form.channels.reasoning[0]}{form.channels.body}"
        elif form.reasoning is not None and form.reasoning.open.strip():
            opening = form.reasoning.open
        parsing = engine_request.OutputParsing(generation_prompt=opening)
        budget = ReasoningBudget(self, engine_request.ReasoningLimit(max_tokens=0, parsing=parsing))
        if not budget.is_reasoning:
            return False
        budget.accept_forced(len(self.tokens()))
        return not budget.is_reasoning and budget.forced is None


class ReasoningBudget:
    """The budget of one answer, after the accepted tokens."""

    def __init__(self, closer: ReasoningCloser, limit: engine_request.ReasoningLimit) -> None:
        self._closer = closer
        self._limit = limit
        self._parser = AnswerParser(
            closer.rules.rules,
            tools=limit.parsing.tools,
            key="",
            generation_prompt=limit.parsing.generation_prompt,
            continues=limit.parsing.continues,
        )
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._count = 0
        """The number of reasoning tokens."""
        self._waited = 0
        self._has_reasoned = False
        self._last = ""
        """The text of the last token."""
        self._last_id = -1
        self._forced: deque[int] = deque()
        self._decide()

    def __repr__(self) -> str:
        return f"<ReasoningBudget {self._count} of {self._limit.max_tokens}, {len(self._forced)} forced>"

    @property
    def is_reasoning(self) -> bool:
        """Whether the next token is reasoning, unless it closes it."""
        return self._parser.is_reasoning

    @property
    def forced(self) -> int | None:
        """The token that must come next; None if there is a choice."""
        return self._forced[0] if self._forced else None

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Tokens that must not come next: once reasoning is closed, a model may try to open or close it again."""
        if not self._has_reasoned or self.is_reasoning or self._forced or not self._is_spent:
            return ()
        closer = self._closer
        if closer.channel is not None:
            return closer.channel_names if self._last_id == closer.channel else ()
        return closer.markers

    def accept(self, token_id: int) -> None:
        """Takes the next token. A constraint may force a different one from that forced here, which is then requested
        again."""
        if self._forced and self._forced.popleft() != token_id:
            self._forced.clear()
        self._count += self.is_reasoning
        rules = self._closer.rules
        if rules.is_marker(token_id):
            self._decoder.reset()
            self._last = ""
        else:
            self._last = self._decoder.decode(rules.token_bytes[token_id])
        self._last_id = token_id
        self._parser.feed(token_id, self._last)
        self._decide()

    def accept_forced(self, limit: int) -> list[int]:
        """Takes up to `limit` forced tokens and returns them."""
        taken: list[int] = []
        while len(taken) < limit and self._forced:
            taken.append(self._forced[0])
            self.accept(taken[-1])
        return taken

    @property
    def _is_spent(self) -> bool:
        return self._count >= self._limit.max_tokens

    def _decide(self) -> None:
        """Decides whether to close reasoning now."""
        self._has_reasoned |= self.is_reasoning
        if self._forced or not self.is_reasoning or not self._is_spent:
            self._waited = 0
            return
        in_character, in_marker = bool(self._decoder.getstate()[0]), bool(self._parser.held.strip())
        if (in_character or in_marker) and self._waited < MAX_WAIT:
            self._waited += 1
            return
        message = self._limit.message if self._count else ""
        self._forced.extend(self._closer.tokens(message, behind=self._last))
