"""A gateway takes the tokens of its issuer that are for it, and no others."""

import asyncio
import contextlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from tests.gateway.admission.test_callers import made, ring_of
from tokenbus.cli import main
from tokenbus.cli.commands import gateway
from tokenbus.gateway.admission import oidc
from tokenbus.gateway.admission.callers import Caller, Callers
from tokenbus.gateway.admission.keys import ApiKeys
from tokenbus.gateway.admission.metrics import GatewayMetrics
from tokenbus.gateway.admission.oidc import OidcTokens
from tokenbus.gateway.admission.settings import OidcSettings
from tokenbus.protocol import extras
from tokenbus.protocol.access.key_ring import KeyProblem, KeyRefusedError
from tokenbus.protocol.access.keys import Role

ISSUER = "https://login.example.org/realm"
_RSA = rsa.generate_private_key(65_537, 2_048)
_EC = ec.generate_private_key(ec.SECP256R1())
_OTHER = rsa.generate_private_key(65_537, 2_048)


def public(kid: str) -> dict[str, Any]:
    """The issuer's entry for a key."""
    found = RSAAlgorithm.to_jwk(_RSA.public_key()) if kid == "rsa" else ECAlgorithm.to_jwk(_EC.public_key())
    return json.loads(found) | {"kid": kid, "use": "sig"}


class Issuer:
    """An issuer without a network, which may be away, and whose clock a test sets."""

    def __init__(self, tenant_claim: str = "", role_claim: str = "") -> None:
        self.clock = 1_000.0
        shared = {"kty": "oct", "k": "c2VjcmV0", "kid": "shared"}
        malformed = [
            {"kty": "RSA"},
            {"kty": "RSA", "n": 5, "e": "AQAB"},
            {"kty": "EC", "crv": "P-256", "x": "%"},
            7,
            None,
        ]
        self.keys: list[Any] = [shared, *malformed, public("rsa")]
        self.asked: list[str] = []
        self.is_away = False
        self.answers_after: asyncio.Event | None = None
        self.issuer = ISSUER
        settings = OidcSettings(ISSUER, "tokenbus", tenant_claim, role_claim)
        self.tokens = OidcTokens(settings, "default", self.fetch, lambda: self.clock)

    async def fetch(self, url: str) -> bytes:
        self.asked.append(url)
        if self.answers_after is not None:
            await self.answers_after.wait()
        if self.is_away:
            raise ConnectionRefusedError("away")
        if url.endswith("/.well-known/openid-configuration"):
            return json.dumps({"issuer": self.issuer, "jwks_uri": f"{ISSUER}/keys"}).encode()
        return json.dumps({"keys": self.keys}).encode()

    async def problem(self, token: str) -> KeyRefusedError:
        with pytest.raises(KeyRefusedError) as raised:
            await self.tokens.caller_of(token)
        return raised.value


def token_of(kid: str = "rsa", key: Any = None, algorithm: str = "", **claims: Any) -> str:
    told = {"iss": ISSUER, "aud": "tokenbus", "sub": "someone", "exp": time.time() + 600} | claims
    signer, usual = (_RSA, "RS256") if kid == "rsa" else (_EC, "ES256")
    return jwt.encode(told, key or signer, algorithm or usual, headers={"kid": kid})


async def test_a_token_of_the_issuer_is_a_user_of_the_gateways_tenant() -> None:
    issuer = Issuer()
    assert await issuer.tokens.caller_of(token_of()) == Caller("default", actor="oidc:someone")
    assert await issuer.tokens.caller_of(token_of(aud=["other", "tokenbus"])) == Caller("default", actor="oidc:someone")
    assert issuer.asked == [f"{ISSUER}/.well-known/openid-configuration", f"{ISSUER}/keys"], "once for both"


async def test_claims_name_tenant_and_role_also_within_objects_and_lists() -> None:
    issuer = Issuer("resource.tenant", "roles")
    token = token_of(resource={"tenant": "acme"}, roles=["offline_access", "viewer", "operator"])
    assert await issuer.tokens.caller_of(token) == Caller("acme", role=Role.OPERATOR, actor="oidc:someone")
    long = await issuer.tokens.caller_of(token_of(sub="x" * 65, resource={"tenant": "acme"}, roles=["user"]))
    assert long.actor == "oidc:sha256-9537c5fdf120482f7d58d25e9ed583f5"
    assert "names no role" in str(await issuer.problem(token_of(resource={"tenant": "acme"}, roles=["admin"])))
    for tenant in (None, 7, "", "x" * 200, {"a": 1}):
        assert "names no tenant" in str(await issuer.problem(token_of(resource={"tenant": tenant}, roles="user")))
    assert "names no tenant" in str(await issuer.problem(token_of(roles="user")))


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ({"exp": 1}, "expired"),
        ({"nbf": 1e11}, "not yet valid"),
        ({"aud": "other"}, "Audience doesn't match"),
        ({"iss": "https://evil.example.org"}, "issuer"),
        ({"aud": None}, '"aud"'),
        ({"exp": "soon"}, "exp"),
    ],
)
async def test_a_token_that_is_not_for_this_time_or_service_is_told_so(claims: dict[str, Any], words: str) -> None:
    refused = await Issuer().problem(token_of(**claims))
    assert refused.problem is KeyProblem.NOT_VALID_NOW
    assert words in str(refused)


