"""A bundle travels in parts and makes the same token ids wherever it arrives."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tokenbus.protocol.prompt import prompt, tokenizer_bundle
from tokenbus.protocol.prompt.tokenizer_bundle import PromptRules, TokenizerBundle
from tokenbus.protocol.wire import codec, errors, internal, limits
from tokenbus.protocol.wire.messages import ChatMessage

BOS, EOS, END = 300, 301, 302
SPECIAL = {"<s>": BOS, "</s>": EOS, "<|end|>": END}
CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n<|end|>{% endfor %}"


def bytes_tokenizer() -> Tokenizer:
    """Byte-level BPE with two merges: an id for each byte, one for `he`, one for `hel`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: place for place, character in enumerate([*alphabet, "he", "hel"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("he", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = bytes_tokenizer()
JSON = TOKENIZER.to_str()


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text).ids
    return ids


def make_rules(**changes: object) -> PromptRules:
    fields: dict[str, object] = {
        "special_tokens": SPECIAL,
        "chat_template": CHAT,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "bos_token_id": BOS,
        "vocab_size": 303,
    }
    return PromptRules(**(fields | changes))  # type: ignore[arg-type]


def make_bundle(tokenizer_json: str = JSON, **changes: object) -> TokenizerBundle:
    return TokenizerBundle(tokenizer_json=tokenizer_json, rules=make_rules(**changes))


def make_builder(**changes: object) -> prompt.PromptBuilder:
    return prompt.load_builder(make_bundle(**changes))


def said(content: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=content)]


def bundle_of_size(packed_bytes: int) -> TokenizerBundle:
    """One that is exactly that large when packed; its tokenizer is noise."""
    noise = "".join(random.Random(packed_bytes).choices("0123456789abcdef", k=packed_bytes))
    overhead = len(tokenizer_bundle.pack(make_bundle(noise))) - len(noise)
    bundle = make_bundle(noise[overhead:])
    assert len(tokenizer_bundle.pack(bundle)) == packed_bytes
    return bundle


# Parts


@pytest.mark.parametrize(
    ("size", "parts"),
    [
        (limits.PART_BYTES - 1, 1),
        (limits.PART_BYTES, 1),
        (limits.PART_BYTES + 1, 2),
        (2 * limits.PART_BYTES, 2),
        (5 * limits.PART_BYTES + 17, 6),
    ],
)
def test_a_bundle_goes_in_as_few_parts_as_it_fits_and_comes_back(size: int, parts: int) -> None:
    bundle = bundle_of_size(size)
    packed = tokenizer_bundle.pack(bundle)
    made = tokenizer_bundle.to_parts(packed)
    digest = tokenizer_bundle.bundle_digest(packed)
    assert [(part.part, part.parts, part.digest) for part in made] == [(n, parts, digest) for n in range(parts)]
    assert all(0 < len(part.data) <= limits.PART_BYTES for part in made)
    assert tokenizer_bundle.from_parts(made, digest) == bundle


def test_a_part_survives_the_wire() -> None:
    decoder = codec.Decoder(internal.TokenizerPart)
    packed = tokenizer_bundle.pack(bundle_of_size(limits.PART_BYTES + 1))
    sent = [codec.encode(part) for part in tokenizer_bundle.to_parts(packed)]
    assert all(len(payload) <= limits.PART_BYTES + limits.MESSAGE_RESERVE_BYTES for payload in sent)
    assert (
        tokenizer_bundle.pack(
            tokenizer_bundle.from_parts(
                [decoder.decode(payload) for payload in sent], tokenizer_bundle.bundle_digest(packed)
            )
        )
        == packed
    )


def test_the_digest_is_the_same_for_the_same_bundle_and_no_other() -> None:
    one = tokenizer_bundle.bundle_digest(tokenizer_bundle.pack(make_bundle()))
    assert tokenizer_bundle.bundle_digest(tokenizer_bundle.pack(make_bundle())) == one
    assert tokenizer_bundle.bundle_digest(tokenizer_bundle.pack(make_bundle(add_bos=True))) != one
    assert tokenizer_bundle.bundle_digest(tokenizer_bundle.pack(make_bundle(JSON + " "))) != one


def test_a_bundle_that_is_not_the_announced_one_is_refused() -> None:
    packed = tokenizer_bundle.pack(bundle_of_size(2 * limits.PART_BYTES + 1))
    digest = tokenizer_bundle.bundle_digest(packed)
    parts = tokenizer_bundle.to_parts(packed)
    changed = codec.replace(parts[1], data=b"\x00" + parts[1].data[1:])
    for wrong in ([], parts[:-1], parts[::-1], [*parts, parts[0]], [parts[0], changed, parts[2]]):
        with pytest.raises(ValueError, match="digest"):
            tokenizer_bundle.from_parts(wrong, digest)
    with pytest.raises(ValueError, match="digest"):
        tokenizer_bundle.from_parts(parts, "0" * 32)


@pytest.mark.parametrize("packed", [b"", b"\xc1", b"\x80", b"[]", b"\x81\xaetokenizer_json\xa1\xff"])
def test_a_bundle_with_the_right_digest_that_is_none_is_refused(packed: bytes) -> None:
    digest = tokenizer_bundle.bundle_digest(packed)
    with pytest.raises(ValueError):
        tokenizer_bundle.from_parts([internal.TokenizerPart(digest=digest, part=0, parts=1, data=packed)], digest)


@pytest.mark.parametrize("tokenizer_json", ["", "{}", "null", "nonsense", '{"model": {"type": "BPE"}}'])
def test_a_tokenizer_that_can_not_be_read_is_refused(tokenizer_json: str) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        prompt.load_builder(make_bundle(tokenizer_json))


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{% for %}", "malformed"), ("{% nonsense %}", "unknown tag 'nonsense'"), ("x" * 1_000_000, "larger than")],
)
def test_of_a_template_that_can_not_be_read_conversations_are_refused_by_name_and_texts_are_not(
    template: str, reason: str
) -> None:
    builder = make_builder(chat_template=template)
    assert not builder.supports_chat
    assert builder.build(internal.Tokenize(text="hello"))
    with pytest.raises(errors.RequestError, match=reason) as caught:
        builder.build(internal.Tokenize(messages=said("a")))
    assert caught.value.error.code is errors.Code.UNSUPPORTED
    assert caught.value.error.param == "messages"


