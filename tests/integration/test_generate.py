"""Requests over NATS end to end, seen by a client that only follows docs/wire.md."""

import asyncio
import json
from typing import Any

import pytest

from tests.support.raw_client import PREFIX, RawClient, check_stream
from tokenbus.demo import CORRECT_SUMS_UP_TO
from tools.demo_model import chats, corpus

GREEDY = {"temperature": 0}


def question(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_a_prompt_is_answered_with_a_head_chunks_and_one_terminal(bare: RawClient) -> None:
    answer = await bare.ask({"id": "first", "prompt": "12 + 30 =", "max_tokens": 3, **GREEDY})
    check_stream(answer, "first")
    head = answer.messages[0]
    assert (head["text"], head["tokens"], head["finish_reason"]) == ("", 0, None)
    assert answer.text == " 42"
    terminal = answer.messages[-1]
    assert terminal["finish_reason"] == "length"
    assert terminal["usage"]["completion_tokens"] == 3
    assert not answer.raw[-1].headers


async def test_messages_are_rendered_with_the_models_template(bare: RawClient) -> None:
    answer = await bare.ask({"messages": question("What is the capital of Avaria?"), **GREEDY})
    check_stream(answer)
    assert answer.text == "The capital of Avaria is Limora."
    assert answer.messages[-1]["finish_reason"] == "stop"
    assert answer.messages[-1]["stop_match"] == chats.SPECIAL_TOKENS.index(chats.END)


async def test_every_fact_and_a_sample_of_sums_are_right_over_the_bus(bare: RawClient) -> None:
    step = 7
    pairs = [fact for country in corpus.COUNTRIES for fact in corpus.facts(country)]
    pairs += [
        (corpus.sum_question(a, b), corpus.sum_answer(a, b))
        for a in range(0, CORRECT_SUMS_UP_TO, step)
        for b in range(0, CORRECT_SUMS_UP_TO, step)
    ]
    wrong = []
    for at in range(0, len(pairs), 32):
        batch = pairs[at : at + 32]
        answers = [await bare.generate({"messages": question(asked), **GREEDY}) for asked, _ in batch]
        for answer, (_, right) in zip(answers, batch, strict=True):
            await answer.terminal()
            if answer.text != right:
                wrong.append((answer.text, right))
    assert not wrong


async def test_msgpack_requests_are_answered_in_msgpack(bare: RawClient) -> None:
    body = {"prompt": "12 + 30 =", "max_tokens": 3, **GREEDY}
    answer = await bare.ask(body, content_type="Application/MsgPack; charset=binary")
    check_stream(answer)
    assert answer.text == " 42"


async def test_token_ids_are_used_as_they_are_and_returned_when_asked_for(bare: RawClient) -> None:
    seen = await bare.ask({"token_ids": [0, 3, 40, 41], "max_tokens": 5, "return_token_ids": True, **GREEDY})
    check_stream(seen)
    assert seen.messages[-1]["usage"]["prompt_tokens"] == 4
    for message in seen.messages[1:]:
        assert len(message["token_ids"]) == message["tokens"]


async def test_the_sampling_that_was_used_can_be_used_again(bare: RawClient) -> None:
    asked: dict[str, Any] = {"prompt": "hi", "max_tokens": 5, "return_sampling": True, "ignore_eos": True}
    seen = await bare.ask(asked)
    sampling = seen.messages[0]["sampling"]
    assert sampling == seen.messages[-1]["sampling"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.7, 0.9, 40)
    assert (await bare.ask(asked | sampling | {"stream": False})).text == seen.text
    assert all("sampling" not in message for message in (await bare.ask({"prompt": "hi", "max_tokens": 1})).messages)


async def test_a_prompt_begins_with_bos_and_its_text_is_never_a_special_token(bare: RawClient) -> None:
    plain = await bare.ask({"prompt": "hi", "max_tokens": 1})
    special = await bare.ask({"prompt": "<|end|>", "max_tokens": 1})
    assert plain.messages[-1]["usage"]["prompt_tokens"] <= 3
    assert special.messages[-1]["usage"]["prompt_tokens"] > 3


async def test_without_a_stream_the_terminal_is_the_only_message(bare: RawClient) -> None:
    answer = await bare.ask({"messages": question("What is 2 + 2?"), "stream": False, **GREEDY})
    assert len(answer.messages) == 1
    check_stream(answer)
    assert answer.text == "2 + 2 = 4."
    assert answer.messages[0]["offset"] == 0


async def test_stop_strings_end_the_answer_and_are_not_sent(bare: RawClient) -> None:
    answer = await bare.ask({"messages": question("What is the capital of Borland?"), "stop": ["is Te"], **GREEDY})
    check_stream(answer)
    assert answer.text == "The capital of Borland "
    assert answer.messages[-1]["stop_match"] == "is Te"


async def test_equal_seeds_give_equal_answers(bare: RawClient) -> None:
    body = {"messages": question("Tell me a story."), "seed": 7, "temperature": 1.2, "max_tokens": 60}
    first, second = await bare.ask(body), await bare.ask(body)
    other = await bare.ask(body | {"seed": 8})
    assert first.text == second.text
    assert other.text != first.text


async def test_a_cancel_ends_the_stream_with_cancelled(bare: RawClient) -> None:
    body = {"id": "to-cancel", "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
    answer = await bare.generate(body)
    await answer.until(4)
    reply = await bare.nats.request(f"{PREFIX}.cancel.to-cancel", b"", timeout=60)
    assert reply.data == b'{"cancelled":true}'
    terminal = await answer.terminal()
    assert terminal["finish_reason"] == "cancelled"
    check_stream(answer)


async def test_a_deadline_ends_the_stream_with_an_error(bare: RawClient) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 1900, "ignore_eos": True, "timeout_ms": 60}
    answer = await bare.ask(body)
    assert answer.messages[-1]["error"]["code"] == "deadline_exceeded"


async def test_an_id_that_is_in_flight_is_refused(bare: RawClient) -> None:
    body = {"id": "twin", "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
    first = await bare.generate(body)
    await first.until(3)
    second = await bare.ask(body)
    assert second.messages[-1]["error"]["code"] == "duplicate_request"
    await bare.nats.publish(f"{PREFIX}.cancel.twin", b"")
    assert (await first.terminal())["finish_reason"] == "cancelled"
    check_stream(first)


async def test_the_same_id_belongs_to_each_tenant_alone(bare: RawClient) -> None:
    body = {"id": "shared", "prompt": "12 + 30 =", "max_tokens": 3, **GREEDY}
    subjects = [f"{PREFIX}.generate.demo", f"{PREFIX}.generate.demo.acme", f"{PREFIX}.generate.demo.=C3=A9"]
    answers = [await bare.generate(body, subject=subject) for subject in subjects]
    for answer in answers:
        await answer.terminal()
        assert answer.text == " 42"


async def test_a_tenant_cannot_cancel_the_request_of_another(bare: RawClient) -> None:
    body = {"id": "mine", "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True}
    answer = await bare.generate(body, subject=f"{PREFIX}.generate.demo.acme")
    await answer.until(3)
    await bare.nats.publish(f"{PREFIX}.cancel.mine", b"")
    await bare.nats.publish(f"{PREFIX}.cancel.other.mine", b"")
    assert (await answer.terminal())["finish_reason"] == "length"


async def test_models_lists_both_workers_with_their_load(bare: RawClient) -> None:
    reply = json.loads((await bare.nats.request(f"{PREFIX}.models", b"", timeout=60)).data)
    (served,) = reply["models"]
    assert served["model"] == "demo"
    assert {card["worker_id"] for card in served["workers"]} == {"worker-1", "worker-2"}
    assert all(card["state"] == "ready" and card["load"]["free_blocks"] > 0 for card in served["workers"])
    assert reply["limits"]["max_request_bytes"] == 1_048_576 - 4_096


async def test_a_request_can_be_pinned_to_a_worker(bare: RawClient) -> None:
    for worker_id in ("worker-1", "worker-2"):
        for _ in range(3):
            body = {"prompt": "12 + 30 =", "max_tokens": 1, "routing": {"worker_id": worker_id}}
            answer = await bare.ask(body)
            assert answer.messages[-1]["worker_id"] == worker_id
    lost = await bare.ask({"prompt": "12", "routing": {"worker_id": "worker-9"}})
    assert lost.messages[-1]["error"]["code"] == "no_worker"


async def nothing_runs(bare: RawClient) -> None:
    """Waits until the router knows that every earlier request has ended."""
    async with asyncio.timeout(60):
        while any(card["load"]["running"] + card["load"]["waiting"] for card in await workers(bare)):
            pass


async def workers(bare: RawClient) -> list[dict[str, Any]]:
    reply = json.loads((await bare.nats.request(f"{PREFIX}.models", b"", timeout=60)).data)
    (served,) = reply["models"]
    return list(served["workers"])


@pytest.mark.parametrize("policy", ["round_robin", "least_loaded"])
async def test_load_is_spread_over_both_workers(bare: RawClient, policy: str) -> None:
    await nothing_runs(bare)
    body = {"prompt": "Once", "max_tokens": 40, "ignore_eos": True, "routing": {"policy": policy}}
    answers = [await bare.generate(body) for _ in range(12)]
    ends = await asyncio.gather(*(answer.terminal() for answer in answers))
    assert {end["finish_reason"] for end in ends} == {"length"}
    by_worker = [end["worker_id"] for end in ends]
    assert 4 <= by_worker.count("worker-1") <= 8


async def test_rerank_answers_with_an_error_while_nothing_scores_documents(bare: RawClient) -> None:
    asked = b'{"id": "e1", "query": "who?", "documents": ["text"]}'
    reply = await bare.nats.request(f"{PREFIX}.rerank.demo", asked, timeout=60)
    answer = json.loads(reply.data)
    assert answer["id"] == "e1"
    assert answer["error"]["code"] == "unsupported"