async def test_a_token_that_the_issuer_has_not_signed_is_invalid() -> None:
    issuer = Issuer()
    forged = (
        token_of(key=_OTHER),
        token_of("shared", b"secret" * 8, "HS256"),
        token_of("ec"),
        token_of()[:-4] + "AAAA",
        jwt.encode({"iss": ISSUER, "aud": "tokenbus", "exp": 2e9}, None, "none", headers={"kid": "rsa"}),
        "a.b.c",
        "..",
    )
    for token in forged:
        assert (await issuer.problem(token)).problem is KeyProblem.INVALID, token


async def test_new_keys_of_the_issuer_are_fetched_at_once_and_it_is_not_asked_for_each_forged_one() -> None:
    issuer = Issuer()
    await issuer.tokens.caller_of(token_of())
    issuer.keys = [public("ec")]
    for _ in range(100):
        await issuer.problem(token_of("ec"))
    assert len(issuer.asked) == 2
    issuer.clock += 10
    assert await issuer.tokens.caller_of(token_of("ec")) == Caller("default", actor="oidc:someone")
    assert (await issuer.problem(token_of("rsa"))).problem is KeyProblem.INVALID, "it is withdrawn"


async def test_while_the_issuer_is_away_its_keys_are_kept_for_a_day() -> None:
    issuer = Issuer()
    issuer.is_away = True
    assert (await issuer.problem(token_of())).problem is KeyProblem.UNAVAILABLE
    issuer.is_away, issuer.clock = False, issuer.clock + 10
    await issuer.tokens.caller_of(token_of())
    issuer.is_away, issuer.clock = True, issuer.clock + 86_399
    await issuer.tokens.caller_of(token_of())
    issuer.clock += 1
    assert (await issuer.problem(token_of())).problem is KeyProblem.UNAVAILABLE


async def test_an_issuer_that_does_not_answer_holds_up_no_token_with_a_known_key() -> None:
    issuer, someone = Issuer(), Caller("default", actor="oidc:someone")
    await issuer.tokens.caller_of(token_of())
    issuer.answers_after, issuer.clock = asyncio.Event(), issuer.clock + 1_800
    assert await issuer.tokens.caller_of(token_of()) == someone
    unknown = [asyncio.create_task(issuer.tokens.caller_of(token_of("ec"))) for _ in range(2)]
    await asyncio.sleep(0)
    issuer.clock += 3_600
    assert await issuer.tokens.caller_of(token_of()) == someone
    assert not any(one.done() for one in unknown)
    issuer.is_away = True
    issuer.answers_after.set()
    refused = await asyncio.gather(*unknown, return_exceptions=True)
    assert [type(one) for one in refused] == [KeyRefusedError, KeyRefusedError]
    assert len(issuer.asked) == 3
    issuer.answers_after, issuer.clock = asyncio.Event(), issuer.clock + 10
    assert await issuer.tokens.caller_of(token_of()) == someone


async def test_keys_that_no_token_has_needed_for_an_hour_are_fetched_before_they_are_used() -> None:
    issuer = Issuer()
    await issuer.tokens.caller_of(token_of())
    issuer.keys, issuer.clock = [public("ec")], issuer.clock + 3_600
    assert (await issuer.problem(token_of())).problem is KeyProblem.INVALID


async def test_tokens_with_unknown_keys_that_wait_for_the_issuer_are_few_from_an_address_and_in_all() -> None:
    issuer = Issuer()
    await issuer.tokens.caller_of(token_of())
    issuer.answers_after, issuer.clock = asyncio.Event(), issuer.clock + 10
    flood = [
        asyncio.create_task(issuer.tokens.caller_of(token_of("ec"), f"192.0.2.{address}"))
        for address in range(10)
        for _ in range(100)
    ]
    await asyncio.sleep(0)
    refused = [one for one in flood if one.done()]
    assert [sum(one.done() for one in flood[at : at + 100]) for at in range(0, 1_000, 100)] == [84] * 4 + [100] * 6
    problems = {(one.exception().problem, str(one.exception())) for one in refused}  # type: ignore[union-attr]
    assert problems == {
        (KeyProblem.UNAVAILABLE, "too many tokens with unknown keys wait for their issuer: try again later")
    }
    assert await issuer.tokens.caller_of(token_of(), "192.0.2.0") == Caller("default", actor="oidc:someone")
    issuer.keys = [public("rsa"), public("ec")]
    issuer.answers_after.set()
    let_in = [one for one in await asyncio.gather(*flood, return_exceptions=True) if isinstance(one, Caller)]
    assert len(let_in) == 64, "the issuer has been asked once for all that waited"
    assert await issuer.tokens.caller_of(token_of("ec"), "192.0.2.0") == Caller("default", actor="oidc:someone")


