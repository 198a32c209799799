"""Other names for models."""

from collections import Counter

import pytest

from tokenbus.gateway.admission.aliases import Aliases
from tokenbus.gateway.serving.catalog import Listing, Model


def model(name: str, context_length: int = 100) -> Model:
    return Model(id=name, created=1, root=name, context_length=context_length, max_model_len=context_length)


def test_a_name_that_is_no_alias_stands_for_itself() -> None:
    assert Aliases(["a=b"]).resolve("other", "key") == "other"


def test_an_alias_stands_for_its_model_whose_name_may_have_colons() -> None:
    aliases = Aliases(["gpt-4o=org/model:Q4_K_M", "claude-x=demo"])
    assert aliases.resolve("gpt-4o", "key") == "org/model:Q4_K_M"
    assert aliases.resolve("claude-x", "key") == "demo"


def test_weights_share_requests_out_and_a_session_stays_with_its_model() -> None:
    aliases = Aliases(["a=old:9,new:1"])
    found = [aliases.resolve("a", f"session-{number}") for number in range(2_000)]
    assert 140 <= Counter(found)["new"] <= 260
    assert found == [aliases.resolve("a", f"session-{number}") for number in range(2_000)]


def test_a_weight_of_zero_gets_nothing() -> None:
    aliases = Aliases(["a=old:1,new:0"])
    assert {aliases.resolve("a", str(number)) for number in range(200)} == {"old"}


def test_an_alias_is_listed_while_all_its_models_are_served_with_the_shortest_context() -> None:
    aliases = Aliases(["a=old:9,new:1", "b=gone", "old=new"])
    listing = Listing([model("old", 200), model("new", 100)], None).with_aliases(aliases)
    assert [(one.id, one.root, one.context_length) for one in listing.models] == [
        ("old", "old", 200),
        ("new", "new", 100),
        ("a", "new", 100),
    ]


@pytest.mark.parametrize("name", ["x" * 129, "\ud800"])
def test_a_default_that_no_model_can_have_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="default model"):
        Aliases(default=name)


@pytest.mark.parametrize("setting", ["", "a", "a=", "=b", "a=b:1,", "a=b:-1", "a=b:0", f"{'x' * 129}=b"])
def test_what_is_no_alias_is_refused_and_named(setting: str) -> None:
    with pytest.raises(ValueError, match="alias"):
        Aliases([setting])
