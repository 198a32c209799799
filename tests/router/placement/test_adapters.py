"""Names of adapters become the digests that most workers have, for the tenants that may use them."""

import pytest

from tests.router.builders import card
from tokenbus.protocol.wire import codec, errors, messages
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.router.placement import adapters
from tokenbus.router.placement.placement import PlacementOptions
from tokenbus.router.placement.prefix_index import HashScheme


def with_adapters(*found: tuple[str, str], tenants: list[str] | None = None) -> messages.Card:
    made = [messages.CardAdapter(name=name, digest=digest, tenants=tenants) for name, digest in found]
    return codec.replace(card("w"), features=["generate", "lora"], adapters=made)


def lora(*names: str) -> list[messages.Lora]:
    return [messages.Lora(name=name) for name in names]


def test_a_name_stands_for_what_most_workers_have_and_for_the_smallest_of_equals() -> None:
    old, new = with_adapters(("a", "d2")), with_adapters(("a", "d1"))
    assert adapters.resolve([old, old, new], lora("a"), "t") == (Adapter("d2", 1.0),)
    assert adapters.resolve([old, new], lora("a"), "t") == (Adapter("d1", 1.0),)


def test_several_names_are_found_on_one_worker() -> None:
    both, one, other = with_adapters(("a", "d1"), ("b", "d2")), with_adapters(("a", "d3")), with_adapters(("b", "d4"))
    found = adapters.resolve([one, other, both], lora("b", "a"), "t")
    assert found == (Adapter("d1", 1.0), Adapter("d2", 1.0))
    with pytest.raises(errors.RequestError) as nowhere:
        adapters.resolve([one, other], lora("b", "a"), "t")
    assert nowhere.value.error.code is errors.Code.NO_WORKER


def test_a_hidden_adapter_is_like_one_that_does_not_exist() -> None:
    cards = [with_adapters(("a", "d1"), tenants=["acme"])]
    assert adapters.resolve(cards, lora("a"), "acme") == (Adapter("d1", 1.0),)
    refusals = []
    for given in (cards, [with_adapters()]):
        with pytest.raises(errors.RequestError) as refusal:
            adapters.resolve(given, lora("a"), "globex")
        refusals.append(refusal.value.error)
    assert refusals[0] == refusals[1]
    assert (refusals[0].code, refusals[0].param) == (errors.Code.MODEL_NOT_FOUND, "lora[0].name")


def test_a_model_whose_engines_have_no_adapters_says_so() -> None:
    with pytest.raises(errors.RequestError) as refusal:
        adapters.resolve([card("w")], lora("a"), "t")
    assert (refusal.value.error.code, refusal.value.error.param) == (errors.Code.UNSUPPORTED, "lora")


def test_equal_effects_have_equal_forms() -> None:
    assert adapters.combined([("b", 1.0), ("a", 0.5), ("b", 0.25)]) == (Adapter("a", 0.5), Adapter("b", 1.25))
    assert adapters.combined([("a", 0.0)]) == ()


def test_only_workers_that_have_all_adapters_for_the_tenant_may_be_chosen() -> None:
    options = PlacementOptions(adapters=(Adapter("d1", 1.0),), tenant="acme")
    assert options.restricts
    assert options.allows(with_adapters(("other name", "d1")))
    assert not options.allows(with_adapters(("a", "d2")))
    assert not options.allows(with_adapters(("a", "d1"), tenants=["globex"]))


def test_adapters_change_the_hashes_of_blocks() -> None:
    scheme, tokens = HashScheme("f", 2), b"\1\0\0\0\2\0\0\0"
    used = [(), (Adapter("d1", 1.0),), (Adapter("d1", 0.5),), (Adapter("d2", 1.0),)]
    assert len({scheme.hashes(tokens, "t", "", one)[0] for one in used}) == 4
