"""NVIDIA Dynamo's router from its published wheel, fed the way its workers feed it: by events over ZMQ.

Only benchmarks need the wheel. Without it, `find` exits with a line that says how to install it."""

import os
import struct
import sys
import tempfile
import time
from array import array
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import msgspec

from bench.router.cached_blocks import BLOCK, Conversation

MODEL = "m"
_WAIT_S = 60.0


def find() -> ModuleType:
    """Returns Dynamo's binding with logging off, since a log line per choice would count as time of the choice."""
    os.environ.setdefault("DYN_LOG", "error")
    try:
        import zmq  # noqa: F401
        from dynamo import _core
    except ImportError as error:
        sys.exit(f"{error.name} is not installed: .venv/bin/pip install -e '.[compare]'")
    found: ModuleType = _core
    return found


class Publishers:
    """A ZMQ socket for each worker, from which a `SelectionService` reads that worker's events."""

    def __init__(self, workers: int) -> None:
        import zmq

        self._folder = tempfile.TemporaryDirectory(prefix="events")
        self._context = zmq.Context()
        self._sockets = []
        self._seqs = [0] * workers
        for number in range(workers):
            socket = self._context.socket(zmq.XPUB)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVTIMEO, int(1e3 * _WAIT_S))
            socket.bind(self.endpoint(number))
            self._sockets.append(socket)

    def endpoint(self, number: int) -> str:
        return f"ipc://{self._folder.name}/{number}"

    def wait(self) -> None:
        """Waits until each socket has its subscriber; events published earlier would be lost."""
        for socket in self._sockets:
            socket.recv()

    def publish(self, number: int, events: Sequence[Sequence[object]]) -> None:
        batch = msgspec.msgpack.encode([time.time(), events, None])
        self._sockets[number].send_multipart([b"", struct.pack(">Q", self._seqs[number]), batch])
        self._seqs[number] += 1

    def close(self) -> None:
        self._context.destroy(linger=0)
        self._folder.cleanup()


def stored(token_ids: bytes, hashes: Sequence[int], parent: int | None = None) -> list[object]:
    """Returns the event for stored blocks in vLLM's format. Dynamo computes its own hashes from the token ids."""
    return ["BlockStored", hashes, parent, array("I", token_ids).tolist(), BLOCK, None, None, None, None]


def card(number: int, endpoint: str, max_blocks: int) -> dict[str, object]:
    return {
        "worker_id": number,
        "model_name": MODEL,
        "endpoint": f"http://w{number}",
        "block_size": BLOCK,
        "kv_events_endpoint": endpoint,
        "max_num_batched_tokens": 8_192,
        "total_kv_blocks": max_blocks,
    }


async def fill(service: Any, told: Sequence[Conversation], workers: int, max_blocks: int) -> Publishers:
    """Adds workers and publishes the blocks they hold."""
    publishers = Publishers(workers)
    for number in range(workers):
        await service.upsert_worker(card(number, publishers.endpoint(number), max_blocks))
    publishers.wait()
    names = iter(range(1, 1 << 62))
    for one in told:
        hashes = [next(names) for _ in range(len(one.token_ids) // (4 * BLOCK))]
        publishers.publish(one.worker, [stored(one.token_ids, hashes)])
    last = {one.worker: one for one in told}
    deadline = time.monotonic() + _WAIT_S
    for one in last.values():
        while (await overlap(service, one.token_ids)).get(one.worker, 0) < len(one.token_ids) // (4 * BLOCK):
            if time.monotonic() > deadline:
                sys.exit("Dynamo's service has not ingested what its workers hold")
    return publishers


async def overlap(service: Any, token_ids: bytes) -> dict[int, int]:
    """Returns the number of leading blocks of a prompt that each worker holds, without workers that hold none."""
    said = await service.overlap_scores({"model_name": MODEL, "token_ids": array("I", token_ids).tolist()})
    return {one["worker_id"]: one["device_blocks"] for one in said["workers"] if one["device_blocks"]}
