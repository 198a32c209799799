"""Text comes out in whole characters, without stop strings or what could become one, and none of it is lost."""

import itertools
import time
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenbus.worker.engine_client.detokenizer import Detokenizer, StopAutomaton, StopMatcher, Text

GREETING = "héllo € 😀 wörld"


def detokenizer(token_bytes: list[bytes], *stops: str, min_tokens: int = 0) -> Detokenizer:
    return Detokenizer(token_bytes, stops, min_tokens)


def said(token_bytes: list[bytes], *stops: str, min_tokens: int = 0) -> tuple[str, str | None]:
    """The whole text of pieces taken as tokens, and the stop string that ended it."""
    one = detokenizer(token_bytes, *stops, min_tokens=min_tokens)
    text = ""
    for token_id in range(len(token_bytes)):
        part, stop = one.push(token_id)
        text += part
        if stop is not None:
            return text, stop
    return text + one.flush(), None


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(edges)]


@pytest.mark.parametrize("place", range(len(GREETING.encode()) + 1))
def test_a_text_split_in_two_anywhere_comes_out_whole(place: int) -> None:
    data = GREETING.encode()
    token_bytes = [data[:place], data[place:]]
    one = detokenizer(token_bytes)
    first = one.push(0).text
    assert GREETING.startswith(first)
    assert "\ufffd" not in first
    assert first + one.push(1).text + one.flush() == GREETING


def test_a_character_comes_out_with_its_last_byte() -> None:
    token_bytes = [bytes([byte]) for byte in "😀".encode()]
    one = detokenizer(token_bytes)
    assert [one.push(number).text for number in range(4)] == ["", "", "", "😀"]


def test_half_a_character_at_the_end_becomes_a_replacement_character() -> None:
    assert said([b"a", b"\xf0\x9f"]) == ("a\ufffd", None)


@given(data=st.binary(max_size=40), places=st.lists(st.integers(0, 40), max_size=12))
@example(data=b"\xf0\x9f\x98", places=[1, 2])
@example(data=b"\xe2\x28\xa1\xff\xc0\xaf", places=[1, 2, 3, 4, 5])
@settings(max_examples=200)
def test_any_bytes_split_anywhere_come_out_as_they_decode_whole(data: bytes, places: list[int]) -> None:
    assert said(cut(data, places)) == (data.decode(errors="replace"), None)


@given(text=st.text(max_size=20), places=st.lists(st.integers(0, 80), max_size=12))
@settings(max_examples=200)
def test_no_piece_of_a_text_holds_half_a_character(text: str, places: list[int]) -> None:
    token_bytes = cut(text.encode(), places)
    one = detokenizer(token_bytes)
    so_far = ""
    for token_id in range(len(token_bytes)):
        so_far += one.push(token_id).text
        assert text.startswith(so_far)
    assert so_far == text
    assert one.flush() == ""


def test_every_token_counts_even_one_without_text() -> None:
    one = detokenizer([b"", b"a"])
    one.push(0)
    one.push(1)
    one.count_hidden_token()
    assert one.num_tokens == 3


@pytest.mark.parametrize("first", range(1, 5))
@pytest.mark.parametrize("second", range(1, 5))
def test_a_stop_string_is_found_wherever_it_is_split(first: int, second: int) -> None:
    stop, text = "STOP", "before STOP after"
    at = text.index(stop)
    edges = sorted({0, at + first, at + min(4, first + second), len(text)})
    token_bytes = [text[start:end].encode() for start, end in itertools.pairwise(edges)]
    assert said(token_bytes, stop) == ("before ", stop)


def test_a_stop_string_of_split_characters_is_found() -> None:
    assert said([bytes([byte]) for byte in "ab€😀cd".encode()], "€😀") == ("ab", "€😀")


def test_text_that_could_become_a_stop_string_is_held_back_until_it_can_not() -> None:
    matcher = StopMatcher(["abcd"])
    assert matcher.push("xab") == Text("x")
    assert matcher.push("c") == Text("")
    assert matcher.push("x") == Text("abcx")


