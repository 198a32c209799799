"""The ids of tool calls."""

from __future__ import annotations

import hashlib
import string

from tokenbus.worker.contract.chat_format import Calls

_LETTERS = string.ascii_letters + string.digits


def call_id(calls: Calls, key: str, index: int, name: str, number: int | None) -> str:
    """Derives the id of an answer's `index`th call deterministically, so every reader of the same answer gets the same
    id. `number` is the call's number in the conversation, if the model has written one."""
    if calls.id_form:
        return calls.id_form.replace("{name}", name).replace("{index}", str(index if number is None else number))
    digest = hashlib.blake2b(f"{key}:{index}".encode(), digest_size=32).digest()
    letters = "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest)
    return letters[: calls.id_length] if calls.id_length else f"call_{letters[:24]}"
