"""The schemas of clients' messages and of cards, written from docs/wire.md and not from this project's structs."""

from tokenbus.conformance.probing import field_types
from tokenbus.conformance.probing.field_types import (
    COUNT,
    DURATION,
    FLAG,
    NAME,
    NUMBER,
    POSITIVE,
    TEXT,
    Schema,
    list_of,
    map_of,
    optional,
)

FINISH_REASONS = ("stop", "length", "tool_calls", "cancelled", "error")
STOPPERS = ("operator", "shutdown")
ERRORS: dict[str, tuple[int, bool]] = {
    "invalid_request": (400, False),
    "prompt_too_long": (400, False),
    "unsupported": (400, False),
    "unauthorized": (401, False),
    "forbidden": (403, False),
    "model_not_found": (404, False),
    "duplicate_request": (409, False),
    "payload_too_large": (413, False),
    "request_crashes_engine": (422, False),
    "overloaded": (429, True),
    "no_worker": (503, True),
    "insufficient_memory": (503, True),
    "keys_unavailable": (503, True),
    "worker_lost": (502, True),
    "engine_poisoned": (503, True),
    "deadline_exceeded": (504, False),
    "shutting_down": (503, True),
    "upload_lost": (503, True),
    "internal": (500, True),
}
"""HTTP status and `retryable` of each error code. Deliberately a copy: it checks the project's own table too."""

REQUEST_ID = field_types.matching("[A-Za-z0-9_-]{1,128}")

CHUNK: Schema = {
    "id": TEXT,
    "attempt": COUNT,
    "offset": COUNT,
    "tokens": COUNT,
    "text_offset": COUNT,
    "text": TEXT,
    "finish_reason": optional(field_types.one_of(*FINISH_REASONS)),
    "load_progress": optional(DURATION),
}
"""The fields of every message of a stream."""

ORIGIN: Schema = {"worker_id": optional(NAME), "model": NAME, "created": POSITIVE}
"""Further fields of the head of each attempt, of empty chunks and of the terminal. Those from a router have no
worker."""

USAGE: Schema = {
    "prompt_tokens": COUNT,
    "completion_tokens": COUNT,
    "total_tokens": COUNT,
    "cached_tokens": COUNT,
}
TOOL_CALL: Schema = {"index": COUNT, "arguments_offset": COUNT, "function": map_of({"arguments": TEXT})}
"""The fields of every delta of a tool call."""
TIMINGS: Schema = {
    "queue_ms": DURATION,
    "prefill_ms": DURATION,
    "ttft_ms": DURATION,
    "decode_ms": DURATION,
    "total_ms": DURATION,
    "fetched_tokens": optional(COUNT),
    "fetch_ms": optional(DURATION),
}
ERROR: Schema = {
    "code": field_types.one_of(*ERRORS),
    "message": NAME,
    "param": optional(NAME),
    "retryable": FLAG,
    "retry_after_ms": optional(DURATION),
    "prompt_tokens": optional(COUNT),
    "context_length": optional(COUNT),
}
_ALTERNATIVE: Schema = {"id": COUNT, "text": TEXT, "bytes": list_of(COUNT), "logprob": NUMBER}
LOGPROB: Schema = {**_ALTERNATIVE, "top": list_of(map_of(_ALTERNATIVE))}
PROMPT_LOGPROB: Schema = {
    **LOGPROB,
    "logprob": optional(NUMBER),
    "rank": optional(POSITIVE),
}
PROGRESS: Schema = {"prompt_tokens": COUNT, "processed_tokens": COUNT, "cached_tokens": COUNT}
CANDIDATE: Schema = {
    "worker_id": NAME,
    "cost": NUMBER,
    "overlap_blocks": COUNT,
    "prefill_blocks": COUNT,
    "decode_blocks": COUNT,
    "state": NAME,
    "fetch_blocks": optional(COUNT),
}
ROUTING: Schema = {
    "chosen": NAME,
    "policy": NAME,
    "candidates": list_of(map_of(CANDIDATE)),
    "fetch_from": optional(TEXT),
    "has_leg": optional(FLAG),
    "ejected": optional(list_of(NAME)),
}

