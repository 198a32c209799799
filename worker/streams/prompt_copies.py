"""Counts a prompt once for all answers to it that a client asks for together.

The answers are requests of their own, which name the first of them (`copy_of`). A client could name any, so the worker
compares what was computed: a prompt is counted with another only where that one has been, here."""

from __future__ import annotations

import hashlib

from tokenbus.protocol.wire import codec, internal, messages

MAX_COPIES = 127
"""The most requests whose prompt counts with another's: the further answers that one of OpenAI's requests may want."""


def prompt_digest(run: internal.Run) -> bytes:
    """Returns what tells a prompt, how it is computed and whose it is from any other of the same model."""
    found = hashlib.blake2b(run.token_ids, digest_size=16)
    adapters = [(one.digest, one.scale) for one in run.adapters]
    found.update(repr((adapters, run.params.cache_salt or "", run.key_id)).encode())
    return found.digest()


def without_prompt(usage: messages.Usage) -> messages.Usage:
    """Returns the usage of an answer whose prompt is counted with another one."""
    return codec.replace(usage, prompt_tokens=0, cached_tokens=0, total_tokens=usage.completion_tokens)
