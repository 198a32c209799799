"""Acts as a router towards the model's first worker."""

import struct

from tokenbus.conformance.probing.assertions import Message
from tokenbus.conformance.probing.exchange import Exchange
from tokenbus.conformance.probing.probe import Probe
from tokenbus.protocol.wire import subjects

PROMPT_IDS = struct.pack("<4I", 1, 2, 3, 4)
"""A prompt: token ids are packed as little-endian 32-bit integers."""


async def run(
    probe: Probe,
    *,
    attempt: int,
    epoch: str | None = None,
    key: str | None = None,
    router_id: str = "wire-check",
    max_tokens: int = 4,
) -> tuple[Message, Exchange]:
    """Sends a run; returns the worker's reply and the client's exchange."""
    client = await probe.listen(probe.link.new_inbox(), msgpack=False)
    body = {
        "request_id": key or subjects.request_key(probe.tenant, probe.new_id()),
        "attempt": attempt,
        "epoch": epoch or (await card(probe))["epoch"],
        "router_id": router_id,
        "reply": client.inbox,
        "encoding": "json",
        "token_ids": PROMPT_IDS,
        "params": {"max_tokens": max_tokens, "ignore_eos": True, "seed": 1},
        "remaining_ms": 20_000.0,
        "wire-check": {"unknown": "fields are ignored here too"},
    }
    return await probe.call_internal(service(probe, "run"), body), client


async def card(probe: Probe) -> Message:
    """Returns the worker's card."""
    worker_id = probe.require_workers()[0]
    exchange = await probe.listen(probe.names.card(probe.target.model, worker_id), msgpack=True)
    await probe.publish(probe.names.discover, b"")
    answer = await exchange.first(f"the card of {worker_id}")
    await probe.stop_listening(exchange)
    return answer


def service(probe: Probe, name: str) -> str:
    """Returns the subject of one of the worker's services."""
    return probe.names.worker(probe.target.model, probe.require_workers()[0], name)
