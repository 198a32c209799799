"""Packs reasoning into a text that clients store and send back, for those that store no other form.

Nothing is encrypted: the same client gets the same text in the item's `content`. The name is OpenAI's."""

import base64

_MARK = "tokenbus.1."


def pack(reasoning: str) -> str:
    """Returns the reasoning as an opaque text."""
    return _MARK + base64.b64encode(reasoning.encode()).decode()


def unpack(content: str | None) -> str:
    """Returns the reasoning in a text made by `pack`, or an empty text for other servers'."""
    if content is None or not content.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(content.removeprefix(_MARK), validate=True).decode()
    except ValueError:
        return ""
