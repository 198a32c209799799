"""Names become single subject tokens and come back; every subject is spelled exactly as the contract spells it."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tokenbus.protocol.wire import limits
from tokenbus.protocol.wire.subjects import (
    DEFAULT_TENANT,
    PROBE_SUFFIX,
    Subjects,
    decode_name,
    encode_name,
    is_inbox,
    key_to_request_id,
    request_key,
)

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=32)
REQUEST_IDS = st.from_regex(r"[A-Za-z0-9_-]{1,128}", fullmatch=True)
SUBJECTS = Subjects()
MODEL = "qwen2.5-0.5b"
MODEL_TOKEN = "qwen2=2E5-0=2E5b"


@given(NAMES)
def test_a_name_comes_back_from_its_token(name: str) -> None:
    assert decode_name(encode_name(name)) == name


@given(NAMES)
def test_a_token_is_of_plain_characters_and_escapes_only(name: str) -> None:
    assert re.fullmatch(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+", encode_name(name))


@given(NAMES, NAMES)
def test_different_names_have_different_tokens(one: str, other: str) -> None:
    assume(one != other)
    assert encode_name(one) != encode_name(other)


@given(st.text(st.sampled_from("aZ09_-=.*> 2Ec"), max_size=12))
def test_a_token_is_read_only_if_it_is_how_its_name_is_written(token: str) -> None:
    try:
        name = decode_name(token)
    except ValueError:
        return
    assert encode_name(name) == token


@pytest.mark.parametrize(
    ("name", "token"),
    [
        (MODEL, MODEL_TOKEN),
        ("A-Za-z_09", "A-Za-z_09"),
        ("a=b", "a=3Db"),
        ("*", "=2A"),
        (">", "=3E"),
        (" ", "=20"),
        ("\x00", "=00"),
        ("é", "=C3=A9"),
        ("a/b:c", "a=2Fb=3Ac"),
    ],
)
def test_these_names_have_these_tokens(name: str, token: str) -> None:
    assert encode_name(name) == token


@pytest.mark.parametrize(
    "token",
    ["", ".", "a.b", "*", ">", "=", "=2", "=2e", "=2G", "=41", "=5F", "=FF", "=C3", "=ED=A0=80", "a b", "a\n", "é"],
)
def test_what_no_name_is_written_as_is_refused(token: str) -> None:
    with pytest.raises(ValueError):
        decode_name(token)


def test_a_name_may_have_as_many_bytes_as_the_limit_and_not_one_more() -> None:
    name = "é" * (limits.MAX_NAME_BYTES // 2)
    assert decode_name(encode_name(name)) == name
    with pytest.raises(ValueError, match="129"):
        encode_name(name + "x")
    with pytest.raises(ValueError):
        decode_name("x" * (limits.MAX_NAME_BYTES + 1))


@pytest.mark.parametrize("name", ["", "\ud800"])
def test_a_name_is_text_and_not_empty(name: str) -> None:
    with pytest.raises(ValueError):
        encode_name(name)


@given(NAMES, NAMES, REQUEST_IDS)
def test_a_key_names_one_request_of_one_tenant_and_gives_the_id_back(tenant: str, other: str, request_id: str) -> None:
    key = request_key(tenant, request_id)
    assert key == f"{encode_name(tenant)}:{request_id}"
    assert key_to_request_id(key) == request_id
    assert (request_key(other, request_id) == key) == (other == tenant)


@pytest.mark.parametrize(
    ("subject", "expected"),
    [
        (SUBJECTS.generate(MODEL), f"tokenbus.v1.generate.{MODEL_TOKEN}"),
        (SUBJECTS.generate(MODEL, "acme inc"), f"tokenbus.v1.generate.{MODEL_TOKEN}.acme=20inc"),
        (SUBJECTS.generate(MODEL, "default"), f"tokenbus.v1.generate.{MODEL_TOKEN}"),
        (SUBJECTS.embed(MODEL), f"tokenbus.v1.embed.{MODEL_TOKEN}"),
        (SUBJECTS.embed(MODEL, "acme"), f"tokenbus.v1.embed.{MODEL_TOKEN}.acme"),
        (SUBJECTS.tokenize(MODEL), f"tokenbus.v1.tokenize.{MODEL_TOKEN}"),
        (SUBJECTS.detokenize(MODEL, "acme"), f"tokenbus.v1.detokenize.{MODEL_TOKEN}.acme"),
        (SUBJECTS.rerank(MODEL), f"tokenbus.v1.rerank.{MODEL_TOKEN}"),
        (SUBJECTS.rerank(MODEL, "acme"), f"tokenbus.v1.rerank.{MODEL_TOKEN}.acme"),
        (SUBJECTS.models_for(), "tokenbus.v1.models"),
        (SUBJECTS.models_for("a.b"), "tokenbus.v1.models.a=2Eb"),
        (SUBJECTS.models_for("acme", "k2"), "tokenbus.v1.models.acme.k2"),
        (SUBJECTS.generate(MODEL, "acme", "k2"), f"tokenbus.v1.generate.{MODEL_TOKEN}.acme.k2"),
        (SUBJECTS.embed(MODEL, "default", "k2"), f"tokenbus.v1.embed.{MODEL_TOKEN}.default.k2"),
        (SUBJECTS.of_keys("embed"), "tokenbus.v1.embed.*.*.*"),
        (SUBJECTS.of_keys("embed", MODEL), f"tokenbus.v1.embed.{MODEL_TOKEN}.*.*"),
        (SUBJECTS.cancel("r-1"), "tokenbus.v1.cancel.r-1"),
        (SUBJECTS.cancel("r-1", "acme"), "tokenbus.v1.cancel.acme.r-1"),
        (SUBJECTS.resync("r-1"), "tokenbus.v1.resync.r-1"),
        (SUBJECTS.resync("r-1", "acme"), "tokenbus.v1.resync.acme.r-1"),
        (SUBJECTS.cancel("r-1", "acme", "m.1"), "tokenbus.v1.cancel.acme.r-1.m=2E1"),
        (SUBJECTS.cancel("r-1", model="m.1"), "tokenbus.v1.cancel.default.r-1.m=2E1"),
        (SUBJECTS.resync("r-1", "acme", "m.1"), "tokenbus.v1.resync.acme.r-1.m=2E1"),
        (SUBJECTS.cancels_of("m.1"), "tokenbus.v1.cancel.*.*.m=2E1"),
        (SUBJECTS.resyncs_of("m.1"), "tokenbus.v1.resync.*.*.m=2E1"),
        (SUBJECTS.worker(MODEL, "w.1", "run"), f"tokenbus.v1.worker.{MODEL_TOKEN}.w=2E1.run"),
        (SUBJECTS.worker(MODEL, "w1", "control"), f"tokenbus.v1.worker.{MODEL_TOKEN}.w1.control"),
        (SUBJECTS.worker(MODEL, "w1", "snapshot"), f"tokenbus.v1.worker.{MODEL_TOKEN}.w1.snapshot"),
        (SUBJECTS.worker(MODEL, "w1", "tokenizer"), f"tokenbus.v1.worker.{MODEL_TOKEN}.w1.tokenizer"),
        (SUBJECTS.worker(MODEL, "w1", "tokenize"), f"tokenbus.v1.worker.{MODEL_TOKEN}.w1.tokenize"),
        (
            SUBJECTS.gone(MODEL, "w1", request_key("acme inc", "r-1")),
            f"tokenbus.v1.worker.{MODEL_TOKEN}.w1.gone.acme=20inc:r-1",
        ),
        (SUBJECTS.card(MODEL, "w.1"), f"tokenbus.v1.card.{MODEL_TOKEN}.w=2E1"),
        (SUBJECTS.events(MODEL, "w.1"), f"tokenbus.v1.events.{MODEL_TOKEN}.w=2E1"),
        (SUBJECTS.discover, "tokenbus.v1.discover"),
        (SUBJECTS.all_cards, "tokenbus.v1.card.*.*"),
        (SUBJECTS.all_events, "tokenbus.v1.events.*.*"),
    ],
)
def test_every_subject_is_spelled_as_in_the_contract(subject: str, expected: str) -> None:
    assert subject == expected


def test_what_routers_listen_on_is_the_form_without_a_tenant_and_the_one_with() -> None:
    assert SUBJECTS.all_of("generate") == ("tokenbus.v1.generate.*", "tokenbus.v1.generate.*.*")
    for verb, forms in (("cancel", SUBJECTS.all_cancels), ("resync", SUBJECTS.all_resyncs)):
        assert forms == (f"tokenbus.v1.{verb}.*", f"tokenbus.v1.{verb}.*.*", f"tokenbus.v1.{verb}.*.*.*")
    assert SUBJECTS.models == ("tokenbus.v1.models", "tokenbus.v1.models.*")


def test_the_prefix_is_a_setting() -> None:
    assert Subjects("a.b.c").generate("m") == "a.b.c.generate.m"
    assert Subjects("one").parse_model("one.generate.m.t") == ("m", "t", "")


@pytest.mark.parametrize("prefix", ["", ".", "a.", ".a", "a..b", "a b", "a.*", "a.>", "a\n"])
def test_a_prefix_that_is_no_plain_subject_is_refused(prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        Subjects(prefix)


@given(NAMES, st.one_of(st.just(DEFAULT_TENANT), NAMES), st.one_of(st.just(""), NAMES))
def test_model_tenant_and_key_come_back_from_what_clients_ask_of_a_model(model: str, tenant: str, key_id: str) -> None:
    assert SUBJECTS.parse_models(SUBJECTS.models_for(tenant, key_id)) == (tenant, key_id)
    for subject_of in (SUBJECTS.generate, SUBJECTS.embed, SUBJECTS.rerank, SUBJECTS.tokenize, SUBJECTS.detokenize):
        subject = subject_of(model, tenant, key_id)
        assert SUBJECTS.parse_model(subject) == (model, tenant, key_id)
        assert SUBJECTS.tenant_token(subject) == encode_name(tenant)


@given(REQUEST_IDS, st.one_of(st.just(DEFAULT_TENANT), NAMES))
def test_tenant_and_request_come_back_from_cancel_and_resync(request_id: str, tenant: str) -> None:
    for subject in (SUBJECTS.cancel(request_id, tenant), SUBJECTS.resync(request_id, tenant)):
        address = SUBJECTS.parse_request(subject)
        assert address == (tenant, request_id, None)
        assert address.key == request_key(tenant, request_id)


@given(REQUEST_IDS, st.one_of(st.just(DEFAULT_TENANT), NAMES), NAMES)
def test_the_model_of_cancels_and_resyncs_can_be_added_and_comes_back(request_id: str, tenant: str, model: str) -> None:
    for subject_of in (SUBJECTS.cancel, SUBJECTS.resync):
        short, whole = subject_of(request_id, tenant), subject_of(request_id, tenant, model)
        assert SUBJECTS.parse_request(whole) == (tenant, request_id, model)
        assert SUBJECTS.with_model(short, SUBJECTS.parse_request(short), model) == whole
        assert SUBJECTS.tenant_token(short) == SUBJECTS.tenant_token(whole) == encode_name(tenant)


@given(NAMES, NAMES)
def test_model_and_worker_come_back_from_cards_and_events(model: str, worker_id: str) -> None:
    assert SUBJECTS.parse_worker(SUBJECTS.card(model, worker_id)) == (model, worker_id)
    assert SUBJECTS.parse_worker(SUBJECTS.events(model, worker_id)) == (model, worker_id)


def test_the_form_without_a_tenant_means_the_tenant_default() -> None:
    assert SUBJECTS.parse_model("tokenbus.v1.generate.m").tenant == "default"
    assert SUBJECTS.parse_model("tokenbus.v1.generate.m.default").tenant == "default"
    assert SUBJECTS.parse_request("tokenbus.v1.cancel.r-1").key == "default:r-1"


@pytest.mark.parametrize("token", ["=2e", "a=", "=41", "=FF", "", "x" * (limits.MAX_NAME_BYTES + 1)])
def test_names_in_no_subject_form_are_refused_wherever_they_stand(token: str) -> None:
    for parse, subject in (
        (SUBJECTS.parse_model, f"tokenbus.v1.generate.{token}"),
        (SUBJECTS.parse_model, f"tokenbus.v1.generate.m.{token}"),
        (SUBJECTS.parse_request, f"tokenbus.v1.cancel.{token}"),
        (SUBJECTS.parse_request, f"tokenbus.v1.resync.{token}.r"),
        (SUBJECTS.parse_request, f"tokenbus.v1.resync.t.r.{token}"),
        (SUBJECTS.parse_worker, f"tokenbus.v1.card.{token}.w"),
        (SUBJECTS.parse_worker, f"tokenbus.v1.events.m.{token}"),
    ):
        with pytest.raises(ValueError):
            parse(subject)


@pytest.mark.parametrize("reply", ["_INBOX.a", "_INBOX.a.b.c", "_INBOX.=2A", "_INBOX.é", "_INBOX._INBOX"])
def test_a_prefix_and_one_more_token_are_an_inbox(reply: str) -> None:
    assert is_inbox(reply, ("_INBOX",))


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "_INBOX",
        "_INBOX.",
        "_INBOX..a",
        "_INBOX.a.",
        "_INBOX.a..b",
        "._INBOX.a",
        "_INBOX.*",
        "_INBOX.>",
        "_INBOX.a.*",
        "_INBOX.a.>",
        "_INBOX.*.a",
        "*.a",
        ">",
        "_INBOX.a b",
        "_INBOX.a\t",
        "_INBOX.a\r\n",
        "_INBOX.a\n",
        " _INBOX.a",
        "_INBOX a",
        "_INBOX2.a",
        "_INBOX_acme.a",
        "_inbox.a",
        "x._INBOX.a",
        "tokenbus.v1.worker.m.w.run",
    ],
)
def test_anything_else_is_no_inbox(reply: str) -> None:
    assert not is_inbox(reply, ("_INBOX",))


def test_an_inbox_has_one_of_the_allowed_prefixes_and_all_of_its_tokens() -> None:
    prefixes = ("_INBOX_acme", "my.inboxes")
    assert is_inbox("_INBOX_acme.a", prefixes)
    assert is_inbox("my.inboxes.a", prefixes)
    assert not is_inbox("my.inboxes", prefixes)
    assert not is_inbox("my.a", prefixes)
    assert not is_inbox("_INBOX.a", prefixes)
    assert not is_inbox("_INBOX.a", ())


@given(st.text(st.sampled_from("_INBOX.*> \r\nab"), max_size=14))
def test_no_inbox_has_a_wildcard_an_empty_token_or_whitespace(tail: str) -> None:
    reply = "_INBOX." + tail
    tokens = tail.split(".")
    assert is_inbox(reply, ("_INBOX",)) == (all(tokens) and not set(tail) & set("*> \r\n"))


def test_an_inbox_leaves_room_for_a_reply_subject_beside_it() -> None:
    longest = "_INBOX." + "é" * ((limits.MAX_INBOX_BYTES - 7) // 2)
    assert is_inbox(longest, ("_INBOX",))
    assert not is_inbox(longest + "éé", ("_INBOX",))
    name = "." * limits.MAX_NAME_BYTES
    gone = Subjects().gone(name, name, request_key(name, "x" * limits.MAX_ID_BYTES)) + PROBE_SUFFIX
    assert len(longest.encode()) + len(gone) < limits.MAX_CONTROL_LINE_BYTES
