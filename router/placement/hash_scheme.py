"""Computes the hashes that name the KV blocks of a prompt, as the model's workers do."""

from typing import NamedTuple

from tokenbus.protocol.wire import block_hash, messages


class HashScheme(NamedTuple):
    """Determines a model's block hashes; shared by all of its workers that have blocks."""

    fingerprint: str
    block_size: int

    def __str__(self) -> str:
        return f"blocks of {self.block_size} tokens with fingerprint {self.fingerprint!r}"

    def hashes(
        self, token_ids: bytes, tenant: str, cache_salt: str = "", adapters: tuple[block_hash.Adapter, ...] = ()
    ) -> list[int]:
        """Returns the hashes of a prompt's full blocks. The token ids are packed as on the wire."""
        root = block_hash.root_hash(block_hash.PrefixDomain(self.fingerprint, adapters, tenant, cache_salt))
        return block_hash.block_hashes_of_bytes(token_ids, self.block_size, root)


def hash_scheme_of(card: messages.Card) -> HashScheme | None:
    """Returns a worker's hash scheme; None if it has no blocks or hashes them in a way unknown here."""
    kind, _, fingerprint = card.hash_scheme.partition(":")
    if kind != block_hash.SCHEME or not card.kv_block_size:
        return None
    return HashScheme(fingerprint, card.kv_block_size)