@pytest.mark.parametrize("keys", [None, 7, [7], {"a": 1}, "x"])
async def test_an_issuer_that_answers_nonsense_or_for_another_is_none(keys: Any) -> None:
    issuer = Issuer()
    issuer.keys = keys
    assert (await issuer.problem(token_of())).problem is KeyProblem.UNAVAILABLE
    other = Issuer()
    other.issuer = "https://evil.example.org"
    assert (await other.problem(token_of())).problem is KeyProblem.UNAVAILABLE


async def test_tokens_and_keys_are_taken_side_by_side() -> None:
    text, record = made(tenant="acme")
    ring, tokens = ring_of(record), Issuer().tokens
    callers = Callers(ApiKeys(["own=globex"]), ring, GatewayMetrics(), tokens, clock=lambda: 1_000.0)
    found = [await callers.identify({"authorization": f"Bearer {key}"}) for key in (text, "own", token_of())]
    assert [one.tenant for one in found] == ["acme", "globex", "default"]


async def test_tenants_that_tokens_name_are_known_from_then_on() -> None:
    issuer, heard = Issuer("tenant"), 0
    callers = Callers(ApiKeys([]), None, GatewayMetrics(), issuer.tokens)

    def hear() -> None:
        nonlocal heard
        heard += 1

    callers.on_tenant = hear
    assert callers.tenants == {"default"}
    for tenant in ("acme", "globex", "acme"):
        await callers.identify({"authorization": f"Bearer {token_of(tenant=tenant)}"})
    assert (callers.tenants, heard) == ({"acme", "globex"}, 2)


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The URL of an issuer on this machine, whose large answers and redirects are traps."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = f"http://127.0.0.1:{self.server.server_address[1]}"  # type: ignore[index]
            if self.path.startswith("/moved"):
                self.send_response(302)
                self.send_header("location", url + self.path.removeprefix("/moved"))
                self.end_headers()
                return
            told: Any = {"issuer": url, "jwks_uri": f"{url}/keys"}
            if self.path == "/keys":
                told = {"keys": [public("rsa")]}
            if self.path.startswith("/huge"):
                told = "x" * (1 << 20)
            if self.path.startswith("/slow"):
                told = "x" * 100
            self.send_response(200)
            if self.path.startswith("/torn"):
                self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for byte in json.dumps(told).encode() if self.path.startswith("/slow") else ():
                self.wfile.write(bytes((byte,)))
                time.sleep(0.05)
            self.wfile.write(json.dumps(told).encode())

        def log_message(self, *args: Any) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


async def test_keys_are_fetched_over_http_within_bounds_and_without_redirects() -> None:
    with served() as url:
        token = token_of(iss=url)
        assert await OidcTokens(OidcSettings(url, "tokenbus"), "acme").caller_of(token) == Caller(
            "acme", actor="oidc:someone"
        )
        for trap in ("/moved", "/huge", "/torn"):
            with pytest.raises(KeyRefusedError) as raised:
                await OidcTokens(OidcSettings(url + trap, "tokenbus"), "acme").caller_of(token)
            assert raised.value.problem is KeyProblem.UNAVAILABLE


async def test_an_answer_that_trickles_is_waited_for_no_longer_than_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oidc, "_TIMEOUT_S", 0.2)
    with served() as url:
        began_s = time.monotonic()
        with pytest.raises(TimeoutError, match="takes too long"):
            await oidc._fetch(f"{url}/slow")
        assert time.monotonic() - began_s < 2.0


def test_an_issuer_needs_an_audience_and_tls_and_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings(*flags: str) -> Any:
        return gateway.settings_of(main.parse(["gateway", *flags]))

    found = settings("--oidc-issuer", ISSUER, "--oidc-audience", "tokenbus", "--oidc-role-claim", "roles")
    assert found.oidc == OidcSettings(ISSUER, "tokenbus", "", "roles")
    assert not found.allows_anonymous
    with pytest.raises(ValueError, match="needs --oidc-audience"):
        settings("--oidc-issuer", ISSUER)
    with pytest.raises(ValueError, match="must be an https URL"):
        settings("--oidc-issuer", "http://login.example.org", "--oidc-audience", "tokenbus")
    monkeypatch.setattr(extras, "_is_there", lambda module: module != "jwt")
    with pytest.raises(extras.MissingExtraError, match=r"^--oidc-issuer needs .*pip install 'tokenbus\[oidc\]'"):
        settings("--oidc-issuer", ISSUER, "--oidc-audience", "tokenbus")
