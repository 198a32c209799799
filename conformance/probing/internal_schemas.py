"""The schemas of messages between routers and workers, written from docs/wire.md like those of clients' messages."""

from tokenbus.conformance.probing import field_types, schemas
from tokenbus.conformance.probing.field_types import (
    COUNT,
    DURATION,
    FLAG,
    NAME,
    POSITIVE,
    TEXT,
    Schema,
    list_of,
    map_of,
    optional,
)

SEAL: Schema = {"epoch": schemas.EPOCH, "seq": COUNT}
BEAT: Schema = {"epoch": schemas.EPOCH, "next_ms": DURATION, "seqs": field_types.MAP}
_RUN_OF_BLOCKS = field_types.MAP
_STARTED: Schema = {"id": NAME, "stream_no": COUNT, "attempt": POSITIVE, "prompt_tokens": COUNT, "router_id": NAME}
_FETCHED: Schema = {
    "stream_no": COUNT,
    "worker_id": NAME,
    "fetched_tokens": optional(COUNT),
    "fetched_bytes": optional(COUNT),
    "fetch_ms": optional(DURATION),
    "was_leg": optional(FLAG),
}
EVENTS: Schema = {
    "worker_id": NAME,
    "epoch": schemas.EPOCH,
    "seq": COUNT,
    "cleared": optional(FLAG),
    "removed": optional(list_of(COUNT)),
    "stored": optional(list_of(_RUN_OF_BLOCKS)),
    "started": optional(list_of(map_of(_STARTED))),
    "stream_nos": optional(field_types.BYTES),
    "token_ids": optional(field_types.BYTES),
    "fetches": optional(list_of(map_of(_FETCHED))),
    "legs": optional(list_of(NAME)),
    "finished": optional(list_of(NAME)),
    "failed": optional(list_of(NAME)),
    "taken": optional(list_of(NAME)),
    "stranded": optional(list_of(NAME)),
    "guardians": optional(field_types.MAP),
    "load": map_of(schemas.LOAD),
    "state": NAME,
    "health": optional(map_of(schemas.HEALTH)),
}
_RUNNING: Schema = {
    "id": NAME,
    "attempt": POSITIVE,
    "stream_no": COUNT,
    "num_tokens": optional(COUNT),
    "router_id": optional(NAME),
}
SNAPSHOT: Schema = {
    "worker_id": NAME,
    "epoch": schemas.EPOCH,
    "seq": COUNT,
    "part": COUNT,
    "parts": POSITIVE,
    "runs": optional(list_of(_RUN_OF_BLOCKS)),
    "running": optional(list_of(map_of(_RUNNING))),
    "load": map_of(schemas.LOAD),
}
TOKENIZER: Schema = {"digest": NAME, "part": COUNT, "parts": POSITIVE, "data": field_types.BYTES}

TAKE_REPLY: Schema = {"ok": FLAG, "epoch": schemas.EPOCH}
RUN: Schema = {
    "request_id": NAME,
    "attempt": COUNT,
    "epoch": TEXT,
    "router_id": NAME,
    "reply": NAME,
    "encoding": field_types.one_of("json", "msgpack"),
    "token_ids": field_types.BYTES,
    "params": field_types.MAP,
    "fetch_from": optional(map_of({"worker_id": NAME, "epoch": schemas.EPOCH, "leg_ms": optional(DURATION)})),
    "age_ms": optional(DURATION),
    "remaining_ms": optional(DURATION),
}
RUN_RESUME: Schema = {
    "token_ids": field_types.BYTES,
    "cached_tokens": optional(COUNT),
    "queue_ms": optional(DURATION),
    "prefill_ms": optional(DURATION),
    "elapsed_ms": optional(DURATION),
}
GUARD: Schema = {"run": map_of(RUN), "stream_no": optional(COUNT), "hash_scheme": optional(NAME)}
GUARD_REPLY: Schema = {"request_id": NAME, "attempt": COUNT, "accepted": FLAG, "router_id": NAME}
GUARD_CHECK: Schema = {"request_ids": list_of(NAME)}
UNGUARDED: Schema = {"router_id": NAME, "request_ids": list_of(NAME)}