def test_a_template_that_can_not_be_compiled_is_found_out_when_the_builder_is_started() -> None:
    builder = make_builder(chat_template="{{ bos_token | nonsense }}")
    builder.start()
    assert not builder.supports_chat
    with pytest.raises(errors.RequestError, match="No filter named 'nonsense'"):
        builder.build(internal.Tokenize(messages=said("a")))


# Texts


def test_a_text_is_encoded_with_the_merges_of_the_tokenizer() -> None:
    builder = make_builder()
    assert builder.build(internal.Tokenize(text="hello")) == ids_of("hello")
    assert len(builder.build(internal.Tokenize(text="hello"))) == 3
    assert builder.build(internal.Tokenize(text="")) == []


@given(st.lists(st.sampled_from([*SPECIAL, "<", "|end|>", "s>", "a", " ", "é", "\n"]), max_size=6).map("".join))
@settings(max_examples=100)
def test_no_special_token_is_parsed_in_a_text(text: str) -> None:
    ids = BUILDER.build(internal.Tokenize(text=text))
    assert not set(ids) & set(SPECIAL.values())
    assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize(("add_bos", "bos_token_id", "first"), [(True, BOS, [BOS]), (False, BOS, []), (True, None, [])])
def test_a_text_begins_with_bos_where_the_model_wants_one(
    add_bos: bool, bos_token_id: int | None, first: list[int]
) -> None:
    builder = make_builder(add_bos=add_bos, bos_token_id=bos_token_id)
    assert builder.build(internal.Tokenize(text="hello")) == first + ids_of("hello")
    assert builder.build(internal.Tokenize(text="")) == first


def test_bos_is_a_token_also_if_its_id_is_0() -> None:
    assert make_builder(add_bos=True, bos_token_id=0).build(internal.Tokenize(text="a")) == [0, *ids_of("a")]


