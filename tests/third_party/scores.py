"""lm-eval's multiple-choice tasks, whose scores have to be those that llama-cpp-python's server gives the same model.

No data set can be fetched, so the tasks are those that lm-eval publishes over questions about the demo model's world.
A prompt begins with BOS in all runs that are compared: llama-cpp-python adds it, and `local-completions` gets it from
its tokenizer. One run has the tokenizer of the gateway alone, which adds none."""

import contextlib
import json
import random
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.system import running_gateway, running_up
from tests.third_party import packages
from tests.third_party.judging import Outcome
from tests.third_party.running import run
from tests.third_party.serving import Served
from tokenbus import demo
from tools.demo_model import corpus, stories

_LABELS = "ABCD"
_TOLERANCE = 2e-2
"""Log probabilities of whole answers are equal if they differ by less: the two servers compute a token together with
others, where the 16 bits of the model's weights are rounded in another order."""
_NUM_QUESTIONS = 20
_BOS = "<|bos|>"
_EXACT = ("--flash-attention", "off", "--cache-type-k", "f32", "--cache-type-v", "f32")
_READY_TIMEOUT_S = 60.0


class Task(NamedTuple):
    """A published task, by its file among lm-eval's, and questions in the shape of its data."""

    published: str
    test: list[dict[str, Any]]
    dev: list[dict[str, Any]] = []
    """Questions with answers, which each prompt shows first."""


class Scores(NamedTuple):
    """The result of one question."""

    log_probs: list[float]
    """Of each choice."""
    metrics: dict[str, float]


