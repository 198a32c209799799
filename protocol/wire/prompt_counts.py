"""Counts a prompt once for all answers to it that a client asks for together.

The answers are requests of their own, which name the first of them (`copy_of`). A client could name any, so
the router compares the prompts, as it remembers its last requests. Where another router has placed the first one, the
worker compares them, if it has both."""

import hashlib
from collections.abc import Iterable

from tokenbus.protocol.wire import codec, messages


def prompt_digest(
    token_ids: bytes, adapters: Iterable[tuple[str, float]], cache_salt: str | None, key_id: str
) -> bytes:
    """Returns what tells a prompt, how it is computed and whose it is from any other."""
    found = hashlib.blake2b(token_ids, digest_size=16)
    found.update(repr((list(adapters), cache_salt or "", key_id)).encode())
    return found.digest()


def without_prompt(usage: messages.Usage) -> messages.Usage:
    """Returns the usage of an answer whose prompt is counted with another one."""
    return codec.replace(usage, prompt_tokens=0, cached_tokens=0, total_tokens=usage.completion_tokens)
