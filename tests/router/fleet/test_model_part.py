"""A router serves the models that its patterns match, under all names by which requests may mean them."""

import pytest

from tests.router.builders import card
from tokenbus.protocol.wire import messages
from tokenbus.router.fleet.model_part import ModelPart
from tokenbus.router.settings import RouterSettings


@pytest.mark.parametrize(
    ("patterns", "model", "expected"),
    [
        ((), "any", True),
        (("chat-*",), "chat-large", True),
        (("chat-*",), "chat", False),
        (("chat-*", "embed"), "embed", True),
        (("chat",), "chat-large", False),
        (("qwen2.5*",), "qwen2x5", False),
        (("Chat*",), "chat", False),
        (("m[12]",), "m2", True),
    ],
)
def test_a_model_belongs_to_a_part_if_a_pattern_matches_its_whole_name(
    patterns: tuple[str, ...], model: str, expected: bool
) -> None:
    assert ModelPart(patterns).has(model) is expected


def test_names_without_wildcards_are_served_before_any_worker_is_known() -> None:
    part = ModelPart(("chat-*", "embed"))
    assert list(part.first_names()) == ["embed"]
    assert list(part.new_names(card(model="embed"))) == []


def test_each_name_of_a_model_and_its_adapters_is_new_once() -> None:
    part = ModelPart(("demo",))
    style = messages.CardAdapter(name="style", digest="d")
    assert list(part.new_names(card())) == ["demo"]
    assert list(part.new_names(card("w2", adapters=[style]))) == ["demo:style"]
    assert list(part.new_names(card("w2", adapters=[style]))) == []
    assert list(ModelPart().new_names(card())) == []


def test_routers_with_the_same_patterns_are_one_queue_group() -> None:
    assert ModelPart(("a", "b")).queue == ModelPart(("b", "a")).queue != ModelPart(("a",)).queue
    assert ModelPart().queue == "router"


@pytest.mark.parametrize("pattern", ["", "m" * 129])
def test_a_pattern_that_no_name_can_match_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="--models must have 1 to 128 bytes"):
        RouterSettings(model_patterns=(pattern,))
