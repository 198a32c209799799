"""Finds the requests whose prompt is counted with another one's."""

from tokenbus.protocol.ttl_cache import TTLCache
from tokenbus.protocol.wire import limits, subjects
from tokenbus.protocol.wire.prompt_counts import prompt_digest
from tokenbus.router.requests.flights.flight import Flight

_MAX_PROMPTS = 4_096


class PromptCopies:
    """The prompts that one router has counted a moment ago, of requests that several answers are wanted to."""

    def __init__(self) -> None:
        self._counted: TTLCache[bytes] = TTLCache(limits.ENDED_STREAM_TTL_S, _MAX_PROMPTS)

    def __repr__(self) -> str:
        return f"<PromptCopies of {len(self._counted)} prompts>"

    def counts(self, flight: Flight, now: float) -> bool:
        """Returns whether the prompt of a request, which is known now, counts with this one."""
        first = flight.request.copy_of
        if first is None:
            return True
        assert flight.prompt_ids is not None, flight
        adapters = ((one.digest, one.scale) for one in flight.adapters)
        digest = prompt_digest(flight.prompt_ids, adapters, flight.request.cache_salt, flight.address.key_id)
        if first != flight.request_id:
            key = subjects.request_key(flight.tenant, first)
            if self._counted.get(key, now) == digest:
                return False
        self._counted.put(flight.key, digest, now)
        return True
