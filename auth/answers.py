"""The answers that a broker takes: a user's JWT inside a signed response, or why there is none."""

import random

import msgspec

from tokenbus.auth import jwt
from tokenbus.auth.callout_requests import Callout
from tokenbus.auth.grants import Grant
from tokenbus.auth.jwt import Claims
from tokenbus.auth.seeds import Seeds

MAX_CONNECTION_S = 3_600.0
"""The broker closes a connection after this time, whatever has become of this service."""
_SPREAD = 0.1
"""Connections of one moment end over this part of that time, so that they do not all come back at once."""
_MAX_SUBSCRIPTIONS = 1_024
_UNLIMITED = -1


class _Subjects(msgspec.Struct):
    allow: tuple[str, ...]


class _User(msgspec.Struct, kw_only=True):
    pub: _Subjects
    sub: _Subjects
    subs: int = _MAX_SUBSCRIPTIONS
    data: int = _UNLIMITED
    payload: int = _UNLIMITED
    type: str = "user"
    version: int = 2


class _Response(msgspec.Struct, kw_only=True):
    jwt: str
    """Empty if there is an error."""
    error: str
    type: str = "authorization_response"
    version: int = 2


class CalloutAnswers:
    """Signs answers, and seals them where the question was sealed."""

    def __init__(self, seeds: Seeds, account: str) -> None:
        """`account` is the broker's account that users are let into."""
        self._seeds = seeds
        self._account = account

    def __repr__(self) -> str:
        return f"<CalloutAnswers into {self._account}>"

    def let_in(self, callout: Callout, grant: Grant, now: float) -> bytes:
        """Returns the answer that gives a client the rights of its key, until the key ends, or for an hour."""
        assert grant.publish, grant  # the broker takes an empty list to mean everything
        assert grant.subscribe, grant
        lasts_s = MAX_CONNECTION_S * (1 - _SPREAD * random.random())
        until = now + lasts_s if grant.valid_until is None else min(now + lasts_s, grant.valid_until)
        user = Claims(
            iss=self._seeds.signer.public,
            sub=callout.user_nkey,
            aud=self._account,
            name=grant.user,
            iat=int(now),
            # whole seconds: a broker would refuse one that has already ended
            exp=max(int(until), int(now) + 1),
            nats=_User(pub=_Subjects(grant.publish), sub=_Subjects(grant.subscribe)),
        )
        return self._response(callout, now, token=jwt.encode(user, self._seeds.signer).decode())

    def refuse(self, callout: Callout, reason: str, now: float) -> bytes:
        """Returns the answer that keeps a client out. The broker logs the reason; the client only hears that it may
        not connect."""
        return self._response(callout, now, error=reason)

    def _response(self, callout: Callout, now: float, token: str = "", error: str = "") -> bytes:
        claims = Claims(
            iss=self._seeds.signer.public,
            sub=callout.user_nkey,
            aud=callout.server_id,
            iat=int(now),
            nats=_Response(jwt=token, error=error),
        )
        answer = jwt.encode(claims, self._seeds.signer)
        return self._seeds.sealing.seal(answer, callout.sealed_by) if callout.sealed_by else answer
