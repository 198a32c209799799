"""Models as Ollama tells of them."""

import json

import msgspec
import pytest

from tokenbus.gateway import ollama
from tokenbus.gateway.serving.catalog import Listing, Model
from tokenbus.protocol.wire import errors

MODEL = Model(id="chat", created=1_700_000_000, root="demo", context_length=512, max_model_len=512)
LISTING = Listing([MODEL], None)


def show(*features: str, model: Model = MODEL, name: str = "chat") -> ollama.ShownModel:
    return ollama.show(Listing([model], None, {model.root: features}), name)


def test_the_version_is_three_numbers_that_clients_can_compare() -> None:
    assert all(part.isdigit() for part in ollama.Version().version.split("."))
    assert len(ollama.Version().version.split(".")) == 3


def test_a_model_is_listed_under_its_name_and_as_loaded() -> None:
    (listed,) = ollama.list_models(LISTING).models
    (running,) = ollama.list_running(LISTING).models
    for one in (listed, running):
        assert (one.name, one.model, one.modified_at) == ("chat", "chat", "2023-11-14T22:13:20Z")
        assert len(one.digest) == 64
    assert running.context_length == 512


def test_a_model_shows_its_context_and_what_it_can_do() -> None:
    shown = json.loads(msgspec.json.encode(show("generate", "tools", "reasoning", "stop")))
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 512
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert show("embed").capabilities == ["embedding"]
    assert show("generate", "fim").capabilities == ["completion", "insert"]


def test_a_model_is_named_by_either_field_with_or_without_its_tag() -> None:
    assert ollama.shown_name(b'{"model": "a"}') == ollama.shown_name(b'{"name": "a"}') == "a"
    assert show(name="chat:latest") == show(name="chat")
    tagged = msgspec.structs.replace(MODEL, id="a:latest")
    assert show(model=tagged, name="a:latest") == show()
    with pytest.raises(errors.RequestError, match="nothing serves"):
        show(model=tagged, name="a")
    with pytest.raises(errors.RequestError, match="model"):
        ollama.shown_name(b"{}")
