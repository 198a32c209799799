"""Finds out by trial what a loaded model can do: an engine offers only what it has seen work."""

from __future__ import annotations  # llama_cpp names its handle types for type checkers only

from typing import NamedTuple

import numpy as np
from llama_cpp import llama_cpp as llama

from tokenbus.worker.contract.contract import CheckpointSizes
from tokenbus.worker.contract.engine_errors import DeviceError, ModelError
from tokenbus.worker.engine.gguf import backend, state_blob
from tokenbus.worker.engine.gguf.context import BatchPart, LlamaBatch
from tokenbus.worker.engine.gguf.lanes import FIRST_SEQ_ID, Lanes
from tokenbus.worker.engine.gguf.state_blob import StateFormat

TOKENS = 16
_CLOSE = 0.05
"""The largest difference, as a share of the logits' standard deviation, that counts as equal: a batch of another shape
rounds differently."""


class Capabilities(NamedTuple):
    """The abilities of a context."""

    can_share: bool
    """Whether lanes can share tokens, be truncated, saved and restored, at any token."""
    bytes_per_token: int
    """The size of a saved token in host memory; 0 if nothing can be saved."""
    state_format: StateFormat | None = None
    """The format in which tokens are saved, if it is one that can be checked."""
    checkpoint: CheckpointSizes | None = None
    """The sizes of a checkpoint's copies, if lanes have a partial state that can be saved and restored."""
    can_batch: bool = True
    """Whether sequences can be computed in one batch; else each needs its own."""
    canary: list[int] = []
    """The first token of the trial, if the logits after all of them are finite."""
    missing: dict[str, str] = {}
    """Abilities that it lacks, with the reasons, as in the engine's config."""


Row = np.ndarray[tuple[int], np.dtype[np.float32]]
Rows = np.ndarray[tuple[int, ...], np.dtype[np.float32]]
_NONE = Capabilities(False, 0)


def capabilities(model: llama.llama_model_p, context: llama.llama_context_p, lanes: Lanes) -> Capabilities:
    """Computes a few tokens, which also makes llama.cpp allocate what the first request would need.

    Raises ModelError if not even that works."""
    count = min(TOKENS, llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model)), llama.llama_n_ctx_seq(context))
    tokens = list(range(count))
    row = _decode(context, tokens, 0, FIRST_SEQ_ID)
    if row is None:
        raise ModelError(f"llama.cpp can't compute a first step: {backend.last_error()}")
    found, missing = _NONE, {}
    if count == TOKENS and lanes.has_partial_state:
        window = min(llama.llama_model_n_swa(model), llama.llama_n_ctx_seq(context))
        found = _try_checkpoint(context, lanes, tokens, window)
    elif count == TOKENS:
        found = _try_lanes(context, lanes, tokens)
    if not found.can_share and found.checkpoint is None:
        missing["prefix_cache"] = "its lanes could not be shared, or saved and restored, exactly"
    else:
        if found.state_format is None and (found.checkpoint is None or found.checkpoint.token_bytes):
            missing["recovery"] = missing["kv_exchange"] = "its tokens are saved in a form that is not known"
        if found.checkpoint is not None:
            missing["kv_exchange"] = "its prefixes are reused at checkpoints, which are not exchanged"
    if not _has_states(context):
        missing["embeddings"] = "llama.cpp returns no hidden states of its tokens"
    is_tried = llama.llama_n_seq_max(context) >= 2 + FIRST_SEQ_ID and count == TOKENS
    can_batch = not is_tried or _try_batch(context, lanes)
    if not can_batch:
        missing["batches"] = "together, prompts have other logits than each alone"
    lanes.clear()
    canary = tokens[:1] if np.isfinite(row).all() else []
    return found._replace(can_batch=can_batch, canary=canary, missing=missing)


def _has_states(context: llama.llama_context_p) -> bool:
    """Computes a token with embeddings; returns whether its hidden state exists and is finite.

    llama.cpp reads beyond the end of states whose width is not the model's, and ends the process."""
    model = llama.llama_get_model(context)
    width = llama.llama_model_n_embd_out(model)
    if width != llama.llama_model_n_embd(model):
        return False
    llama.llama_memory_clear(llama.llama_get_memory(context), False)
    llama.llama_set_embeddings(context, True)
    is_computed = _decode(context, [0], 0, FIRST_SEQ_ID) is not None
    pointer = llama.llama_get_embeddings(context) if is_computed else None
    llama.llama_set_embeddings(context, False)
    if not pointer:
        return False
    state = np.ctypeslib.as_array(pointer, (width,))
    return bool(np.isfinite(state).all() and state.any())


