"""Carries out changes to lanes, both within the cache and to and from host memory."""

from collections.abc import Iterable

from tokenbus.worker.engine.host_cache.slot_store import SlotStore
from tokenbus.worker.engine.kv.ops import Discard, Offload, Onload
from tokenbus.worker.engine.onnx.cache.kv_cache import KvCache
from tokenbus.worker.engine.onnx.cache.lanes import HostMove, LaneChange


def apply(changes: Iterable[LaneChange | HostMove], cache: KvCache, copies: SlotStore | None) -> None:
    """Carries out changes in order. Raises InsufficientMemoryError and DeviceError, after which it is unknown which of
    them are done."""
    for change in changes:
        if isinstance(change, LaneChange):
            cache.apply([change])
            continue
        assert copies is not None, change
        match change:
            case Offload(number, lane, start, end):
                copies.write(number, cache.save(lane, start, end))
            case Onload(number, lane, start, end):
                cache.load(lane, copies.read(number), start, end)
            case Discard(number):
                copies.discard(number)