def run_tasks(_: Served) -> list[Outcome]:
    """Runs the tasks against llama-cpp-python's server and in three ways against a gateway.

    Both compute attention in 32 bits: in 16, each log probability differs by hundredths with the tokens that are
    computed together."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        reference = stack.enter_context(_reference())
        nats = stack.enter_context(running_up("--workers", "1", "--threads", "1", *_EXACT))
        gateway = stack.enter_context(running_gateway(nats, folder))
        tasks = _tasks(random.Random(1))
        for task, made in tasks.items():
            _write_task(folder, task, made)
        _write_tokenizer(folder / "tokenizer")
        own = "tokenizer=tokenizer,tokenizer_backend=huggingface,add_bos_token=True"
        completions = f"model=demo,base_url={gateway.url}/completions"
        expected = _scores(folder, tasks, "reference", "gguf", f"base_url={reference}")
        runs = {
            "gguf": _scores(folder, tasks, "gguf", "gguf", f"base_url={gateway.url.removesuffix('/v1')}"),
            "local-completions": _scores(folder, tasks, "own", "local-completions", f"{completions},{own}"),
        }
        alone = _scores(folder, tasks, "alone", "local-completions", completions)
    found = [
        _compared(f"{task} by {name}", scores[task], expected[task]) for name, scores in runs.items() for task in tasks
    ]
    ends = [Outcome(f"{task} by the gateway's tokenizer", len(alone[task]) == len(tasks[task].test)) for task in tasks]
    return [*found, *ends]


def _tasks(rng: random.Random) -> dict[str, Task]:
    asked = [(fact, number) for country in corpus.COUNTRIES for number, fact in enumerate(corpus.facts(country))]
    asked = rng.sample(asked, _NUM_QUESTIONS)
    arc, mmlu = [], []
    for (question, answer), number in asked:
        others = [corpus.facts(country)[number][1] for country in corpus.COUNTRIES]
        choices, right = _shuffled(rng, answer, others)
        arc.append(
            {
                "question": question,
                "choices": {"text": choices, "label": [*_LABELS]},
                "answerKey": _LABELS[right],
            }
        )
        mmlu.append({"question": question, "choices": choices, "answer": right})
    hellaswag = []
    for _ in range(_NUM_QUESTIONS):
        beginning, *middle, end = stories.story(rng).split(". ")
        endings, right = _shuffled(rng, end, [stories.story(rng).split(". ")[-1] for _ in range(10)])
        told = {"activity_label": "Story", "ctx_a": f"{beginning}.", "ctx_b": f"{'. '.join(middle)}."}
        hellaswag.append(told | {"endings": endings, "label": str(right)})
    return {
        "arc": Task("arc/arc_easy.yaml", arc),
        "hellaswag": Task("hellaswag/hellaswag.yaml", hellaswag),
        "mmlu": Task("mmlu/default/_default_template_yaml", mmlu[3:], mmlu[:3]),
    }


def _shuffled(rng: random.Random, right: str, others: Iterable[str]) -> tuple[list[str], int]:
    """Returns four different choices, and which is right."""
    choices = [right, *rng.sample([*dict.fromkeys(one for one in others if one != right)], 3)]
    rng.shuffle(choices)
    return choices, choices.index(right)


def _write_task(folder: Path, name: str, task: Task) -> None:
    """Writes the questions of a task, and a file that takes all but the questions from the published one."""
    splits = {"test": task.test} | ({"dev": task.dev} if task.dev else {})
    for split, questions in splits.items():
        (folder / f"{name}-{split}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in questions))
    (site,) = packages.environment("lm-eval").parent.glob("lib/*/site-packages/lm_eval/tasks")
    told: dict[str, Any] = {"include": str(site / task.published), "task": f"local_{name}", "tag": None}
    told |= {"dataset_path": "json", "dataset_name": None, "test_split": "test"}
    told |= {"training_split": None, "validation_split": None}
    told["dataset_kwargs"] = {"data_files": {split: f"{name}-{split}.jsonl" for split in splits}}
    told["num_fewshot"] = len(task.dev)
    (folder / f"{name}.yaml").write_text(json.dumps(told))  # YAML is a superset of JSON


def _write_tokenizer(folder: Path) -> None:
    """Writes the demo model's tokenizer with the rule that a prompt begins with BOS, as models' own have it."""
    folder.mkdir()
    source = demo.MODEL_PATH.parent / "demo-onnx"
    shutil.copy(source / "tokenizer_config.json", folder)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    bos = next(one["id"] for one in tokenizer["added_tokens"] if one["content"] == _BOS)
    text = {"Sequence": {"id": "A", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": _BOS, "type_id": 0}}, text],
        "pair": [text, text],
        "special_tokens": {_BOS: {"id": _BOS, "ids": [bos], "tokens": [_BOS]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@contextlib.contextmanager
def _reference() -> Iterator[str]:
    """Runs llama-cpp-python's server with the demo model, its attention in 32 bits; yields its URL."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    program = str(packages.environment("llama-cpp-python") / "python")
    command = [program, "-m", "llama_cpp.server", "--model", str(demo.MODEL_PATH), "--port", str(port)]
    command += ["--n_ctx", "2048", "--n_threads", "1", "--logits_all", "true", "--type_k", "0", "--type_v", "0"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _READY_TIMEOUT_S
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError("llama-cpp-python's server does not start")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models"):
            return True
    except OSError:
        return False


def _scores(folder: Path, tasks: Iterable[str], name: str, model: str, arguments: str) -> dict[str, list[Scores]]:
    """Returns the results of all questions of each task, as lm-eval tells them; none where it does not."""
    names = ",".join(f"local_{task}" for task in tasks)
    command = [str(packages.environment("lm-eval") / "lm_eval"), "run", "--model", model, "--model_args", arguments]
    command += ["--tasks", names, "--include_path", ".", "--output_path", name, "--log_samples"]
    run(command, {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hub")}, folder)
    found: dict[str, list[Scores]] = {}
    for task in tasks:
        (told, *_) = [*folder.glob(f"{name}/*/samples_local_{task}_*.jsonl"), None]
        lines = [] if told is None else [json.loads(line) for line in told.read_text().splitlines()]
        found[task] = [
            Scores(
                [float(answer[0][0]) for answer in line["resps"]],
                {metric: float(line[metric]) for metric in line["metrics"]},
            )
            for line in sorted(lines, key=lambda line: int(line["doc_id"]))
        ]
    return found


def _compared(name: str, found: list[Scores], expected: list[Scores]) -> Outcome:
    """Returns whether all log probabilities are equal, and with them the scores of all questions but near ties."""
    if len(found) != len(expected) or not expected:
        return Outcome(name, False, f"{len(found)} questions have a result, and {len(expected)} of the reference")
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        gap = max(abs(one - other) for one, other in zip(ours.log_probs, theirs.log_probs, strict=True))
        if gap > _TOLERANCE:
            return Outcome(name, False, f"question {number}: {ours.log_probs}, and {theirs.log_probs} of the reference")
        second, first = sorted(theirs.log_probs)[-2:]
        if ours.metrics != theirs.metrics and first - second > 2 * _TOLERANCE:
            return Outcome(name, False, f"question {number}: {ours.metrics}, and {theirs.metrics} of the reference")
    return Outcome(name, True)
