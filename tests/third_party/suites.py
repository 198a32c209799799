"""The suites: what each runs against a system, and how its results are read."""

import json
import shutil
import tempfile
import urllib.error
import urllib.request
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.third_party import agents, llama_server, packages, scores, vllm_server
from tests.third_party.judging import Outcome
from tests.third_party.junit import from_junit
from tests.third_party.running import run
from tests.third_party.serving import SCRIPTED, Served

_CLIENTS = Path(__file__).parent / "clients"
_OPENAI = ("chat", "responses", "test_completions.py", "test_embeddings.py", "test_models.py", "test_responses.py")
_ANTHROPIC = ("test_messages.py",)
_SENSIBLE = "tool or agent or json_mode or few_shot"
"""LangChain's standard tests that need a model which makes sense."""


class Suite(NamedTuple):
    """A suite of checks."""

    title: str
    run: Callable[[Served], list[Outcome]]
    needs_node: bool = False


def _resources(package: str, files: tuple[str, ...], url: Callable[[Served], str]) -> Callable[[Served], list[Outcome]]:
    """Returns what runs the tests of a library's resources, as they are published."""

    def run_suite(served: Served) -> list[Outcome]:
        source, programs = packages.source(package, "sdks"), packages.environment("sdks")
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            pytest = [str(programs / "python"), "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
            tests = [f"tests/api_resources/{name}" for name in files]
            run([*pytest, "--tb=line", f"--junitxml={report}", *tests], {"TEST_API_BASE_URL": url(served)}, source)
            return list(from_junit(report.read_bytes(), "tests.api_resources."))

    return run_suite


def _probe(served: Served) -> list[Outcome]:
    programs = packages.environment("sdks")
    probe = [str(programs / "canitoolcall"), "probe", "--base-url", served.base_url, "--model", SCRIPTED]
    report = json.loads(run([*probe, "--json", "-"]).stdout)
    kinds = {False: "whole", True: "streamed"}
    return [
        Outcome(
            f"{one['scenario_id']}.{kinds[one['stream']] if one['check'] == 'scenario' else one['check']}",
            one["status"] == "pass" and not one["warnings"],
            f"{one['detail']} {one['warnings'] or ''}",
        )
        for one in report["outcomes"]
    ]


def _schemathesis(served: Served) -> list[Outcome]:
    document = f"{served.root_url}/openapi.json"
    try:
        with urllib.request.urlopen(document) as response:
            paths = json.load(response)["paths"]
    except urllib.error.HTTPError as error:
        return [Outcome("document", False, f"GET /openapi.json: {error.code}")]
    operations = [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]
    program = str(packages.environment("schemathesis") / "st")
    with tempfile.TemporaryDirectory() as folder:
        reports = {"json": Path(folder) / "report.json", "junit": Path(folder) / "report.xml"}
        options = ["--phases", "examples,coverage,fuzzing", "--max-examples", "20", "--seed", "1", "--no-color"]
        options += ["--report", ",".join(reports)]
        for kind, path in reports.items():
            options += [f"--report-{kind}-path", str(path)]
        run([program, "run", document, "--url", served.root_url, *options], folder=Path(folder))
        failures = json.loads(reports["json"].read_text())["failures"]
        cases = [*xml.parse(reports["junit"]).iter("testcase")]
        texts = [(case.get("name", ""), one.text or "") for case in cases for one in case.iter("failure")]
    return [Outcome("document", True), *_from_failures(operations, failures, texts)]


def _from_failures(
    operations: list[str], failures: list[dict[str, Any]], texts: list[tuple[str, str]]
) -> Iterator[Outcome]:
    """Yields an outcome for each operation that has not failed, and for each kind of failure of the others."""
    failed = {operation for one in failures for operation in one["operations"]}
    for operation in operations:
        if operation not in failed:
            yield Outcome(operation, True)
    for one in failures:
        for operation in one["operations"]:
            path = operation.partition(" ")[2]
            shown = next((text for name, text in texts if name.endswith(f" {path}") and one["title"] in text), "")
            yield Outcome(f"{operation} {one['type']}", False, f"{one['title']}\n{shown[:1_500]}")


def _langchain_standard(served: Served) -> list[Outcome]:
    """Runs LangChain's standard tests: some need a model that makes sense."""
    python = [str(packages.environment("langchain") / "python"), "-m", "pytest", "-q", "--tb=line"]
    options = [*python, "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
    options += ["-o", "asyncio_default_fixture_loop_scope=session", "-o", "asyncio_default_test_loop_scope=session"]
    found: list[Outcome] = []
    for model, tests in ((SCRIPTED, _SENSIBLE), ("demo", f"not ({_SENSIBLE})")):
        variables = {"BASE_URL": served.base_url, "ROOT_URL": served.root_url, "MODEL": model}
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder) / "report.xml"
            tests_file = shutil.copy(_CLIENTS / "langchain_standard.py", folder)
            run([*options, f"--junitxml={report}", "-k", tests, str(tests_file)], variables, Path(folder))
            found += from_junit(report.read_bytes(), "langchain_standard.")
    return found


def _script(name: str, environment: str = "") -> Callable[[Served], list[Outcome]]:
    """Returns what runs a script of `clients/`, in an environment of Python or by Node. It prints `ok NAME` or
    `not ok NAME: REASON` for each check."""

    def run_suite(served: Served) -> list[Outcome]:
        variables = {"BASE_URL": served.base_url, "ROOT_URL": served.root_url, "NATS_URL": served.nats}
        num_before = len(_cancelled(served))
        with tempfile.TemporaryDirectory() as folder:
            scripts = Path(folder) / "clients"
            shutil.copytree(_CLIENTS, scripts)
            if environment:
                program = str(packages.environment(environment) / "python")
            else:
                program = "node"
                (scripts / "node_modules").symlink_to(packages.node_modules("clients") / "node_modules")
            done = run([program, name], variables, scripts)
        found = list(_from_lines(done.stdout))
        if done.returncode:
            found.append(Outcome("end", False, f"exit status {done.returncode}: {done.stderr[-2_000:]}"))
        if any(one.name == "cancel" and one.passed for one in found):
            found.append(Outcome("cancel reaches the worker", len(_cancelled(served)) > num_before))
        return found

    return run_suite


def _cancelled(served: Served) -> list[object]:
    return [line for line in served.gateway.log("request_finished") if line.get("disconnect") == "gone"]


def _from_lines(output: str) -> Iterator[Outcome]:
    for line in output.splitlines():
        if line.startswith("ok "):
            yield Outcome(line.removeprefix("ok "), True)
        elif line.startswith("not ok "):
            name, _, detail = line.removeprefix("not ok ").partition(": ")
            yield Outcome(name, False, detail)


SUITES = {
    "openai-python": Suite(
        "openai-python's `tests/api_resources`", _resources("openai", _OPENAI, lambda served: served.base_url)
    ),
    "anthropic-python": Suite(
        "anthropic-sdk-python's `test_messages.py`",
        _resources("anthropic", _ANTHROPIC, lambda served: served.root_url),
    ),
    "canitoolcall": Suite("`canitoolcall probe`", _probe),
    "schemathesis": Suite("schemathesis, by the OpenAPI document", _schemathesis),
    "lm-eval": Suite("lm-eval's multiple-choice tasks, as on llama-cpp-python's server", scores.run_tasks),
    "llama-server": Suite("the tests of llama.cpp's server", llama_server.run_tests),
    "vllm": Suite("vLLM's tests of its HTTP API", vllm_server.run_tests),
    "openai-client": Suite("`openai` (Python)", _script("openai_client.py", "sdks")),
    "open-responses": Suite("Open Responses, by its specification", _script("open_responses.py", "sdks")),
    "anthropic-client": Suite("`anthropic` (Python)", _script("anthropic_client.py", "sdks")),
    "ollama-client": Suite("`ollama` (Python)", _script("ollama_client.py", "sdks")),
    "ollama-js": Suite("`ollama` (JavaScript)", _script("ollama_client.mjs"), needs_node=True),
    "langchain": Suite("LangChain", _script("langchain_client.py", "langchain")),
    "langchain-standard": Suite("LangChain's standard tests of integrations", _langchain_standard),
    "hugging-face": Suite("Hugging Face's `InferenceClient`", _script("hugging_face_client.py", "other-sdks")),
    "mistral": Suite("`mistralai`", _script("mistral_client.py", "other-sdks")),
    "openai-js": Suite("`openai` (JavaScript)", _script("openai_client.mjs"), needs_node=True),
    "ai-sdk": Suite("Vercel's AI SDK", _script("ai_sdk.mjs"), needs_node=True),
    "opencode": Suite("opencode", agents.opencode, needs_node=True),
    "codex": Suite("Codex", agents.codex, needs_node=True),
}
