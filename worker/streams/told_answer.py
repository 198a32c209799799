"""Turns a whole answer into the message in which a client sends it back."""

from tokenbus.protocol.wire import messages
from tokenbus.worker.streams.replay_buffer import Segment


def to_message(answer: Segment, *, with_reasoning: bool) -> messages.ChatMessage:
    """Returns an answer as the message in which a client sends it back."""
    calls = [
        {
            "id": call.id or "",
            "type": "function",
            "function": {"name": call.function.name or "", "arguments": call.function.arguments},
        }
        for call in answer.tool_calls
    ]
    return messages.ChatMessage(
        role="assistant",
        content=answer.text,
        reasoning_content=answer.reasoning if with_reasoning else None,
        tool_calls=calls or None,
    )
