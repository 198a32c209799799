"""Reads a stream of the wire to its end."""

from tokenbus.client.answer import Answer, AnswerBuilder
from tokenbus.client.wire.chunk_stream import ChunkStream


async def answer_of(stream: ChunkStream) -> Answer:
    """Returns the whole answer, which must not end in an error."""
    builder = AnswerBuilder()
    async for chunk in stream:
        builder.add(chunk)
        assert not chunk.error, chunk.error
    return builder.build()
