"""Finds the form in which a chat template takes past answers.

A template is written for one client's messages; it fails on those of others, or silently loses part of them. Rendering
a known answer in each form shows which one it was written for."""

import re
from collections.abc import Callable
from typing import Any

from tokenbus.protocol.prompt import history
from tokenbus.protocol.prompt.history import AnswerForm, Beside, MessageDict
from tokenbus.protocol.wire.messages import ChatMessage

_ARGUMENTS = {"first_probe": "second_probe"}
_CONTENT, _REASONING = "third_probe", "fourth_probe"
_CALL: dict[str, Any] = {"function": {"name": "probe", "arguments": _ARGUMENTS}}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "probe"}}]
"""The tools with which the answers are rendered."""

Render = Callable[[list[MessageDict]], str | None]
"""Renders a conversation with TOOLS, with each special token as one character; returns None if the template refuses
it."""


def find(render: Render) -> AnswerForm:
    """Returns the form that a template takes, or the usual one if it renders calls in no form."""
    # Objects first: a template that is given text often prints it as a JSON string, and still renders. One that needs
    # text fails on an object, or prints it in Python's notation.
    for with_objects in (True, False):
        forms = [AnswerForm(with_objects, empty) for empty in ("", None)]
        shown = {form: text for form in forms if (text := _shown(render, form, _answer())) is not None}
        if shown:
            # Some print "None" where there is no content, others an empty turn: the shorter rendering has neither.
            return _with_words(render, min(shown, key=lambda one: len(shown[one])))
    return history.USUAL_FORM


def _with_words(render: Render, form: AnswerForm) -> AnswerForm:
    """Returns the form, completed with where content and reasoning go beside calls."""
    answer = _answer(content=_CONTENT, reasoning_content=_REASONING)
    forms = [form._replace(beside=beside) for beside in Beside]
    shown = {form: text for form in forms if (text := _shown(render, form, answer)) is not None}
    # A template that omits the content of a message with calls does so by design.
    found = form if form in shown else max(shown, key=lambda one: _CONTENT in shown[one], default=form)
    if _REASONING in shown.get(found, _REASONING):
        return found
    other = found._replace(thinks_in_content=True)
    text = _shown(render, other, answer)
    takes_chunks = text is not None and _REASONING in text and not re.search(r"['\"]thinking['\"]: ", text)
    return other if takes_chunks else found


def _answer(**fields: str) -> ChatMessage:
    return ChatMessage(role="assistant", tool_calls=[_CALL], **fields)


def _shown(render: Render, form: AnswerForm, answer: ChatMessage) -> str | None:
    """Returns a template's rendering of a conversation with an answer; None if it refuses, or omits the call."""
    question, result = ChatMessage(role="user", content="question"), ChatMessage(role="tool", content="result")
    text = render(history.message_dicts([question, answer, result], form))
    if text is None or str(_ARGUMENTS) in text:
        return None
    return text if all(word in text for word in _ARGUMENTS.keys() | _ARGUMENTS.values()) else None
