"""Models as Ollama tells of them."""

import json

import msgspec
import pytest

from tokenbus.gateway.ollama import model_info
from tokenbus.gateway.openai import schemas
from tokenbus.protocol.wire import errors

MODEL = schemas.Model(id="chat", created=1_700_000_000, root="demo", context_length=512, max_model_len=512)


def test_the_version_is_three_numbers_that_clients_can_compare() -> None:
    assert all(part.isdigit() for part in model_info.Version().version.split("."))
    assert len(model_info.Version().version.split(".")) == 3


def test_a_model_is_listed_under_its_name_and_as_loaded() -> None:
    (listed,) = model_info.to_list([MODEL]).models
    (running,) = model_info.to_running([MODEL]).models
    for one in (listed, running):
        assert (one.name, one.model, one.modified_at) == ("chat", "chat", "2023-11-14T22:13:20Z")
        assert len(one.digest) == 64
    assert running.context_length == 512


def test_a_model_shows_its_context_and_what_it_can_do() -> None:
    shown = json.loads(msgspec.json.encode(model_info.to_shown(MODEL, ["generate", "tools", "reasoning", "stop"])))
    architecture = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{architecture}.context_length"] == 512
    assert shown["capabilities"] == ["completion", "tools", "thinking"]
    assert model_info.to_shown(MODEL, ["embed"]).capabilities == ["embedding"]
    assert model_info.to_shown(MODEL, ["generate", "fim"]).capabilities == ["completion", "insert"]


def test_a_model_is_named_by_either_field_with_or_without_its_tag() -> None:
    assert model_info.parse_show(b'{"model": "a"}') == model_info.parse_show(b'{"name": "a"}') == "a"
    assert model_info.named("chat:latest", {"chat": MODEL}) == model_info.named("chat", {"chat": MODEL}) == "chat"
    assert model_info.named("a:latest", {"a:latest": MODEL}) == "a:latest"
    with pytest.raises(errors.RequestError, match="model"):
        model_info.parse_show(b"{}")