LOAD: Schema = {
    "running": COUNT,
    "waiting": COUNT,
    "queued_prefill_tokens": COUNT,
    "used_blocks": COUNT,
    "cached_blocks": COUNT,
    "free_blocks": COUNT,
    "host_blocks": optional(COUNT),
    "kept_blocks": optional(COUNT),
    "fetched_blocks": optional(COUNT),
    "step_age_ms": DURATION,
    "max_running": optional(COUNT),
    "kv_pool_bytes": optional(COUNT),
}
EPOCH = field_types.matching("[0-9]+-.+")
DEVICE: Schema = {
    "name": NAME,
    "kind": NAME,
    "total_bytes": COUNT,
    "free_bytes": COUNT,
    "description": optional(TEXT),
    "layers": optional(COUNT),
}
HEALTH: Schema = {
    "devices": list_of(map_of(DEVICE)),
    "front_bytes": COUNT,
    "engine_bytes": COUNT,
    "uptime_s": DURATION,
    "engine_uptime_s": DURATION,
}
CARD: Schema = {
    "worker_id": NAME,
    "epoch": EPOCH,
    "model": NAME,
    "source": TEXT,
    "engine": NAME,
    "engine_version": TEXT,
    "context_length": POSITIVE,
    "kv_block_size": optional(POSITIVE),
    "total_kv_blocks": optional(COUNT),
    "kv_checkpoints": optional(FLAG),
    "kv_identity": optional(TEXT),
    "kv_token_bytes": optional(COUNT),
    "max_num_seqs": POSITIVE,
    "max_num_batched_tokens": POSITIVE,
    "hash_scheme": NAME,
    "tokenizer_digest": optional(NAME),
    "chat_format_digest": optional(NAME),
    "features": list_of(NAME),
    "adapters": optional(list_of(map_of({"name": NAME, "digest": NAME}))),
    "embeddings": optional(map_of({"dimensions": POSITIVE, "pooling": NAME, "max_input_tokens": POSITIVE})),
    "role": optional(field_types.one_of("both", "prefill", "decode")),
    "process_run": optional(TEXT),
    "broker": optional(TEXT),
    "network": optional(TEXT),
    "loadable": optional(FLAG),
    "state": NAME,
    "host": TEXT,
    "pids": map_of({"front": COUNT, "engine": COUNT}),
    "versions": field_types.MAP,
    "health": optional(map_of(HEALTH)),
}
SERVED: Schema = {
    "model": NAME,
    "context_length": POSITIVE,
    "features": list_of(NAME),
    "adapters": optional(list_of(NAME)),
    "loadable": optional(FLAG),
}
TOKENS: Schema = {
    "id": NAME,
    "model": NAME,
    "count": COUNT,
    "token_ids": list_of(COUNT),
    "context_length": POSITIVE,
}
LIMITS: Schema = {"max_request_bytes": POSITIVE}

_NUMBERED_ITEM = field_types.starting_with(COUNT)
FLEET_DIGEST: Schema = {
    "router_id": NAME,
    "life": NAME,
    "seq": COUNT,
    "parts": POSITIVE,
    "joined": optional(list_of(field_types.MAP)),
    "workers": optional(list_of(_NUMBERED_ITEM)),
    "memory": optional(list_of(_NUMBERED_ITEM)),
    "left": optional(list_of(COUNT)),
    "queues": optional(list_of(field_types.starting_with(NAME))),
}
TRACE: Schema = {
    "id": NAME,
    "model": NAME,
    "received_at_ms": COUNT,
    "state": NAME,
    "attempts": optional(list_of(field_types.MAP)),
    "worker_queue_ms": optional(DURATION),
    "prefill_ms": optional(DURATION),
    "total_ms": optional(DURATION),
    "prompt_tokens": optional(COUNT),
    "cached_tokens": optional(COUNT),
    "completion_tokens": optional(COUNT),
    "gaps": optional(list_of(COUNT)),
}
TRACE_ATTEMPT: Schema = {"worker_id": NAME, "begun_ms": DURATION, "accepted_ms": optional(DURATION)}
WORKER_SHEET: Schema = {
    "number": COUNT,
    "worker_id": NAME,
    "model": NAME,
    "engine": NAME,
    "host": TEXT,
    "max_num_seqs": COUNT,
}
