"""Converts conversations to the form that chat templates expect."""

import re
from collections.abc import Callable, Mapping, Sequence

from tokenbus.gateway.http import http_errors
from tokenbus.protocol.wire import codec, errors, limits, messages, params, reasoning

_SESSION_HEADERS = ("x-claude-code-session-id", "session-id", "session_id", "x-session-id")
"""Headers in which agents name their session."""
_MAX_SESSION_BYTES = 256
_MAX_ITEMS = 4 * limits.MAX_MESSAGES
"""The most items or messages, for an API that joins several into one wire message."""
_MESSAGE = re.compile(r"messages\[(\d+)\]")


def normalized(conversation: Sequence[messages.ChatMessage]) -> list[messages.ChatMessage]:
    """Returns a conversation with `developer` renamed to `system`, and leading system messages merged.

    Most templates support only one system message, at the beginning."""
    known = [codec.replace(one, role="system") if one.role == "developer" else one for one in conversation]
    count = next((number for number, one in enumerate(known) if one.role != "system"), len(known))
    texts = [_text_of(one.content) for one in known[:count]]
    if count < 2 or None in texts:
        return known
    joined = "\n\n".join(text for text in texts if text)
    return [messages.ChatMessage(role="system", content=joined), *known[count:]]


def check_count(field: str, items: Sequence[object]) -> None:
    """Raises RequestError for more items than can make up a wire conversation."""
    if len(items) > _MAX_ITEMS:
        raise errors.invalid_field(field, f"must have at most {_MAX_ITEMS} items, got {len(items)}")


def prompt_of(request: messages.GenerateRequest, *, only_count: bool = False) -> messages.TokenizeRequest:
    """Returns a request for the tokens of a conversation's or a text's prompt, or for their number."""
    asked = request.reasoning or params.ReasoningOptions()
    return messages.TokenizeRequest(
        id=request.id,
        prompt=request.prompt,
        messages=request.messages,
        tools=request.tools,
        chat_template_kwargs=reasoning.template_arguments(asked.effort, request.chat_template_kwargs, asked.max_tokens),
        continue_final_message=request.continue_final_message,
        only_count=only_count or None,
        timeout_ms=request.timeout_ms,
    )


def given_names(renamed: Mapping[str, str], num_joined: int) -> Callable[[str], str]:
    """Returns a function that translates the names of the wire's fields into those of a request.

    `renamed` has the names that differ. The request has `num_joined` messages more than the normalized
    conversation."""

    name_by_field = http_errors.by_field(renamed)

    def name_of(param: str) -> str:
        param = name_by_field(param)
        found = _MESSAGE.match(param)
        if found is None or not int(found[1]):
            return param
        return f"messages[{int(found[1]) + num_joined}]{param[found.end() :]}"

    return name_of


def session_of(headers: Mapping[str, str]) -> str | None:
    """Returns the session named by a header, if any."""
    for name in _SESSION_HEADERS:
        value = headers.get(name, "")
        if 0 < len(value.encode()) <= _MAX_SESSION_BYTES:
            return value
    return None


def _text_of(content: str | list[messages.ContentPart] | None) -> str | None:
    """Returns the text of a message, or None if it has other parts, which validation refuses by position."""
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.type != "text" or part.text is None for part in content):
        return None
    return "".join(part.text or "" for part in content)
