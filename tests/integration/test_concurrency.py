"""Each of many concurrent requests gets the same answer as alone."""

import asyncio
from collections.abc import Iterator
from typing import Any

import llama_cpp.llama_cpp as llama
import numpy as np
import pytest

from tests.support.raw_client import Answer, RawClient, check_stream
from tokenbus import demo
from tokenbus.protocol.wire import internal, messages
from tokenbus.worker.files import gguf_metadata
from tokenbus.worker.tokenizers.gguf_tokenizer import GgufTokenizer
from tools.demo_model import corpus

NEAR_TIE = 1e-3


def bodies() -> list[dict[str, Any]]:
    """Returns 50 different greedy requests: sums, facts and stories, long and short."""
    facts = [question for country in corpus.COUNTRIES for question, _ in corpus.facts(country)]
    texts = facts[:20] + [corpus.sum_question(n, 49 - n) for n in range(20)]
    texts += [f"Tell me a story about a {animal}." for animal in ("fox", "owl", "bear", "cat", "dog")]
    chats = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    prompts = [{"prompt": "Once upon a time " + "there was a fox and " * n} for n in (1, 5, 12, 25, 40)]
    shared = {"temperature": 0, "max_tokens": 80, "return_token_ids": True}
    return [body | shared for body in (*chats, *prompts)]


def sampled(answer: Answer) -> list[int]:
    return [token_id for message in answer.messages for token_id in message.get("token_ids", [])]


class Judge:
    """Computes with plain llama.cpp how close the two likeliest tokens were where two answers diverge."""

    def __init__(self) -> None:
        self._model = llama.llama_model_load_from_file(
            str(demo.MODEL_PATH).encode(), llama.llama_model_default_params()
        )
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_threads = 2048, 2048, 1
        self._context = llama.llama_init_from_model(self._model, params)
        vocab = llama.llama_model_get_vocab(self._model)
        self._vocabulary = GgufTokenizer(vocab, gguf_metadata.read(demo.MODEL_PATH))

    def prompt_ids(self, body: dict[str, Any]) -> list[int]:
        turns = [messages.ChatMessage(**turn) for turn in body["messages"]] if "messages" in body else None
        return self._vocabulary.tokenize(internal.Tokenize(text=body.get("prompt"), messages=turns))

    def gap(self, token_ids: list[int]) -> float:
        llama.llama_memory_clear(llama.llama_get_memory(self._context), True)
        tokens = (llama.llama_token * len(token_ids))(*token_ids)
        assert llama.llama_decode(self._context, llama.llama_batch_get_one(tokens, len(token_ids))) == 0
        logits = np.ctypeslib.as_array(llama.llama_get_logits_ith(self._context, -1), (self._vocabulary.size,))
        second, first = np.sort(logits)[-2:]
        return float(first - second)

    def close(self) -> None:
        llama.llama_free(self._context)
        llama.llama_model_free(self._model)


@pytest.fixture
def judge() -> Iterator[Judge]:
    judge = Judge()
    yield judge
    judge.close()


async def test_fifty_at_once_over_two_replicas_are_answered_as_if_alone(bare: RawClient, judge: Judge) -> None:
    alone = [await bare.ask(body) for body in bodies()]
    together = [await bare.generate(body) for body in bodies()]
    await asyncio.gather(*(answer.terminal(60) for answer in together))
    near_ties = 0
    for body, one, other in zip(bodies(), alone, together, strict=True):
        check_stream(other)
        assert len(other.terminals) == 1
        if sampled(one) != sampled(other):
            near_ties += 1
            assert gap_where_they_part(judge, judge.prompt_ids(body), one, other) < NEAR_TIE, (one.text, other.text)
    assert len({answer.messages[-1]["worker_id"] for answer in together}) == 2
    print(f"{near_ties} of 50 answers differ, each at a near tie")


def gap_where_they_part(judge: Judge, prompt_ids: list[int], one: Answer, other: Answer) -> float:
    """Returns the difference of the two best logits at the first token where the answers differ."""
    left, right = sampled(one), sampled(other)
    parted = next(i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return judge.gap(prompt_ids + left[:parted])


async def test_no_more_than_a_queue_full_is_accepted_and_the_rest_are_told_when_to_come_back(bare: RawClient) -> None:
    body = {"prompt": "Once", "max_tokens": 30, "ignore_eos": True, "routing": {"worker_id": "worker-1"}}
    answers = [await bare.generate(body) for _ in range(140)]
    await asyncio.gather(*(answer.terminal(60) for answer in answers))
    ends = [answer.messages[-1] for answer in answers]
    refused = [end["error"] for end in ends if end["finish_reason"] == "error"]
    assert sum(end["finish_reason"] == "length" for end in ends) >= 80
    assert refused
    assert {error["code"] for error in refused} == {"overloaded"}
    assert all(error["retryable"] and error["retry_after_ms"] > 0 for error in refused)