def test_only_text_that_can_still_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["aab"])
    assert matcher.push("aaa") == Text("a")
    assert matcher.push("b") == Text("", "aab")


def test_the_longest_suffix_that_starts_any_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["yz", "xyzw", "z!"])
    assert matcher.push("-xy") == Text("-")
    assert matcher.push("q") == Text("xyq")


def test_of_several_stop_strings_in_one_piece_the_first_to_be_complete_ends_it() -> None:
    assert StopMatcher(["cd", "bc", "d"]).push("abcd") == Text("a", "bc")


def test_of_several_stop_strings_the_first_to_be_complete_ends_it_however_the_text_is_cut() -> None:
    for stops in (["b", "bcd", "bc"], ["bcd", "b", "bc"]):
        assert StopMatcher(stops).push("abcde") == Text("a", "b")
    whole, cut = StopMatcher(["bc", "abcd"]), StopMatcher(["bc", "abcd"])
    assert whole.push("abcd") == Text("a", "bc")
    assert cut.push("ab") == Text("")
    assert cut.push("cd") == Text("a", "bc")


def test_of_several_stop_strings_that_end_together_the_longest_ends_it() -> None:
    for stops in (["c", "abc", "bc"], ["abc", "c", "bc"]):
        assert StopMatcher(stops).push("xabcd") == Text("x", "abc")


def test_without_stop_strings_nothing_is_held() -> None:
    matcher = StopMatcher([])
    assert matcher.push("abc") == Text("abc")
    assert matcher.flush() == ""


def test_held_text_is_released_once() -> None:
    matcher = StopMatcher(["abc"])
    matcher.push("xab")
    assert matcher.flush() == "ab"
    assert matcher.flush() == ""


def test_held_back_text_is_released_at_the_end() -> None:
    assert said([b"so ", b"ST"], "STOP") == ("so ST", None)


def test_held_text_and_half_a_character_are_released_together_and_once() -> None:
    one = detokenizer([b"ST", b"\xe2\x82"], "STOP")
    assert [one.push(0).text, one.push(1).text, one.flush(), one.flush()] == ["", "", "ST\ufffd", ""]


def test_a_stop_string_does_not_end_it_before_min_tokens_are_there() -> None:
    token_bytes = [b"END", b"END", b"END", b"x"]
    assert said(token_bytes, "END", min_tokens=0) == ("", "END")
    assert said(token_bytes, "END", min_tokens=1) == ("END", "END")
    assert said(token_bytes, "END", min_tokens=2) == ("ENDEND", "END")
    assert said(token_bytes, "END", min_tokens=3) == ("ENDENDENDx", None)


def search(parts: list[str], stops: list[str]) -> tuple[str, str | None]:
    """Looks through the whole text again after each part."""
    text = ""
    for part in parts:
        text += part
        found = [(text.index(stop) + len(stop), text.index(stop), stop) for stop in stops if stop in text]
        if found:
            _, at, stop = min(found)
            return text[:at], stop
    return text, None


few_letters = st.text(alphabet="ab", min_size=1, max_size=4) | st.text(alphabet="abc", min_size=1, max_size=9)
texts = st.text(alphabet="ab", max_size=4) | st.text(alphabet="abc", max_size=12)


@given(parts=st.lists(texts, max_size=12), stops=st.lists(few_letters, max_size=8))
@example(parts=["bca", "babd"], stops=["abd", "bca"])
@example(parts=["ab", "abab", "abac"], stops=["ababac", "babac", "bac"])
@settings(max_examples=500)
def test_stop_strings_are_found_as_a_search_of_the_whole_text_finds_them(parts: list[str], stops: list[str]) -> None:
    assert said([part.encode() for part in parts], *stops) == search(parts, stops)


