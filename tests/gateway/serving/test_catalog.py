"""A listing has what a caller may use, and names an error for what it has not."""

import pytest

from tokenbus.gateway.admission.aliases import Aliases
from tokenbus.gateway.serving.catalog import Listing, MistralCapabilities
from tokenbus.protocol.wire import errors, messages


@pytest.mark.parametrize(
    ("unserved", "code"),
    [
        (None, errors.Code.NO_WORKER),
        (frozenset({"gone"}), errors.Code.NO_WORKER),
        (frozenset({"other"}), errors.Code.MODEL_NOT_FOUND),
    ],
)
def test_a_model_that_is_not_there_is_the_error_that_a_request_for_it_would_end_in(
    unserved: frozenset[str] | None, code: errors.Code
) -> None:
    with pytest.raises(errors.RequestError) as raised:
        Listing([], unserved).find("gone")
    assert raised.value.error.code is code


def test_who_names_a_model_that_never_was_learns_which_there_are() -> None:
    served = [messages.ServedModel(model=f"m{n}", context_length=512, features=[]) for n in range(22)]
    limits = messages.ServerLimits(max_request_bytes=1)
    listing = Listing.of(messages.ModelsReply(models=served, limits=limits, unserved=[]))
    with pytest.raises(errors.RequestError, match=r"ever served 'x'; served models: m0, m1, .*, m19, 2 more$"):
        listing.find("x")
    with pytest.raises(errors.RequestError, match=r"ever served 'x'; served models: m7$"):
        listing.of_patterns(["m7"]).find("x")
    with pytest.raises(errors.RequestError, match=r"ever served 'x'; served models: nothing$"):
        listing.of_patterns([]).find("x")


def test_what_a_model_can_do_is_said_in_mistral_s_words() -> None:
    served = messages.ServedModel(model="m", context_length=512, features=["generate", "chat", "tools"])
    (model,) = Listing.of(
        messages.ModelsReply(models=[served], limits=messages.ServerLimits(max_request_bytes=1))
    ).models
    assert model.type == "base"
    assert model.capabilities == MistralCapabilities(completion_chat=True, function_calling=True)


def test_a_key_sees_the_models_adapters_and_aliases_that_it_may_use() -> None:
    served = [
        messages.ServedModel(model=name, context_length=512, features=[], adapters=["style", "tone"])
        for name in ("chat-small", "chat-large", "base")
    ]
    reply = messages.ModelsReply(models=served, limits=messages.ServerLimits(max_request_bytes=1))
    aliases = Aliases(["fast=chat-small", "mixed=chat-small:1,base:1"])

    def seen_with(*patterns: str) -> list[str]:
        return [one.id for one in Listing.of(reply).of_patterns(patterns).with_aliases(aliases).models]

    assert len(seen_with("*")) == 3 * 3 + 2
    assert seen_with("chat-small") == ["chat-small", "fast"]
    assert seen_with("base", "chat-*:tone") == ["chat-small:tone", "chat-large:tone", "base"]
    assert seen_with("other") == []
