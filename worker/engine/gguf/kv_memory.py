"""Keeps the device memory for keys and values within a budget."""

import msgspec

from tokenbus.worker.engine.gguf import context
from tokenbus.worker.engine.gguf.metadata import Metadata
from tokenbus.worker.engine.gguf.token_size import bytes_per_token
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.runner import ModelError


def fit_to_budget(settings: EngineSettings, metadata: Metadata, trained: int) -> EngineSettings:
    """Lowers the KV memory that the settings ask for to `kv_limit_bytes`, if that is less.

    Raises ModelError if not even one request of the context length would fit."""
    each = bytes_per_token(metadata, settings)
    if not settings.kv_limit_bytes or not each:
        return settings
    fits = settings.kv_limit_bytes // each // settings.kv_block_size * settings.kv_block_size
    length = context.context_length(settings, trained)
    if fits < (length if settings.context_length else settings.kv_block_size):
        raise ModelError(
            f"--kv-budget leaves {settings.kv_limit_bytes} bytes for this replica, which is {fits} tokens of {each} "
            f"bytes, and one request may need {length}: raise it, or lower --context-length"
        )
    wanted = settings.kv_tokens or context.default_kv_tokens(length)
    return msgspec.structs.replace(settings, kv_tokens=min(wanted, fits), context_length=min(length, fits))