@given(parts=st.lists(texts, max_size=12), stops=st.lists(few_letters, max_size=8))
@settings(max_examples=500)
def test_only_what_could_become_a_stop_string_is_held_back(parts: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text = so_far = ""
    for part in parts:
        text += part
        more, stop = matcher.push(part)
        so_far += more
        if stop is not None:
            assert text.startswith(so_far + stop)
            return
        beginnings = {stop[:length] for stop in stops for length in range(len(stop))} | {""}
        assert text == so_far + max((b for b in beginnings if text.endswith(b)), key=len)


@given(text=st.text(alphabet="ab", max_size=16), stop=few_letters, places=st.lists(st.integers(0, 16), max_size=8))
@settings(max_examples=200)
def test_with_one_stop_string_it_does_not_matter_how_a_text_is_split(text: str, stop: str, places: list[int]) -> None:
    before, found, _ = text.partition(stop)
    assert said(cut(text.encode(), places), stop) == (before, found or None)


def test_the_work_for_a_token_does_not_grow_with_stop_strings_that_almost_match() -> None:
    """Compared from every place, these take some 10 s."""
    matcher = StopMatcher(["a" * 1_023 + "!", *(f"ab{number}" + "ab" * 510 for number in range(15))])
    began = time.process_time()
    for _ in range(4_000):
        assert matcher.push("a").stop is None
    assert time.process_time() - began < 1.0


@given(
    token_bytes=st.lists(texts.map(str.encode) | st.binary(max_size=3), max_size=12),
    stops=st.lists(few_letters, max_size=8),
    min_tokens=st.integers(0, 6),
    data=st.data(),
)
@settings(max_examples=500)
def test_tokens_that_come_at_once_have_the_text_that_they_have_one_by_one(
    token_bytes: list[bytes], stops: list[str], min_tokens: int, data: st.DataObject
) -> None:
    token_ids = range(len(token_bytes))
    first, last = sorted(data.draw(st.tuples(places := st.integers(0, len(token_bytes)), places)))
    alone, together = (detokenizer(token_bytes, *stops, min_tokens=min_tokens) for _ in range(2))
    for token_id in token_ids[:first]:
        if alone.push(token_id).stop is not None:
            return
        together.push(token_id)
    one_by_one = list(map(alone.push, token_ids[first:last]))
    free = list(itertools.takewhile(lambda said: said.stop is None, one_by_one))
    assert together.push_all(token_ids[first:last]) == [said.text for said in free]
    if len(free) == len(one_by_one):
        assert list(map(together.push, token_ids[last:])) == list(map(alone.push, token_ids[last:]))
        assert (together.num_tokens, together.flush()) == (alone.num_tokens, alone.flush())


def test_a_token_that_comes_again_at_once_is_not_looked_through_again(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher, seen, advance = StopMatcher(["a" * 1_023 + "!"]), [], StopAutomaton.advance

    def look(automaton: StopAutomaton, state: int, text: str) -> tuple[int, int | None]:
        seen.append(state)
        return advance(automaton, state, text)

    monkeypatch.setattr(StopAutomaton, "advance", look)
    published = matcher.push_all(["a" * 250] * 1_000)
    assert seen == [0, 250, 500, 750, 1_000, 1_023]
    assert "".join(published) + matcher.flush() == "a" * 250_000


@pytest.mark.parametrize(
    "stops",
    [
        [chr(ord("a") + place) + "ab" * 511 for place in range(16)],
        ["a" * (1_023 - place) + chr(ord("b") + place) for place in range(16)],
        ["".join(chr(0x400 + (place * place + step * step) % 1_000) for step in range(512)) for place in range(16)],
    ],
)
def test_the_memory_for_stop_strings_is_in_proportion_to_their_length(stops: list[str]) -> None:
    tracemalloc.start()
    matcher = StopMatcher(stops)
    matcher.push("".join(stop[:-1] for stop in stops))
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 8_192 + 128 * sum(map(len, stops))
