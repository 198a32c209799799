"""Keys in NATS's forms: ed25519 keys that sign, curve25519 keys that seal, and how both are written as text."""

import base64
import secrets

import nacl.exceptions
import nacl.public
import nacl.signing
import nkeys

ACCOUNT = nkeys.PREFIX_BYTE_ACCOUNT
CURVE = 23 << 3
"""The prefix of curve25519 keys: their text begins with X. The library knows those that sign only."""
SERVER = nkeys.PREFIX_BYTE_SERVER
USER = nkeys.PREFIX_BYTE_USER

_RAW_BYTES = 32
_CRC_BYTES = 2
_SEALED = b"xkv1"
"""The first bytes of a sealed message."""


def encode_key(prefix: int, raw: bytes) -> str:
    """Returns a public key as text."""
    return _encode(bytes([prefix]), raw)


def decode_key(prefix: int, text: str) -> bytes:
    """Reverses `encode_key`. Raises ValueError for another kind of key, or none."""
    head, raw = _decode(text, 1)
    if head[0] != prefix:
        raise ValueError("it is an nkey of another kind")
    return raw


def new_seed(prefix: int) -> str:
    """Makes the private key of a kind, as text."""
    return _encode(_seed_head(prefix), secrets.token_bytes(_RAW_BYTES))


def decode_seed(prefix: int, text: str) -> bytes:
    """Returns the private key in a seed. Raises ValueError, which does not show it."""
    head, raw = _decode(text, 2)
    if head != _seed_head(prefix):
        raise ValueError("it is no seed of this kind")
    return raw


def _seed_head(prefix: int) -> bytes:
    return bytes([nkeys.PREFIX_BYTE_SEED | prefix >> 5, (prefix & 31) << 3])


def _encode(head: bytes, raw: bytes) -> str:
    content = head + raw
    return base64.b32encode(content + nkeys.crc16_checksum(content)).rstrip(b"=").decode()


def _decode(text: str, head_bytes: int) -> tuple[bytes, bytes]:
    try:
        content = base64.b32decode(text + "=" * (-len(text) % 8))
    except ValueError as error:  # also of a text that is not ASCII
        raise ValueError("it is no nkey") from error
    body = content[:-_CRC_BYTES]
    if len(body) != head_bytes + _RAW_BYTES or nkeys.crc16_checksum(body) != content[-_CRC_BYTES:]:
        raise ValueError("it is no nkey")
    return body[:head_bytes], body[head_bytes:]


class Signer:
    """An account's key, which vouches for users."""

    def __init__(self, seed: str) -> None:
        """Raises ValueError."""
        self._key = nacl.signing.SigningKey(decode_seed(ACCOUNT, seed))
        self.public = encode_key(ACCOUNT, bytes(self._key.verify_key))

    def __repr__(self) -> str:
        return f"<Signer {self.public}>"

    def sign(self, content: bytes) -> bytes:
        return bytes(self._key.sign(content).signature)


def is_signed(content: bytes, signature: bytes, prefix: int, public: str) -> bool:
    """Whether the holder of a public key of this kind has signed it. Raises ValueError for what is no such key."""
    try:
        nacl.signing.VerifyKey(decode_key(prefix, public)).verify(content, signature)
    except (nacl.exceptions.BadSignatureError, nacl.exceptions.ValueError):
        return False
    return True


class SealingKey:
    """A curve25519 key, with which brokers and this service keep keys of clients secret from all others."""

    def __init__(self, seed: str) -> None:
        """Raises ValueError."""
        self._key = nacl.public.PrivateKey(decode_seed(CURVE, seed))
        self.public = encode_key(CURVE, bytes(self._key.public_key))

    def __repr__(self) -> str:
        return f"<SealingKey {self.public}>"

    def seal(self, content: bytes, receiver: str) -> bytes:
        """Raises ValueError for a receiver that is no public key of this kind."""
        return _SEALED + bytes(self._box(receiver).encrypt(content))

    def open(self, sealed: bytes, sender: str) -> bytes:
        """Returns the content. Raises ValueError if it was not sealed by the sender, for this key."""
        try:
            return bytes(self._box(sender).decrypt(sealed.removeprefix(_SEALED)))
        except nacl.exceptions.CryptoError as error:
            raise ValueError("it was not sealed for this service") from error

    def _box(self, other: str) -> nacl.public.Box:
        return nacl.public.Box(self._key, nacl.public.PublicKey(decode_key(CURVE, other)))


def is_sealed(content: bytes) -> bool:
    return content.startswith(_SEALED)
