"""Finds out from its chat format and tokenizer whether a loaded model's reasoning can be closed."""

from tokenbus.worker.chat_format.chat_rules import ChatRules
from tokenbus.worker.chat_format.reasoning_budget import ReasoningCloser
from tokenbus.worker.contract.chat_format import ChatFormat
from tokenbus.worker.engine.constraints.vocabulary import ModelTokens, PartEncoder


def closer_of(chat_format: ChatFormat | None, model: ModelTokens, missing: dict[str, str]) -> ReasoningCloser | None:
    """Returns what closes the reasoning of a model's answers, or None if nothing does.

    Then `missing` says why, if the model reasons."""
    if chat_format is None or not chat_format.reasons:
        return None
    parts = PartEncoder(model)
    closer = ReasoningCloser(ChatRules(chat_format, model.token_bytes), lambda text: parts.encode(text.encode()))
    if closer.can_close(model.end_token_ids):
        return closer
    missing["reasoning_budget"] = "no tokens close its reasoning without ending the answer"
    return None