def _try_batch(context: llama.llama_context_p, lanes: Lanes) -> bool:
    """Computes two short prompts of unequal lengths, each alone, then both in one batch, with the last tokens in
    another."""
    prompts = list(enumerate((list(range(5)), list(range(5, 8))), FIRST_SEQ_ID))
    alone = []
    for seq_id, prompt in prompts:
        lanes.clear()
        alone.append(_decode(context, prompt, 0, seq_id))
    lanes.clear()
    before = _decode_parts(context, [BatchPart(seq_id, 0, prompt[:-1]) for seq_id, prompt in prompts])
    together = _decode_parts(context, [BatchPart(seq_id, len(prompt) - 1, prompt[-1:]) for seq_id, prompt in prompts])
    if alone[0] is None or alone[1] is None or before is None or together is None:
        return False
    truth = np.stack((alone[0], alone[1]))
    return bool(np.abs(together - truth).max() <= float(truth.std()) * _CLOSE)


def _try_lanes(context: llama.llama_context_p, lanes: Lanes, tokens: list[int]) -> Capabilities:
    """Computes the last token after the original prefix, after a shared one, and after a saved and restored one."""
    last = len(tokens) - 1
    # Lanes 0, 1 and 2 are the sequences 1, 2 and 3.
    lanes.truncate(0, last)
    truth = _decode(context, tokens[last:], last, 1)
    try:
        blob = lanes.save(0, 0, len(tokens))
        lanes.share(0, 1, 0, last)
        shared = _decode(context, tokens[last:], last, 2)
        lanes.restore(blob, 2, 0, last)
        restored = _decode(context, tokens[last:], last, 3)
    except DeviceError:
        return _NONE
    if truth is None or shared is None or restored is None:
        return _NONE
    spread = float(truth.std()) * _CLOSE
    same = bool(np.abs(truth - shared).max() <= spread and np.abs(truth - restored).max() <= spread)
    # Rounded up, so that the number of host blocks is not too large.
    state_format = state_blob.learn(bytes(blob), 0, len(tokens), _vocab_size(context))
    return Capabilities(same, -(-len(blob) // len(tokens)), state_format)


def _try_checkpoint(context: llama.llama_context_p, lanes: Lanes, tokens: list[int], window: int) -> Capabilities:
    """Computes the last token on a lane, and on another that has only copies of the first one's earlier tokens.

    Finds the sizes of such copies and the format of the KV, unless they can't be made or restored exactly."""
    half, last = len(tokens) // 2, len(tokens) - 1
    lanes.clear()
    try:
        _decode(context, tokens[:half], 0, 1)
        blob_of_half, state_of_half = lanes.save(0, 0, half), lanes.save_state(0)
        _decode(context, tokens[half:last], half, 1)
        blob, state = lanes.save(0, 0, last), lanes.save_state(0)
        truth = _decode(context, tokens[last:], last, 1)
        lanes.restore(blob, 1, 0, last)
        lanes.restore_state(state, 1)
        restored = _decode(context, tokens[last:], last, 2)
    except DeviceError:
        return _NONE
    if truth is None or restored is None or np.abs(truth - restored).max() > float(truth.std()) * _CLOSE:
        return _NONE
    growth = -(-(len(state) - len(state_of_half)) // (last - half))  # of a window that is not full
    token_bytes = (len(blob) - len(blob_of_half)) // (last - half)
    if growth and not token_bytes:  # all KV counts as state, which then has no largest size
        return _NONE
    state_bytes = len(state) + growth * max(0, window - last)
    sizes = CheckpointSizes(0, state_bytes, token_bytes, len(blob) - last * token_bytes)
    state_format = state_blob.learn(bytes(blob), 0, last, _vocab_size(context)) if token_bytes else None
    return _NONE._replace(checkpoint=sizes, state_format=state_format)


def _vocab_size(context: llama.llama_context_p) -> int:
    return int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(llama.llama_get_model(context))))


def _decode(context: llama.llama_context_p, tokens: list[int], start: int, seq_id: int) -> Row | None:
    """Returns the logits after the last of the tokens, or None if llama.cpp refuses to compute them."""
    rows = _decode_parts(context, [BatchPart(seq_id, start, tokens)])
    return None if rows is None else rows[0]


def _decode_parts(context: llama.llama_context_p, parts: list[BatchPart]) -> Rows | None:
    """Computes parts of sequences in one batch; returns the logits after each, or None if llama.cpp refuses to."""
    batch = LlamaBatch(sum(len(part.token_ids) for part in parts), 0)
    batch.fill(parts, "last")
    if llama.llama_decode(context, batch.struct) != 0:
        return None
    size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(llama.llama_get_model(context)))
    return np.ctypeslib.as_array(llama.llama_get_logits(context), (len(parts), size)).copy()