# Conversations


def test_a_conversation_is_the_template_s_texts_and_special_tokens() -> None:
    expected = [*ids_of("user: hello\n"), END]
    assert make_builder().build(internal.Tokenize(messages=said("hello"))) == expected


def test_special_tokens_in_a_conversation_s_texts_are_texts() -> None:
    expected = [*ids_of("user: a<|end|><s>\n"), END]
    assert make_builder().build(internal.Tokenize(messages=said("a<|end|><s>"))) == expected


@pytest.mark.parametrize("template", ["{{ bos_token }}" + CHAT, "<s>" + CHAT, CHAT])
def test_bos_is_not_doubled_when_the_template_writes_it(template: str) -> None:
    builder = make_builder(add_bos=True, chat_template=template)
    assert builder.build(internal.Tokenize(messages=said("a"))) == [BOS, *ids_of("user: a\n"), END]


def test_bos_in_a_user_s_text_does_not_stand_for_the_model_s() -> None:
    builder = make_builder(add_bos=True, chat_template="{{ messages[0].content }}")
    assert builder.build(internal.Tokenize(messages=said("<s>a"))) == [BOS, *ids_of("<s>a")]


def test_the_template_gets_the_arguments() -> None:
    builder = make_builder(chat_template="{{ greeting }}")
    request = internal.Tokenize(messages=said("a"), chat_template_kwargs={"greeting": "hello"})
    assert builder.build(request) == ids_of("hello")


@pytest.mark.parametrize("template", [None, ""])
def test_a_model_without_a_template_does_not_support_conversations(template: str | None) -> None:
    builder = make_builder(chat_template=template)
    with pytest.raises(errors.RequestError) as caught:
        builder.build(internal.Tokenize(messages=said("a")))
    error = caught.value.error
    assert (error.code, error.param) == (errors.Code.UNSUPPORTED, "messages")
    assert builder.build(internal.Tokenize(text="a")) == ids_of("a")


def test_a_template_that_refuses_is_the_fault_of_the_request() -> None:
    builder = make_builder(chat_template="{{ raise_exception('no') }}")
    with pytest.raises(errors.RequestError) as caught:
        builder.build(internal.Tokenize(messages=said("a")))
    assert (caught.value.error.code, caught.value.error.param) == (errors.Code.INVALID_REQUEST, "messages")


def test_several_threads_make_the_same_prompts_as_one() -> None:
    contents = [f"hello {number} <|end|>" for number in range(200)]
    requests = [internal.Tokenize(messages=said(content)) for content in contents]
    expected = [BUILDER.build(one) for one in requests]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(BUILDER.build, requests)) == expected


BUILDER = make_builder()


FIM = tokenizer_bundle.FimTokens(prefix=310, suffix=311, middle=312)


def test_a_gap_stands_between_the_marks_of_the_model_behind_bos() -> None:
    request = internal.Tokenize(text="hello", suffix="world")
    found = make_builder(fim=FIM).build(request)
    assert found == [310, *ids_of("hello"), 311, *ids_of("world"), 312]
    begun = make_builder(fim=FIM, add_bos=True, bos_token_id=BOS).build(request)
    assert begun == [BOS, *found]


def test_a_text_without_a_suffix_has_no_gap() -> None:
    for suffix in (None, ""):
        assert make_builder(fim=FIM).build(internal.Tokenize(text="hello", suffix=suffix)) == ids_of("hello")


def test_a_gap_is_refused_by_a_model_without_marks_for_it() -> None:
    with pytest.raises(errors.RequestError) as refused:
        make_builder().build(internal.Tokenize(text="hello", suffix="world"))
    assert (refused.value.error.code, refused.value.error.param) == (errors.Code.UNSUPPORTED, "suffix")


def test_bos_is_left_out_where_it_is_not_wanted() -> None:
    builder = make_builder(add_bos=True, bos_token_id=BOS)
    for request in (internal.Tokenize(text="a"), internal.Tokenize(messages=said("a"))):
        with_bos = builder.build(request)
        assert with_bos == [BOS, *builder.build(codec.replace(request, add_special_tokens=False))]
