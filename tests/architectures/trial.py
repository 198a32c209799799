"""Tries one architecture in a process of its own."""

import os
import re
import signal
import subprocess
import sys

import msgspec

from tests.architectures.finding import Finding, Outcome

_TIMEOUT_S = 240
_ASSERTION = re.compile(r"[\w.-]+:\d+: (GGML_ASSERT\(.*?\) failed|invalid case)")


def try_out(architecture: str) -> Finding:
    """Returns what was found, also where llama.cpp has ended the process."""
    command = [sys.executable, "-m", "tests.architectures.examine", architecture]
    environment = os.environ | {"TOKENBUS_LOG_FORMAT": "json", "OMP_WAIT_POLICY": "passive"}
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(Outcome.DIED, reason=f"not done after {_TIMEOUT_S} s")
    if ended.returncode:
        return Finding(Outcome.DIED, reason=_last_words(ended))
    finding = msgspec.json.decode(ended.stdout.splitlines()[-1], type=Finding)
    if finding.outcome is Outcome.DIED:
        return msgspec.structs.replace(finding, reason=_last_words(ended))
    return finding


def _last_words(ended: "subprocess.CompletedProcess[str]") -> str:
    if found := _ASSERTION.search(ended.stderr):
        return found.group()
    if ended.returncode < 0:
        return signal.Signals(-ended.returncode).name
    return "it left no words"
