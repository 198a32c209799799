"""A history says again, from any token on, exactly what was said."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenbus.worker import contract
from tokenbus.worker.streams.history import History

PIECES = st.lists(st.tuples(st.integers(0, 3), st.text(max_size=6)), max_size=30)


def history_of(pieces: list[tuple[int, str]]) -> History:
    history = History()
    for count, text in pieces:
        start = history.num_tokens
        history.append(list(range(start, start + count)), text)
    return history


def test_nothing_was_said_at_first() -> None:
    history = History()
    assert (history.num_tokens, history.text_bytes, list(history.since(0, 100))) == (0, 0, [])
    assert history.whole() == (0, 0, 0, "", [], [])


def test_a_passage_begins_at_the_byte_where_its_first_token_does() -> None:
    history = history_of([(1, "né"), (1, ""), (1, "😀"), (1, "!")])
    (passage,) = history.since(2, 1_000)
    assert passage == (2, 2, 3, "😀!", [2, 3], [])


def test_text_of_several_tokens_comes_with_the_last_of_them() -> None:
    history = history_of([(3, "abc")])
    assert next(history.since(2, 1_000)).text == "abc"
    assert next(history.since(0, 1_000)).num_tokens == 3


def test_text_without_a_token_belongs_to_the_last_one() -> None:
    history = history_of([(1, "a"), (0, "b"), (1, "c")])
    assert [(p.text_offset, p.text) for p in (next(history.since(0, 99)), next(history.since(1, 99)))] == [
        (0, "abc"),
        (2, "c"),
    ]


@pytest.mark.parametrize("offset", [2, 7])
def test_behind_the_last_token_there_is_nothing(offset: int) -> None:
    assert list(history_of([(2, "ab")]).since(offset, 100)) == []


def likely(token_id: int, *alternatives: int) -> contract.Logprob:
    """With numbers that tell all of them apart."""
    return contract.Logprob(token_id, -token_id / 8, [(other, -other / 16) for other in alternatives])


def test_each_token_keeps_how_likely_it_and_its_alternatives_were() -> None:
    history = History(num_logprobs=3)
    said = [likely(5, 5, 6), likely(7, 8, 9), likely(1, 2, 3)]
    history.append([5], "a", said[:1])
    history.append([7, 1], "b", said[1:])
    assert history.whole().logprobs == said
    assert [one for passage in history.since(1, 1) for one in passage.logprobs] == said[1:]


def test_alternatives_beyond_what_is_kept_are_dropped_and_too_few_are_a_fault() -> None:
    history = History(num_logprobs=2)
    history.append([5], "a", [likely(5, 6, 7)])
    assert history.whole().logprobs == [likely(5, 6)]
    with pytest.raises(AssertionError):
        history.append([5], "a", [likely(5)])


def test_a_token_without_its_likelihood_is_a_fault_where_that_is_kept() -> None:
    with pytest.raises(AssertionError):
        History(num_logprobs=1).append([5], "a")


def test_likelihoods_that_nobody_asked_for_are_not_kept() -> None:
    history = History()
    history.append([5], "a", [likely(5, 6)])
    assert history.whole().logprobs == []


def test_memory_held_is_of_text_tokens_and_likelihoods() -> None:
    assert history_of([(1, "né"), (1, "")]).held_bytes == 3 + 2 * 8
    history = History(num_logprobs=2)
    history.append([5], "a", [likely(5, 6)])
    assert history.held_bytes == 1 + 8 + 2 * 12


def test_likelihoods_count_for_the_size_of_a_passage() -> None:
    history = History(num_logprobs=1)
    for token_id in range(4):
        history.append([token_id], "a", [likely(token_id)])
    two = 2 * (6 + 11 + 2_700)
    assert [passage.num_tokens for passage in history.since(0, two)] == [2, 2]
    assert [passage.num_tokens for passage in history.since(0, two - 1)] == [1, 1, 1, 1]


@given(pieces=PIECES, max_bytes=st.integers(1, 200), data=st.data())
def test_all_passages_from_any_token_on_are_what_was_said_from_there_on(
    pieces: list[tuple[int, str]], max_bytes: int, data: st.DataObject
) -> None:
    history = history_of(pieces)
    offset = data.draw(st.integers(0, history.num_tokens))
    passages = list(history.since(offset, max_bytes))
    whole = history.whole()
    at, text_at = offset, None
    for passage in passages:
        assert passage.offset == at
        assert text_at is None or passage.text_offset == text_at
        assert passage.num_tokens == len(passage.token_ids) > 0
        size = 6 * len(passage.text.encode()) + 11 * passage.num_tokens
        assert size <= max_bytes or passage.num_tokens == 1
        at, text_at = passage.offset + passage.num_tokens, passage.text_offset + len(passage.text.encode())
    assert at == history.num_tokens
    assert [one for passage in passages for one in passage.token_ids] == whole.token_ids[offset:]
    if passages:
        assert whole.text.encode()[passages[0].text_offset :].decode() == "".join(p.text for p in passages)
