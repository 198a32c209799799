"""Requests with their times: from a file in Mooncake's format, or from a generator."""

import gzip
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from tokenbus.protocol.wire import subjects

TRACE_BLOCK_TOKENS = 512
"""Tokens that one id of a Mooncake trace stands for."""
MAX_REQUESTS = 1_000_000
_ID_SPAN = 1 << 31


class TraceError(ValueError):
    """A trace that can't be read; the message names the line and what is wrong with it."""


class TracedRequest(NamedTuple):
    """One request of a trace. Prompts that begin with the same ids begin with the same tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]
    """One for each block of the prompt, the last of which may be cut off."""
    block_tokens: int = TRACE_BLOCK_TOKENS
    """Tokens of such a block; an engine's own blocks may have another size."""
    tenant: str = subjects.DEFAULT_TENANT
    priority: int = 0

    def token_ids(self, vocabulary: int) -> "array[int]":
        """Token ids below `vocabulary`: a block is its own id, written in two tokens, and then filled up."""
        ids = array("I")
        for hash_id in self.hash_ids:
            low, high = hash_id % (vocabulary - 1), hash_id // (vocabulary - 1)
            ids.extend((1 + low, 1 + high % (vocabulary - 1)))
            ids.extend(_FILLING[: self.block_tokens - 2])
        del ids[self.prompt_tokens :]
        return ids


_FILLING = array("I", [1]) * (1 << 16)


class _Line(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


_lines = msgspec.json.Decoder(_Line)


def read(path: Path) -> list[TracedRequest]:
    """All requests of a trace in Mooncake's format, one JSON object a line, gzipped or not, by time.

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
        said = _lines.decode(line)
    except msgspec.MsgspecError as error:
        raise TraceError(f"{path}, line {number}: {error}") from error
    full = -(-said.input_length // TRACE_BLOCK_TOKENS)
    if said.input_length < 1 or said.output_length < 1 or said.timestamp < 0:
        raise TraceError(f"{path}, line {number}: lengths must be at least 1, timestamps at least 0")
    if len(said.hash_ids) != full:
        raise TraceError(
            f"{path}, line {number}: {said.input_length} tokens are {full} blocks of {TRACE_BLOCK_TOKENS}, "
            f"got {len(said.hash_ids)} hash_ids"
        )
    if not all(0 <= hash_id < _ID_SPAN for hash_id in said.hash_ids):
        raise TraceError(f"{path}, line {number}: hash_ids must be 0 to 2^31 - 1")
    return TracedRequest(said.timestamp / 1e3, said.input_length, said.output_length, tuple(said.hash_ids))
