"""A broker's question is believed only if a server has signed it, for this service, and waits where brokers wait."""

import base64
import json
from typing import Any

import nacl.signing
import pytest

from tokenbus.auth import callout_requests, nats_keys
from tokenbus.auth.callout_requests import BadCalloutError, Callout
from tokenbus.auth.nats_keys import ACCOUNT, CURVE, SERVER, USER, SealingKey, Signer
from tokenbus.auth.seeds import Seeds

SEEDS = Seeds(Signer(nats_keys.new_seed(ACCOUNT)), SealingKey(nats_keys.new_seed(CURVE)))
REPLY = "$SYS._INBOX.aaaaaaaa.bbbbbbbb"
NOW = 1_000.0


class Server:
    """A broker's key."""

    def __init__(self, prefix: int = SERVER) -> None:
        self._key = nacl.signing.SigningKey.generate()
        self.public = nats_keys.encode_key(prefix, bytes(self._key.verify_key))

    def sign(self, claims: object, header: object = None) -> bytes:
        body = [header or {"typ": "JWT", "alg": "ed25519-nkey"}, claims]
        said = b".".join(base64.urlsafe_b64encode(json.dumps(one).encode()).rstrip(b"=") for one in body)
        return said + b"." + base64.urlsafe_b64encode(self._key.sign(said).signature).rstrip(b"=")


SERVER_KEY = Server()
USER_KEY = Server(USER).public


def claims(**changes: Any) -> dict[str, Any]:
    """Returns the claims of a broker's question, as it was recorded; names with two underscores are those below."""
    nats = {
        "server_id": {"name": "n1", "host": "127.0.0.1", "id": SERVER_KEY.public, "version": "2.15.1"},
        "user_nkey": USER_KEY,
        "client_info": {"host": "10.0.0.7", "id": 6, "user": "[REDACTED]", "kind": "Client", "type": "nats"},
        "connect_opts": {"auth_token": "a key", "lang": "python3", "version": "2.16.0", "protocol": 1},
        "type": "authorization_request",
        "version": 2,
    }
    found: dict[str, Any] = {"aud": "nats-authorization-request", "exp": 1_005, "iat": 1_000, "iss": SERVER_KEY.public}
    found |= {"sub": Server(ACCOUNT).public, "nats": nats}
    for name, value in changes.items():
        target, last = (nats, name.removeprefix("nats__")) if name.startswith("nats__") else (found, name)
        target[last] = value
    return found


def read(payload: bytes, reply: str = REPLY, sealed_by: str = "", now: float = NOW) -> Callout:
    return callout_requests.read(payload, sealed_by, reply, SEEDS, now)


def test_a_brokers_question_is_read() -> None:
    assert read(SERVER_KEY.sign(claims())) == Callout(SERVER_KEY.public, USER_KEY, "10.0.0.7", "a key", True, "")


def test_a_sealed_question_is_opened_and_its_answer_will_be_sealed() -> None:
    broker = SealingKey(nats_keys.new_seed(CURVE))
    sealed = broker.seal(SERVER_KEY.sign(claims()), SEEDS.sealing.public)
    assert read(sealed, sealed_by=broker.public).sealed_by == broker.public
    with pytest.raises(BadCalloutError):
        read(sealed, sealed_by=SealingKey(nats_keys.new_seed(CURVE)).public)
    with pytest.raises(BadCalloutError):
        read(sealed)


def test_the_password_carries_a_key_as_well_as_the_token() -> None:
    assert read(SERVER_KEY.sign(claims(nats__connect_opts={"user": "me", "pass": "a key"}))).key == "a key"
    assert read(SERVER_KEY.sign(claims(nats__connect_opts={"user": "a key"}))).key == ""


@pytest.mark.parametrize(
    ("info", "is_client"),
    [
        ({"kind": "Client", "type": "nats"}, True),
        ({"kind": "Client", "type": "websocket"}, True),
        ({"kind": "Client", "type": "mqtt"}, False),
        ({"kind": "Leafnode", "type": ""}, False),
        ({"kind": "Leafnode", "type": "nats"}, False),
        ({}, False),
    ],
)
def test_only_nats_clients_are_let_in_by_keys(info: dict[str, str], is_client: bool) -> None:
    assert read(SERVER_KEY.sign(claims(nats__client_info=info))).is_client is is_client


def test_a_question_waits_for_its_answer_where_only_brokers_wait() -> None:
    token = SERVER_KEY.sign(claims())
    for reply in ("", "_INBOX.x", "$SYS.REQ.SERVER.x.KICK", "$SYS._INBOXx.y", "tokenbus.v1.generate.demo"):
        with pytest.raises(BadCalloutError, match="reply subject"):
            read(token, reply=reply)


def test_clocks_may_differ_by_a_minute() -> None:
    token = SERVER_KEY.sign(claims(exp=1_000))
    assert read(token, now=1_059.0)
    with pytest.raises(BadCalloutError, match="expired"):
        read(token, now=1_060.0)


FORGED = {
    "nothing": b"",
    "no JWT": b"a.b",
    "no base64": b"a!.b!.c!",
    "too large": b"a" * 70_000 + b".b.c",
    "another algorithm": SERVER_KEY.sign(claims(), {"typ": "JWT", "alg": "none"}),
    "no algorithm": SERVER_KEY.sign(claims(), {"typ": "JWT"}),
    "no object": SERVER_KEY.sign([1]),
    "nested": SERVER_KEY.sign(json.loads("[" * 400 + "]" * 400)),
    "another type": SERVER_KEY.sign(claims(nats__type="user")),
    "another audience": SERVER_KEY.sign(claims(aud="another")),
    "no end": SERVER_KEY.sign({name: value for name, value in claims().items() if name != "exp"}),
    "signed by another than it says": Server().sign(claims()),
    "of another server than it says": (other := Server()).sign(claims(iss=other.public)),
    "signed by a user": (user := Server(USER)).sign(claims(iss=user.public)),
    "no issuer": SERVER_KEY.sign(claims(iss="")),
    "no user's key": SERVER_KEY.sign(claims(nats__user_nkey=SERVER_KEY.public)),
    "a user's key that is none": SERVER_KEY.sign(claims(nats__user_nkey="U" * 56)),
    "a token that is no text": SERVER_KEY.sign(claims(nats__connect_opts={"auth_token": 1})),
    "sealed by none": b"xkv1" + bytes(60),
}


@pytest.mark.parametrize("name", FORGED)
def test_what_no_broker_has_asked_gets_no_answer_and_is_not_shown(name: str) -> None:
    with pytest.raises(BadCalloutError) as refused:
        read(FORGED[name])
    assert "a key" not in str(refused.value)


def test_no_changed_byte_of_a_question_goes_unnoticed() -> None:
    token = SERVER_KEY.sign(claims())
    for place in range(0, len(token), 7):
        changed = token[:place] + bytes([token[place] ^ 1]) + token[place + 1 :]
        with pytest.raises(BadCalloutError):
            read(changed)
