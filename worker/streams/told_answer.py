"""Puts an answer together that was streamed in parts, as the message in which a client sends it back."""

from collections.abc import Sequence

from tokenbus.protocol.wire import messages
from tokenbus.worker.streams.replay_buffer import Segment


def to_message(parts: Sequence[Segment | messages.Chunk], *, with_reasoning: bool) -> messages.ChatMessage:
    """Returns an answer that comes in these parts as the message in which a client sends it back."""
    calls: dict[int, dict[str, str]] = {}
    for part in parts:
        for delta in part.tool_calls or ():
            call = calls.setdefault(delta.index, {"id": delta.id or "", "name": delta.function.name or "", "said": ""})
            call["said"] += delta.function.arguments
    return messages.ChatMessage(
        role="assistant",
        content="".join(part.text for part in parts),
        reasoning_content="".join(part.reasoning or "" for part in parts) if with_reasoning else None,
        tool_calls=[
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["said"]}}
            for call in calls.values()
        ]
        or None,
    )
