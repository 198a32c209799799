"""Models as Ollama tells of them."""

import json

import msgspec
import pytest

from tokenbus.gateway.ollama import models as ollama
from tokenbus.gateway.serving import catalog
from tokenbus.gateway.serving.catalog import Listing, Model
from tokenbus.protocol.wire import errors, messages

MODEL = Model(id="chat", created=1_700_000_000, root="demo", context_length=512, max_model_len=512)
LISTING = Listing([MODEL], None)


SERVED = messages.ServedModel(
    model="demo", context_length=512, features=[], engines=["gguf"], engine_bytes=4_096, since_ms=1_700_000_000_000
)


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


def test_a_model_that_no_worker_has_loaded_is_listed_and_not_as_loaded() -> None:
    listing = LISTING._replace(unloaded=frozenset({"demo"}))
    assert [one.name for one in ollama.list_models(listing).models] == ["chat"]
    assert ollama.list_running(listing).models == []


def test_a_loaded_model_tells_its_engine_and_the_memory_of_it() -> None:
    (running,) = ollama.list_running(LISTING._replace(served={"demo": SERVED})).models
    assert (running.size, running.details.format) == (4_096, "gguf")
    (unknown,) = ollama.list_running(LISTING).models
    assert (unknown.size, unknown.details.format) == (0, "")


def test_pulling_a_served_model_has_nothing_to_do_and_another_is_refused_with_what_operators_do() -> None:
    assert ollama.pull(LISTING, "chat:latest").status == "success"
    with pytest.raises(errors.RequestError, match=r"nothing serves 'other' now: .*tokenbus pull"):
        ollama.pull(LISTING, "other")


def test_a_model_shows_its_context_and_what_it_can_do() -> None:
    shown = json.loads(msgspec.json.encode(show("generate", "tools", "reasoning", "stop")))
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 512
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert show("embed").capabilities == ["embedding"]
    assert show("generate", "fim").capabilities == ["completion", "insert"]


def test_a_worker_that_is_born_after_all_dates_hides_no_model() -> None:
    served = msgspec.structs.replace(SERVED, since_ms=10**18)
    listed = ollama.list_models(Listing(catalog.models_of(served), None)).models
    assert [one.modified_at for one in listed] == ["9999-12-31T23:59:59Z"]


def test_a_model_is_named_by_either_field_with_or_without_its_tag() -> None:
    assert ollama.named_model(b'{"model": "a"}') == ollama.named_model(b'{"name": "a"}') == "a"
    assert show(name="chat:latest") == show(name="chat")
    tagged = msgspec.structs.replace(MODEL, id="a:latest")
    assert show(model=tagged, name="a:latest") == show()
    with pytest.raises(errors.RequestError, match="nothing serves"):
        show(model=tagged, name="a")
    with pytest.raises(errors.RequestError, match="model"):
        ollama.named_model(b"{}")
