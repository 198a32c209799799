"""A prompt counts once for all answers to it that one client asks for, and a false claim counts as any request."""

import pytest

from tests.router.builders import flight
from tokenbus.protocol.wire import limits, subjects
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.router.requests.flights.flight import Flight
from tokenbus.router.requests.prompt_copies import PromptCopies


def asked(request_id: str, prompt: bytes = b"1234", copy_of: str | None = None, **fields: object) -> Flight:
    found = flight(request_id, copy_of=copy_of, **fields)  # type: ignore[arg-type]
    found.prompt_ids, found.num_prompt_tokens = prompt, 1
    return found


def test_further_answers_to_a_prompt_count_none_of_its_tokens() -> None:
    copies = PromptCopies()
    assert copies.counts(asked("a", copy_of="a"), 0.0)
    for number in range(1, 5):
        copy = asked(f"a-{number}", copy_of="a")
        copy.counts_prompt = copies.counts(copy, 1.0)
        assert copy.counted_prompt_tokens == 0
    assert copies.counts(asked("b", copy_of="a-1"), 1.0), "it names no first answer, but a copy"


@pytest.mark.parametrize(
    "claim",
    [
        asked("a-1", b"5678", "a"),
        asked("a-1", copy_of="unknown"),
        asked("a", copy_of="a"),
        asked("a-1", copy_of="a", cache_salt="other"),
        asked("a-1", copy_of="a", tenant="acme"),
    ],
    ids=["another prompt", "unknown", "itself", "another salt", "another tenant"],
)
def test_a_claim_that_is_false_counts_as_any_request(claim: Flight) -> None:
    copies = PromptCopies()
    copies.counts(asked("a", copy_of="a"), 0.0)
    assert copies.counts(claim, 0.0)


def test_an_answer_of_another_key_or_with_another_adapter_counts() -> None:
    copies = PromptCopies()
    copies.counts(asked("a", copy_of="a"), 0.0)
    of_key, adapted = asked("a-1", copy_of="a"), asked("a-2", copy_of="a")
    of_key.address = subjects.ModelAddress("demo", "default", "k2")
    adapted.adapters = (Adapter("d", 1.0),)
    assert copies.counts(of_key, 0.0)
    assert copies.counts(adapted, 0.0)


def test_a_prompt_to_which_one_answer_is_wanted_is_not_remembered() -> None:
    copies = PromptCopies()
    assert copies.counts(asked("a"), 0.0)
    assert len(copies._counted) == 0
    assert copies.counts(asked("a-1", copy_of="a"), 0.0)


def test_prompts_are_remembered_for_a_time_and_up_to_a_number() -> None:
    copies = PromptCopies()
    copies.counts(asked("a", copy_of="a"), 0.0)
    assert copies.counts(asked("a-1", copy_of="a"), limits.ENDED_STREAM_TTL_S)
    for number in range(5_000):
        copies.counts(asked(f"b{number}", copy_of=f"b{number}"), limits.ENDED_STREAM_TTL_S)
    assert len(copies._counted) == 4_096
