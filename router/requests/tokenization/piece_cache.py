"""The token ids of recent prompts' texts, so that a conversation's next turn costs only its new text.

A conversation is rendered to special tokens and the texts between them, each of which is tokenized by itself. So the
ids of a text are the same in every prompt, and the cache is exact."""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable

from tokenbus.protocol.prompt.prompt import Encode
from tokenbus.protocol.telemetry.metrics import Counter
from tokenbus.protocol.wire import block_hash

_ENTRY_BYTES = 256
"""Upper bound of an entry's overhead beyond its ids."""
_DIGEST_BYTES = 16


class PieceCache:
    """Remembers ids of at most `max_bytes`. Safe to use from any thread.

    Tenants see nothing of each other, and the one with the most loses its least recently used texts first."""

    def __init__(self, max_bytes: int, counted: Counter) -> None:
        """`counted` counts characters, by whether their ids were `cached` or `computed`."""
        self._max_bytes = max_bytes
        self._cached, self._computed = counted.labels("cached"), counted.labels("computed")
        self._lock = threading.Lock()
        self._pieces: dict[str, OrderedDict[bytes, bytes]] = {}
        """Packed ids by tenant, and by a digest of the tokenizer and the text."""
        self._bytes: dict[str, int] = {}
        self.num_bytes = 0

    def __repr__(self) -> str:
        return f"<PieceCache {self.num_bytes} of {self._max_bytes} bytes, {len(self._pieces)} tenants>"

    def packer(self, tokenizer: str, tenant: str, encode: Encode) -> Callable[[str], bytes]:
        """Returns a function that packs the result of this tokenizer's `encode` and remembers a tenant's texts."""
        seed = hashlib.blake2b(tokenizer.encode(), digest_size=_DIGEST_BYTES).digest()

        def pack(text: str) -> bytes:
            key = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES, key=seed).digest()
            packed = self._get(tenant, key)
            if packed is not None:
                self._cached.inc(len(text))
                return packed
            packed = block_hash.pack_token_ids(encode(text))
            self._computed.inc(len(text))
            self._put(tenant, key, packed)
            return packed

        return pack

    def _get(self, tenant: str, key: bytes) -> bytes | None:
        with self._lock:
            pieces = self._pieces.get(tenant)
            if pieces is None or key not in pieces:
                return None
            pieces.move_to_end(key)
            return pieces[key]

    def _put(self, tenant: str, key: bytes, packed: bytes) -> None:
        if _size(packed) > self._max_bytes:
            return
        with self._lock:
            pieces = self._pieces.setdefault(tenant, OrderedDict())
            if key in pieces:  # another thread was faster
                return
            pieces[key] = packed
            self._add(tenant, _size(packed))
            while self.num_bytes > self._max_bytes:
                self._evict(max(self._bytes, key=self._bytes.__getitem__))

    def _evict(self, tenant: str) -> None:
        _, packed = self._pieces[tenant].popitem(last=False)
        self._add(tenant, -_size(packed))
        if not self._pieces[tenant]:
            del self._pieces[tenant], self._bytes[tenant]

    def _add(self, tenant: str, num_bytes: int) -> None:
        self._bytes[tenant] = self._bytes.get(tenant, 0) + num_bytes
        self.num_bytes += num_bytes

    def check_integrity(self) -> None:
        """Asserts that the counts match the entries."""
        sizes = {tenant: sum(map(_size, pieces.values())) for tenant, pieces in self._pieces.items()}
        assert sizes == self._bytes
        assert sum(sizes.values()) == self.num_bytes <= self._max_bytes


def _size(packed: bytes) -> int:
    return len(packed) + _ENTRY_BYTES
