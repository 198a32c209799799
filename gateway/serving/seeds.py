"""The seeds of clients: any 64-bit integer, of which the wire's have the lower half."""

from tokenbus.protocol.wire import errors
from tokenbus.protocol.wire.params import Range

RANDOM = -1
"""A random one, as in vLLM and llama.cpp."""
SEEDS = Range(-(2**63), 2**63 - 1)
_NUM_WIRE_SEEDS = 2**32


def wire_seed(name: str, given: int | None) -> int | None:
    """Returns the seed of a wire request; None for a random one. `name` is the field's. Raises RequestError."""
    if given is None or given == RANDOM:
        return None
    if not SEEDS.contains(given):
        raise errors.invalid_field(name, f"must be a 64-bit integer, got {str(given)[:40]}")
    return given % _NUM_WIRE_SEEDS
