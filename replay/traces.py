"""Traces: requests with their arrival times, from a file in Mooncake's format or from a generator."""

import gzip
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from tokenbus.protocol.wire import subjects

TRACE_BLOCK_TOKENS = 512
"""Tokens in the prompt block that one id of a Mooncake trace stands for."""
MAX_REQUESTS = 1_000_000
_ID_SPAN = 1 << 31


class TraceError(ValueError):
    """Raised for an unreadable trace. The message names the line and the problem."""


class TracedRequest(NamedTuple):
    """One request of a trace. Prompts that begin with the same ids begin with the same tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    """One id for each block of the prompt. The last block may be partial."""
    block_tokens: int = TRACE_BLOCK_TOKENS
    """Tokens per block; independent of the size of an engine's KV blocks."""
    tenant: str = subjects.DEFAULT_TENANT
    priority: int = 0

    def key(self, number: int) -> str:
        """Returns the key by which routers and workers know the request at that place in the trace."""
        return f"{self.tenant}:{number}"

    def token_ids(self, vocabulary: int) -> "array[int]":
        """Returns the prompt's token ids, all below `vocabulary`.

        Each block starts with its id, written in two tokens, and is padded with ones."""
        ids = np.ones((len(self.hash_ids), self.block_tokens), np.uint32)
        high, low = np.divmod(np.array(self.hash_ids, np.int64), vocabulary - 1)
        ids[:, 0] += low.astype(np.uint32)
        ids[:, 1] += (high % (vocabulary - 1)).astype(np.uint32)
        return array("I", ids.tobytes()[: 4 * self.prompt_tokens])


class _Line(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


_lines = msgspec.json.Decoder(_Line)


def read(path: Path) -> list[TracedRequest]:
    """Reads a trace in Mooncake's format: one JSON object per line, gzipped or not. Returns its requests ordered by
    time.

    Raises TraceError, and OSError for a file that can't be read."""
    requests = []
    for number, line in enumerate(_text_lines(path), 1):
        if line.strip():
            requests.append(_request(path, number, line))
        if len(requests) > MAX_REQUESTS:
            raise TraceError(f"{path} has more than {MAX_REQUESTS:,} requests")
    if not requests:
        raise TraceError(f"{path} has no requests")
    return sorted(requests, key=lambda request: request.at_s)


def _text_lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as plain:
        is_zipped = plain.read(2) == b"\x1f\x8b"
        plain.seek(0)
        try:
            yield from gzip.GzipFile(fileobj=plain) if is_zipped else plain
        except (EOFError, gzip.BadGzipFile) as error:
            raise TraceError(f"{path}: {error}") from error


def _request(path: Path, number: int, line: bytes) -> TracedRequest:
    try:
        fields = _lines.decode(line)
    except msgspec.MsgspecError as error:
        raise TraceError(f"{path}, line {number}: {error}") from error
    full = -(-fields.input_length // TRACE_BLOCK_TOKENS)
    if fields.input_length < 1 or fields.output_length < 1 or fields.timestamp < 0:
        raise TraceError(f"{path}, line {number}: lengths must be at least 1, timestamps at least 0")
    if len(fields.hash_ids) != full:
        raise TraceError(
            f"{path}, line {number}: {fields.input_length} tokens are {full} blocks of {TRACE_BLOCK_TOKENS}, "
            f"got {len(fields.hash_ids)} hash_ids"
        )
    if not all(0 <= hash_id < _ID_SPAN for hash_id in fields.hash_ids):
        raise TraceError(f"{path}, line {number}: hash_ids must be 0 to 2^31 - 1")
    return TracedRequest(fields.timestamp / 1e3, fields.input_length, fields.output_length, tuple(fields.hash_ids))
