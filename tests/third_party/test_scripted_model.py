"""The scripted model says what its script says, however its prompt is cut and batched."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tests.support import scripted_model
from tests.support.scripted_model import DEFAULT_ANSWER, Line

SCRIPT = (
    Line("fox", "A fox é."),
    Line("ox is", "An ox."),
    Line("a fox in a box", "Boxed."),
    Line("again", "<think>\nOnce more.\n</think>\n\nYes."),
)
ANSWER = "A fox é.<|im_end|>"


class Model:
    """A graph with the cache of one or more rows."""

    def __init__(self, session: Any, rows: int = 1) -> None:
        self._session = session
        self.cache = np.zeros((rows, 1, 0, 2), np.float32)
        self.mask = np.ones((rows, 0), np.int64)

    def read(self, *texts: str) -> list[int]:
        """Appends texts of equal length to the rows; returns the token that each row wants next."""
        ids = np.array([scripted_model.encode(text) for text in texts], np.int64)
        return self.append(ids)

    def append(self, ids: Any) -> list[int]:
        self.mask = np.concatenate([self.mask, np.ones_like(ids)], axis=1)
        inputs = {"input_ids": ids, "attention_mask": self.mask, "past_key_values.0.key": self.cache}
        inputs["position_ids"] = np.zeros_like(ids)
        logits, self.cache = self._session.run(None, inputs)
        return [int(token) for token in logits[:, -1].argmax(axis=-1)]

    def answer(self, wanted: list[int]) -> list[int]:
        """Returns all the tokens of an answer that begins with the wanted one."""
        found = []
        while len(found) < 100:
            found += wanted
            if wanted == [scripted_model.MARKER_IDS["<|im_end|>"]]:
                break
            wanted = self.append(np.array([wanted], np.int64))
        return found


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = scripted_model.write(tmp_path_factory.mktemp("scripted"), SCRIPT)
    return onnxruntime.InferenceSession(folder / "model.onnx")


def asked(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def tokens(text: str) -> list[int]:
    return scripted_model.encode(text)


def test_the_answer_is_that_of_the_cue(session: Any) -> None:
    model = Model(session)
    assert model.answer(model.read(asked("A fox?"))) == tokens(ANSWER)


def test_without_a_cue_the_answer_says_so(session: Any) -> None:
    model = Model(session)
    assert model.answer(model.read(asked("A hen?"))) == tokens(f"{DEFAULT_ANSWER}<|im_end|>")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("fox, ox is", "An ox."),
        ("ox is, fox", "A fox é."),
        ("a fox is", "An ox."),
        ("fofox", "A fox é."),
        ("a fox in", "A fox é."),
        ("a fox in a box", "Boxed."),
    ],
)
def test_the_last_cue_counts_also_where_cues_overlap(session: Any, text: str, answer: str) -> None:
    model = Model(session)
    assert model.answer(model.read(asked(text))) == tokens(f"{answer}<|im_end|>")


def test_cues_in_earlier_answers_do_not_count(session: Any) -> None:
    model = Model(session)
    turns = f"{asked('fox')}I said again.<|im_end|>\n{asked('What?')}"
    assert model.answer(model.read(turns)) == tokens(ANSWER)


def test_what_a_template_writes_before_the_answer_is_passed_over(session: Any) -> None:
    model = Model(session)
    assert model.answer(model.read(f"{asked('fox')}<think>\n\n</think>\n\n")) == tokens(ANSWER)
    thinking = Model(session)
    wanted = thinking.read(f"{asked('again')}<think>\n")
    assert thinking.answer(wanted) == tokens("Once more.\n</think>\n\nYes.<|im_end|>")


def test_a_token_that_was_forced_on_the_answer_is_passed_over(session: Any) -> None:
    model = Model(session)
    assert model.answer(model.read(f"{asked('fox')}A#")) == tokens(ANSWER)[1:]


def test_it_does_not_matter_where_a_prompt_is_cut(session: Any) -> None:
    prompt = asked("A fox?")
    for cut in range(1, len(prompt)):
        if "<|im" not in prompt[max(0, cut - 12) : cut + 12]:
            model = Model(session)
            model.read(prompt[:cut])
            assert model.answer(model.read(prompt[cut:])) == tokens(ANSWER)


def test_rows_of_a_batch_do_not_disturb_each_other_even_with_gaps(session: Any) -> None:
    model = Model(session, rows=2)
    model.read("<|im_start|>user\nfox", "<|im_start|>user\nhen")
    model.mask[1, -3:] = 0  # the second row had other columns there, which are gone
    wanted = model.read("<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n<|im_start|>assistant\n")
    assert wanted == [tokens(ANSWER)[0], tokens(DEFAULT_ANSWER)[0]]
    rest = Model(session)
    rest.cache, rest.mask = model.cache[:1], model.mask[:1]
    assert rest.answer(wanted[:1]) == tokens(ANSWER)
