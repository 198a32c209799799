"""How the blocks of a model are named; pure."""

from typing import NamedTuple

from tokenbus.protocol.wire import block_hash, messages

_HASH = "xxh3-64"


class HashScheme(NamedTuple):
    """How the blocks of a model are named: the same for all of its workers that have blocks."""

    fingerprint: str
    block_size: int

    def hashes(self, token_ids: bytes, tenant: str, cache_salt: str = "") -> list[int]:
        """Of the full blocks of a prompt, its token ids in the form in which they are sent."""
        root = block_hash.root_hash(block_hash.PrefixDomain(self.fingerprint, tenant=tenant, cache_salt=cache_salt))
        return block_hash.block_hashes_of_bytes(token_ids, self.block_size, root)


def hash_scheme_of(card: messages.Card) -> HashScheme | None:
    """How a worker names its blocks; None where it has none, or names them in a way that is not known here."""
    kind, _, fingerprint = card.hash_scheme.partition(":")
    if kind != _HASH or not card.kv_block_size:
        return None
    return HashScheme(fingerprint, card.kv_block_size)
