"""What a stream's client gets, without an outbox."""

from tokenbus.protocol.wire import messages
from tokenbus.worker.contract import engine_output
from tokenbus.worker.streams.stream import WorkerStream

ROOM_BYTES = 1 << 20


def publish(
    stream: WorkerStream, output: engine_output.Output | None = None, room_bytes: int = ROOM_BYTES
) -> list[messages.Chunk]:
    """Has a stream take an output; returns the chunks with what its client lacks, which it then has."""
    if output is not None:
        stream.take(output)
    plain = stream.plain_chunk(room_bytes)
    chunks = list(stream.unpublished(room_bytes)) if plain is None else [plain]
    stream.flushed(chunks)
    return chunks


def chunk_of(stream: WorkerStream, output: engine_output.Output) -> messages.Chunk | None:
    """Has a stream take an output; returns the chunk of it, if it has one."""
    chunks = publish(stream, output)
    assert len(chunks) <= 1, chunks
    return chunks[0] if chunks else None


def opening(stream: WorkerStream) -> messages.Chunk | None:
    """Returns the empty chunk that shows that a stream is alive, if its client is to get one."""
    stream.show()
    chunks = publish(stream)
    return chunks[0] if chunks and chunks[0].finish_reason is None else None


def replay(
    stream: WorkerStream, offset: int, room_bytes: int = ROOM_BYTES, prompt_offset: int | None = None
) -> list[messages.Chunk]:
    """Returns the chunks for a client that lacks everything from there on."""
    stream.lacks(offset, prompt_offset)
    stream.show()
    return publish(stream, room_bytes=room_bytes)
