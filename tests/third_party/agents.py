"""Agents that others wrote, each on a task of two calls, in a home of its own."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.third_party import packages
from tests.third_party.judging import Outcome
from tests.third_party.running import run
from tests.third_party.serving import SCRIPTED, Served

_TIMEOUT_S = 180.0
_TASK = "Write the word in {file} in capitals to capitals.txt."
_ANSWER = "The word is written in capitals."


def opencode(served: Served) -> list[Outcome]:
    """Runs opencode, which uses chat completions."""
    program = packages.node_modules("agents") / "node_modules/.bin/opencode"
    limits = {"context": 100_000, "output": 4_000}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Tokenbus",
        "options": {"baseURL": served.base_url},
        "models": {SCRIPTED: {"name": SCRIPTED, "limit": limits}},
    }
    model = f"tokenbus/{SCRIPTED}"
    config = {"autoupdate": False, "share": "disabled", "small_model": model, "provider": {"tokenbus": provider}}
    variables = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"}
    with tempfile.TemporaryDirectory() as home:
        work = _workplace(Path(home), "plum.txt", "damson\n")
        (work / "opencode.json").write_text(json.dumps(config))
        command = [str(program), "run", "--pure", "--format", "json", "--model", model, "--title", "capitals"]
        return _carry_out([*command, _TASK.format(file="plum.txt")], work, variables, "DAMSON\n")


def codex(served: Served) -> list[Outcome]:
    """Runs Codex, which uses responses."""
    program = packages.node_modules("agents") / "node_modules/.bin/codex"
    config = f"""
model = "{SCRIPTED}"
model_provider = "tokenbus"
model_context_window = 100000
check_for_update_on_startup = false
[model_providers.tokenbus]
name = "Tokenbus"
base_url = "{served.base_url}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
[analytics]
enabled = false
"""
    with tempfile.TemporaryDirectory() as home:
        work = _workplace(Path(home), "pear.txt", "quince\n")
        (Path(home) / ".codex").mkdir()
        (Path(home) / ".codex/config.toml").write_text(config)
        # The commands are ours, and the sandbox of Codex needs rights that a container does not have.
        command = [str(program), "exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
        return _carry_out([*command, _TASK.format(file="pear.txt")], work, {}, "QUINCE\n")


def _workplace(home: Path, file: str, content: str) -> Path:
    """Makes the folder for a task: a Git repository, so that no agent looks for instructions in the folders above."""
    work = home / "work"
    for folder in ("objects", "refs"):
        (work / ".git" / folder).mkdir(parents=True)
    (work / ".git/HEAD").write_text("ref: refs/heads/main\n")
    (work / file).write_text(content)
    return work


def _carry_out(command: list[str], work: Path, variables: Mapping[str, str], written: str) -> list[Outcome]:
    """Runs an agent and returns whether it has done its task, and has said so."""
    done = run(command, variables, work, home=work.parent, timeout_s=_TIMEOUT_S)
    file = work / "capitals.txt"
    said = f"exit status {done.returncode}: {done.stdout[-1_500:]} {done.stderr[-1_500:]}"
    return [
        Outcome("end", done.returncode == 0, said),
        Outcome("both calls carried out", file.exists() and file.read_text() == written, said),
        Outcome("answer", _ANSWER in done.stdout, said),
    ]
