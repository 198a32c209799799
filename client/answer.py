"""A whole answer, assembled from the chunks of its stream."""

import msgspec

from tokenbus.protocol.wire import messages


class ToolCall(msgspec.Struct, kw_only=True):
    """A call of one of the request's tools."""

    id: str
    """The id that the tool's result must refer to."""
    name: str
    """The function's name."""
    arguments: str = ""
    """The text of a JSON object, if the call is complete."""


class Answer(msgspec.Struct, kw_only=True):
    """The parts of an answer received so far."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []
    """All of them are complete if the finish reason is `tool_calls`; otherwise the last one may be cut off."""
    finish_reason: messages.FinishReason | None = None
    stopped_by: messages.StoppedBy | None = None
    """Who ended it early, if anyone: then it is incomplete, like one that has reached its `max_tokens`."""
    usage: messages.Usage | None = None

    def add(self, chunk: messages.Chunk) -> None:
        """Adds the next chunk of the stream, as the client's `Stream` yields them: each once and in order."""
        self.text += chunk.text
        self.reasoning += chunk.reasoning or ""
        for delta in chunk.tool_calls or ():
            if delta.function.name:
                self.tool_calls.append(ToolCall(id=delta.id or "", name=delta.function.name))
            self.tool_calls[delta.index].arguments += delta.function.arguments
        if chunk.finish_reason is not None:
            self.finish_reason, self.stopped_by = chunk.finish_reason, chunk.stopped_by or None
            self.usage = chunk.usage or None

    def to_message(self) -> messages.ChatMessage:
        """Returns the answer as the assistant's turn in the conversation's next request."""
        calls = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for one in self.tool_calls
        ]
        return messages.ChatMessage(
            role="assistant",
            content=self.text or None if calls else self.text,
            reasoning_content=self.reasoning or None,
            tool_calls=calls or None,
        )
