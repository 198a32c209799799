"""The demo model answers correctly, greedily, everything that the README says it knows."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from tests.support.engines import DEMO, Recorder, demo_engine
from tokenbus import demo
from tokenbus.protocol.wire import internal, messages
from tokenbus.worker.contract import contract, engine_request
from tools.demo_model import corpus


@pytest.fixture
async def engine() -> AsyncIterator[contract.Engine]:
    settings = msgspec.structs.replace(DEMO, max_num_seqs=64, kv_tokens=8192)
    engine = demo_engine(settings)
    await engine.start("demo")
    yield engine
    await engine.cleanup()


async def answers(engine: contract.Engine, questions: list[str]) -> list[str]:
    """Greedy answers, 64 at a time."""
    texts = []
    for at in range(0, len(questions), 64):
        recorders = [await asked(engine, question, at + n) for n, question in enumerate(questions[at : at + 64])]
        for recorder in recorders:
            await recorder.terminal()
            texts.append(recorder.text)
    return texts


async def asked(engine: contract.Engine, question: str, number: int) -> Recorder:
    turn = messages.ChatMessage(role="user", content=question)
    token_ids = await engine.tokenize(internal.Tokenize(messages=[turn]))
    recorder = Recorder()
    sampling = engine_request.Sampling(max_tokens=40)
    engine.generate(engine_request.EngineRequest(key=f"q-{number}", token_ids=token_ids, sampling=sampling), recorder)
    return recorder


@pytest.mark.long
async def test_every_sum_below_its_limit_is_right(engine: contract.Engine) -> None:
    numbers = range(demo.CORRECT_SUMS_UP_TO)
    questions = [corpus.sum_question(a, b) for a in numbers for b in numbers]
    right = [corpus.sum_answer(a, b) for a in numbers for b in numbers]
    found = await answers(engine, questions)
    assert [(one, other) for one, other in zip(found, right, strict=True) if one != other] == []


async def test_every_fact_is_right(engine: contract.Engine) -> None:
    known = [fact for country in corpus.COUNTRIES for fact in corpus.facts(country)]
    found = await answers(engine, [question for question, _ in known])
    assert found == [answer for _, answer in known]


async def test_it_tells_a_story_about_the_animal_that_was_asked_for(engine: contract.Engine) -> None:
    (story,) = await answers(engine, ["Tell me a story about a fox."])
    assert story.startswith("Once upon a time there was a ")
    assert "fox" in story


def test_it_fits_in_the_repository_and_the_wheel() -> None:
    assert demo.MODEL_PATH.stat().st_size < 3_000_000
