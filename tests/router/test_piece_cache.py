"""Remembered token ids are those that the tokenizer makes, whoever asks, and take no more memory than they may."""

import functools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.support.engines import gguf_runner
from tokenbus import demo
from tokenbus.protocol.prompt import prompt, tokenizer_bundle
from tokenbus.protocol.wire import block_hash, codec, internal, messages
from tokenbus.router.requests.tokenization.piece_cache import _ENTRY_BYTES, PieceCache
from tokenbus.router.telemetry.metrics import RouterMetrics
from tokenbus.worker.contract.engine_settings import EngineSettings

ENTRY = _ENTRY_BYTES + 4


@functools.cache
def builder() -> prompt.PromptBuilder:
    """The demo model's, as a router has it."""
    runner = gguf_runner(EngineSettings(model=str(Path(demo.MODEL_PATH)), threads=1))
    assert runner.bundle is not None
    made = prompt.load_builder(tokenizer_bundle.unpack(runner.bundle))
    runner.close()
    return made


def counted(metrics: RouterMetrics) -> tuple[float, float]:
    """The characters whose ids were cached, and those whose ids were computed."""
    cached, computed = (metrics.tokenized_chars.labels(source) for source in ("cached", "computed"))
    return cached._value.get(), computed._value.get()


def numbers(text: str) -> list[int]:
    return [len(text)]


def ids(*token_ids: int) -> bytes:
    return block_hash.pack_token_ids(token_ids)


CONTENTS = st.text(st.sampled_from("ab <|im_end|>\n\u00e9\U0001f600"), max_size=40) | st.text(max_size=40)
TURNS = st.lists(
    st.builds(messages.ChatMessage, role=st.sampled_from(["system", "user", "assistant"]), content=CONTENTS),
    min_size=1,
    max_size=6,
)


@given(conversations=st.lists(TURNS, min_size=1, max_size=4), tenants=st.lists(st.sampled_from("ab"), min_size=4))
def test_every_turn_of_a_conversation_has_the_ids_that_it_has_without_a_memory(
    conversations: list[list[messages.ChatMessage]], tenants: list[str]
) -> None:
    cache = PieceCache(3_000, RouterMetrics().tokenized_chars)
    for conversation, tenant in zip(conversations, tenants, strict=False):
        for end in range(1, len(conversation) + 1):
            asked = internal.Tokenize(messages=conversation[:end])
            remembering = functools.partial(cache.packer, "demo", tenant)
            for one in (asked, codec.replace(asked, add_special_tokens=False)):
                assert builder().pack(one, None, remembering) == block_hash.pack_token_ids(builder().build(one))
            cache.check_integrity()


def test_a_next_turn_computes_only_what_is_new_in_it() -> None:
    metrics = RouterMetrics()
    cache = PieceCache(1 << 20, metrics.tokenized_chars)
    turns = [messages.ChatMessage(role=("user", "assistant")[number % 2], content="word " * 500) for number in range(9)]
    turns = [messages.ChatMessage(role=one.role, content=f"{number} {one.content}") for number, one in enumerate(turns)]
    remembering = functools.partial(cache.packer, "demo", "a")
    builder().pack(internal.Tokenize(messages=turns[:-2]), None, remembering)
    _, before = counted(metrics)
    builder().pack(internal.Tokenize(messages=turns), None, remembering)
    cached, after = counted(metrics)
    assert after - before < 2 * 2_600
    assert cached > 6 * 2_500


def test_a_tenant_and_a_tokenizer_have_their_own_memory() -> None:
    metrics = RouterMetrics()
    cache = PieceCache(1 << 20, metrics.tokenized_chars)
    assert cache.packer("one", "a", numbers)("text") == ids(4)
    assert cache.packer("one", "b", lambda _: [7])("text") == ids(7)
    assert cache.packer("other", "a", lambda _: [8])("text") == ids(8)
    assert counted(metrics) == (0, 12)
    assert cache.packer("one", "a", lambda _: [9])("text") == ids(4)
    assert counted(metrics) == (4, 12)


def test_the_tenant_with_most_loses_its_least_recently_used_texts() -> None:
    metrics = RouterMetrics()
    cache = PieceCache(4 * ENTRY, metrics.tokenized_chars)
    many, few = cache.packer("t", "many", numbers), cache.packer("t", "few", numbers)
    few("x")
    for text in ("1", "22", "333", "1", "4444", "55555"):
        many(text)
    _, before = counted(metrics)
    few("x")
    many("55555")
    many("4444")
    many("1")
    assert counted(metrics)[1] == before
    many("22")
    assert counted(metrics)[1] == before + 2
    cache.check_integrity()


@pytest.mark.parametrize("max_bytes", [0, 1, ENTRY - 1])
def test_what_does_not_fit_is_computed_each_time(max_bytes: int) -> None:
    cache = PieceCache(max_bytes, RouterMetrics().tokenized_chars)
    encode = cache.packer("t", "a", numbers)
    assert (encode("text"), encode("text"), cache.num_bytes) == (ids(4), ids(4), 0)


def test_threads_may_use_it_at_the_same_time() -> None:
    cache = PieceCache(50 * ENTRY, RouterMetrics().tokenized_chars)

    def use(thread: int) -> None:
        encode = cache.packer("t", f"tenant {thread % 3}", numbers)
        for number in range(3_000):
            text = "x" * (number * (thread + 1) % 67)
            assert encode(text) == ids(len(text))

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(use, range(4)))
    cache.check_integrity()


class PieceCacheHistory(RuleBasedStateMachine):
    """Texts of any size in any order: the bound holds, and ids are right."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = PieceCache(6 * ENTRY, RouterMetrics().tokenized_chars)

    @rule(tenant=st.sampled_from("abc"), length=st.integers(0, 600))
    def use(self, tenant: str, length: int) -> None:
        encode = self.cache.packer("t", tenant, lambda text: list(range(len(text))))
        assert encode("x" * length) == ids(*range(length))

    @invariant()
    def adds_up(self) -> None:
        self.cache.check_integrity()


TestPieceCacheHistory = PieceCacheHistory.TestCase
