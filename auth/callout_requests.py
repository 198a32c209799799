"""A broker's question who a client is, checked as if a stranger had sent it."""

from typing import NamedTuple

import msgspec

from tokenbus.auth import nats_keys
from tokenbus.auth.jwt import Claims, JwtReader
from tokenbus.auth.seeds import Seeds

AUDIENCE = "nats-authorization-request"
REPLIES = "$SYS._INBOX."
"""The first tokens of the subjects on which brokers wait for an answer."""
_CLOCK_STEP_S = 60.0
"""The clocks of a broker and of this service may be this far apart."""
_TYPE = "authorization_request"
_CLIENT = "Client"
_PROTOCOLS = ("nats", "websocket")


class BadCalloutError(ValueError):
    """The message is no question of a broker; it gets no answer."""


class Server(msgspec.Struct):
    id: str
    name: str = ""


class ClientInfo(msgspec.Struct):
    host: str = ""
    kind: str = ""
    """`Client`, or `Leafnode` for a broker of another's."""
    type: str = ""
    """Its protocol: `nats`, `websocket`, `mqtt`."""


class CalloutOptions(msgspec.Struct, rename={"password": "pass"}):
    """The client's own words. The password and the token are secrets."""

    auth_token: str = ""
    password: str = ""


class AuthRequest(msgspec.Struct):
    """NATS's claims of a request."""

    type: str
    version: int
    user_nkey: str
    """The public key that the broker has made for the user."""
    server_id: Server
    client_info: ClientInfo = msgspec.field(default_factory=ClientInfo)
    connect_opts: CalloutOptions = msgspec.field(default_factory=CalloutOptions)


class Callout(NamedTuple):
    """A question that a broker has asked."""

    server_id: str
    user_nkey: str
    host: str
    """The client's address."""
    key: str
    """The key that the client has sent, as its token or password; empty if it has sent neither. A secret."""
    is_client: bool
    """Whether a NATS client asks to be let in, and not another broker, or a client of another protocol."""
    sealed_by: str
    """The broker's curve25519 key if the question was sealed, and the answer must be; otherwise empty."""


_reader = JwtReader(Claims[AuthRequest], nats_keys.SERVER)


def read(payload: bytes, sealed_by: str, reply: str, seeds: Seeds, now: float) -> Callout:
    """Returns the question in a message. `sealed_by` is the curve25519 key that its header names.

    Raises BadCalloutError, which shows nothing of its content."""
    if not reply.startswith(REPLIES):
        raise BadCalloutError("its reply subject is not a broker's")
    is_sealed = nats_keys.is_sealed(payload)
    try:
        claims = _reader.read(seeds.sealing.open(payload, sealed_by) if is_sealed else payload)
        nats_keys.decode_key(nats_keys.USER, claims.nats.user_nkey)
    except ValueError as error:
        raise BadCalloutError(str(error)) from error
    asked = claims.nats
    if claims.aud != AUDIENCE or asked.type != _TYPE:
        raise BadCalloutError("it is for another service")
    if claims.iss != asked.server_id.id:
        raise BadCalloutError("another server has signed it")
    if now >= claims.exp + _CLOCK_STEP_S:
        raise BadCalloutError("it has expired")
    options, info = asked.connect_opts, asked.client_info
    key = options.auth_token or options.password
    is_client = info.kind == _CLIENT and info.type in _PROTOCOLS
    return Callout(claims.iss, asked.user_nkey, info.host, key, is_client, sealed_by if is_sealed else "")
