"""NATS's JWTs, version 2: claims that a server, or an account, has signed by an ed25519 key."""

import base64
import binascii
import secrets
from typing import Generic, TypeVar

import msgspec

from tokenbus.auth import nats_keys
from tokenbus.auth.nats_keys import Signer

ClaimsT = TypeVar("ClaimsT")

_ALGORITHM = "ed25519-nkey"
_MAX_BYTES = 64 * 1024


class _Header(msgspec.Struct):
    typ: str
    alg: str


class Claims(msgspec.Struct, Generic[ClaimsT], omit_defaults=True, kw_only=True):
    """The claims of a JWT. Times are Unix times in whole seconds."""

    iss: str
    """The public key of who has signed it."""
    sub: str
    nats: ClaimsT
    """Claims that only NATS has."""
    aud: str = ""
    name: str = ""
    jti: str = ""
    iat: int = 0
    exp: int = 0
    """When it ends; 0: never."""


_header = msgspec.json.encode({"typ": "JWT", "alg": _ALGORITHM})
_header_decoder = msgspec.json.Decoder(_Header)


def encode(claims: Claims[ClaimsT], signer: Signer) -> bytes:
    """Returns a JWT with these claims, whose `iss` must be the signer's public key."""
    assert claims.iss == signer.public, claims.iss
    claims.jti = secrets.token_hex(16)
    said = b".".join((_to_part(_header), _to_part(msgspec.json.encode(claims))))
    return said + b"." + _to_part(signer.sign(said))


class JwtReader(Generic[ClaimsT]):
    """Reads JWTs with claims of one type."""

    def __init__(self, claims: type[Claims[ClaimsT]], issuer_prefix: int) -> None:
        """`issuer_prefix` is the kind of key that must have signed them."""
        self._decoder = msgspec.json.Decoder(claims)
        self._issuer_prefix = issuer_prefix

    def __repr__(self) -> str:
        return f"<JwtReader {self._decoder.type}>"

    def read(self, token: bytes) -> Claims[ClaimsT]:
        """Returns the claims of a JWT that its issuer has signed. Raises ValueError, which shows nothing of it."""
        if len(token) > _MAX_BYTES or token.count(b".") != 2:
            raise ValueError("it is no JWT")
        said, _, signature = token.rpartition(b".")
        header, _, body = said.partition(b".")
        try:
            is_known = _header_decoder.decode(_from_part(header)).alg == _ALGORITHM
            claims: Claims[ClaimsT] = self._decoder.decode(_from_part(body))
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise ValueError("the JWT can't be decoded") from error
        if not is_known:
            raise ValueError(f"the JWT is not signed by {_ALGORITHM}")
        if not nats_keys.is_signed(said, _from_part(signature), self._issuer_prefix, claims.iss):
            raise ValueError("the JWT was not signed by its issuer")
        return claims


def _to_part(content: bytes) -> bytes:
    return base64.urlsafe_b64encode(content).rstrip(b"=")


def _from_part(part: bytes) -> bytes:
    try:
        return base64.b64decode(part + b"=" * (-len(part) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError("it is no JWT") from error
