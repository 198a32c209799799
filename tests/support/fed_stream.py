"""A client's stream that is fed by the test."""

from tokenbus.client.wire.chunk_stream import ChunkStream
from tokenbus.protocol.wire import codec, messages


class FakeTransport:
    """Counts a stream's calls to its client."""

    def __init__(self) -> None:
        self.num_cancels = 0

    def send_cancel(self, stream: ChunkStream) -> None:
        self.num_cancels += 1

    def send_resync(self, stream: ChunkStream, offset: int, prompt_offset: int | None = None) -> None: ...

    def submit(self, stream: ChunkStream, request: messages.GenerateRequest) -> None: ...

    def forget(self, stream: ChunkStream) -> None: ...


def stream_over(line: FakeTransport, *chunks: messages.Chunk) -> ChunkStream:
    """Returns a stream that has received these chunks."""
    stream = ChunkStream(messages.GenerateRequest(id="r", prompt="hi"), codec.Encoding.JSON, line, 0.0)
    for chunk in chunks:
        stream.feed(codec.encode(chunk, codec.Encoding.JSON), 0.0)
    return stream
