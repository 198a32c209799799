"""Reasoning is closed at the same token when the worker is killed before, or after the marker was forced."""

import signal

import pytest

from tests.support.exact_client import until_ready
from tests.support.raw_client import Answer, check_stream
from tests.support.system import System
from tools.demo_model import chats

CLOSE = chats.SPECIAL_TOKENS.index(chats.THINK_END)
BUDGET = 150
THINKING = {
    "messages": [{"role": "user", "content": "Tell me a story about a fox."}],
    "chat_template_kwargs": {"enable_thinking": True},
    "reasoning": {"max_tokens": BUDGET},
    "max_tokens": 600,
    "ignore_eos": True,
    "temperature": 0,
    "return_token_ids": True,
    "logit_bias": {str(CLOSE): -1e6},
}
"""Reasoning that the model does not end by itself."""


def worker_of(answer: Answer) -> str:
    return next(str(message["worker_id"]) for message in answer.messages if message.get("worker_id"))


def token_ids_of(answer: Answer) -> list[int]:
    return [token_id for message in answer.messages for token_id in message.get("token_ids", ())]


@pytest.mark.long
async def test_reasoning_is_closed_at_the_same_token_when_its_worker_is_killed_before_or_after(system: System) -> None:
    system.router("router")
    for name in ("worker-a", "worker-b"):
        system.worker(name, "--reasoning-budget-message", "Enough.")
    bare = await system.connect()
    await until_ready(bare, 2)
    calm = await bare.ask(THINKING)
    assert token_ids_of(calm).count(CLOSE) == 1
    for num_tokens in (10, BUDGET + 30):
        answers = [await bare.generate(THINKING) for _ in range(3)]
        for answer in answers:
            await answer.until(num_tokens)
        workers = [worker_of(answer) for answer in answers]
        system.signal(workers[0], signal.SIGKILL)
        await system.wait(workers[0])
        system.worker(workers[0], "--reasoning-budget-message", "Enough.")
        for answer, worker in zip(answers, workers, strict=True):
            terminal = await answer.terminal()
            answer.messages = [message for message in answer.messages if message.get("worker_id", "") is not None]
            check_stream(answer)
            assert terminal["attempt"] == 1 + (worker == workers[0])
            usage = terminal["usage"]
            assert BUDGET < usage["reasoning_tokens"] <= BUDGET + 40
            assert usage["completion_tokens"] == THINKING["max_tokens"]
            reasoning = "".join(message.get("reasoning", "") for message in answer.messages)
            assert reasoning.endswith("\n\nEnough.")
            assert token_ids_of(answer).count(CLOSE) == 1
            assert answer.text
        await until_ready(bare, 2)
