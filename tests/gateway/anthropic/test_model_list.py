"""Models are listed as Anthropic's clients expect."""

import msgspec

from tokenbus.gateway.anthropic import model_list
from tokenbus.gateway.serving.catalog import NO_MODELS, Listing, Model


def test_a_page_has_all_models() -> None:
    one = Model(id="claude-demo", created=1_700_000_000, root="demo", context_length=2_048, max_model_len=2_048)
    two = msgspec.structs.replace(one, id="demo")
    page = msgspec.to_builtins(model_list.to_page(Listing([one, two], None)))
    assert page["data"][0] == {
        "type": "model",
        "id": "claude-demo",
        "display_name": "claude-demo",
        "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active",
        "max_input_tokens": 2_048,
        "max_tokens": 2_048,
    }
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "claude-demo", "demo")


def test_an_empty_page_has_no_ends() -> None:
    page = model_list.to_page(NO_MODELS)
    assert (page.data, page.first_id, page.last_id) == ([], None, None)
