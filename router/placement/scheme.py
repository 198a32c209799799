"""How the blocks of a model are named; pure."""

from typing import NamedTuple

from tokenbus.protocol.wire import blocks, messages

_HASH = "xxh3-64"


class Scheme(NamedTuple):
    """How the blocks of a model are named: the same for all of its workers that have blocks."""

    fingerprint: str
    block_size: int

    def hashes(self, token_ids: bytes, tenant: str, cache_salt: str = "") -> list[int]:
        """Of the full blocks of a prompt, its token ids in the form in which they are sent."""
        root = blocks.root_hash(blocks.PrefixDomain(self.fingerprint, tenant=tenant, cache_salt=cache_salt))
        return blocks.hashes_of(token_ids, self.block_size, root)


def scheme_of(card: messages.Card) -> Scheme | None:
    """How a worker names its blocks; None where it has none, or names them in a way that is not known here."""
    kind, _, fingerprint = card.hash_scheme.partition(":")
    if kind != _HASH or not card.kv_block_size:
        return None
    return Scheme(fingerprint, card.kv_block_size)
