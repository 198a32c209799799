"""Who may ask, and on whose behalf."""

import pytest

from tokenbus.gateway.admission.keys import ApiKeys

SECRET = "sk-very-secret"


def bearer_of(keys: ApiKeys, authorization: str) -> str | None:
    return keys.tenant_of({"authorization": authorization})


def test_without_keys_everybody_asks_for_one_tenant() -> None:
    keys = ApiKeys(())
    assert keys.tenants == {"default"}
    assert keys.tenant_of({}) == bearer_of(keys, "Bearer whatever") == "default"
    assert ApiKeys((), anonymous_tenant="acme").tenant_of({}) == "acme"


def test_a_key_stands_for_its_tenant_and_may_hold_equals_signs() -> None:
    keys = ApiKeys([f"{SECRET}=acme", " YWJjZA===other "])
    assert keys.tenants == {"acme", "other"}
    assert bearer_of(keys, f"Bearer {SECRET}") == "acme"
    assert bearer_of(keys, f"bearer  {SECRET} ") == "acme"
    assert bearer_of(keys, "Bearer YWJjZA==") == "other"


@pytest.mark.parametrize(
    "header", ["", SECRET, f"Basic {SECRET}", "Bearer", "Bearer ", f"Bearer {SECRET}x", "Bearer é"]
)
def test_nothing_else_will_do(header: str) -> None:
    assert bearer_of(ApiKeys([f"{SECRET}=acme"]), header) is None


def test_a_key_alone_is_that_of_the_gateways_own_tenant() -> None:
    assert bearer_of(ApiKeys([SECRET]), f"Bearer {SECRET}") == "default"
    assert bearer_of(ApiKeys([f" {SECRET} "], anonymous_tenant="acme"), f"Bearer {SECRET}") == "acme"


@pytest.mark.parametrize("pair", [f"{SECRET}=", "=acme", "", f"{SECRET}={'x' * 129}"])
def test_what_is_no_pair_is_refused_without_being_shown(pair: str) -> None:
    with pytest.raises(ValueError, match="API key 2: must be key=tenant") as raised:
        ApiKeys(["a=b", pair])
    assert SECRET not in str(raised.value)


def test_a_key_is_not_shown() -> None:
    assert SECRET not in repr(ApiKeys([f"{SECRET}=acme"]))


def test_a_key_may_stand_in_the_headers_of_other_apis() -> None:
    keys = ApiKeys([f"{SECRET}=acme"])
    for name in ("x-api-key", "api-key"):
        assert keys.tenant_of({name: SECRET}) == "acme"
        assert keys.tenant_of({name: f"{SECRET}x"}) is None
        assert keys.tenant_of({name: SECRET, "authorization": "Basic dXNlcg=="}) == "acme"
        assert keys.tenant_of({name: SECRET, "authorization": "Bearer other"}) is None
