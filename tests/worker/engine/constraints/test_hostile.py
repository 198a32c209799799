"""Whatever a client sends as a constraint takes little time and memory of the engine, or ends in an error.

Each is compiled as an engine does it, on a vocabulary of 32,000 tokens if llama.cpp's are at hand
(deploy/llama_cpp_wheel.py keeps them), else on a tiny one, and followed for up to 100 tokens (400 with
TOKENBUS_HOSTILE=long)."""

import json
import subprocess
import sys
from typing import NamedTuple

import pytest

from tests.support.hostile_constraints import ALL
from tokenbus.protocol.wire import codec, internal
from tokenbus.protocol.wire.checks import validation
from tokenbus.protocol.wire.params import GenerationParams, JsonSchema, ResponseFormat
from tokenbus.worker.streams.run_request import to_constraint

MAX_CPU_S = 2.0
"""CPU time of the engine, in which no more than small constraints are compiled."""
MAX_BYTES = 64 << 20
MAX_CALL_S = 0.1
"""CPU time of a mask or a token, while others wait for the step."""


class Seen(NamedTuple):
    cpu_s: float
    longest_call_s: float
    grown_bytes: int
    problem: str | None
    tokens: int

    @property
    def is_bounded(self) -> bool:
        is_quick = self.cpu_s < MAX_CPU_S and self.longest_call_s < MAX_CALL_S
        return is_quick and self.grown_bytes < MAX_BYTES and (self.problem is None or "\n" not in self.problem)


def asked(kind: str, source: str) -> GenerationParams:
    if kind == "json_schema":
        schema = JsonSchema(schema=json.loads(source))
        return GenerationParams(response_format=ResponseFormat(type="json_schema", json_schema=schema))
    return GenerationParams(**{"regex" if kind == "regex" else "grammar": source})


@pytest.mark.parametrize("name", ALL)
def test_the_wire_lets_it_pass(name: str) -> None:
    params = asked(*ALL[name])
    run = internal.Run(
        request_id="default:r", attempt=1, epoch="e", router_id="r", reply="_INBOX.x", encoding=codec.Encoding.JSON,
        token_ids=b"\1\0\0\0", params=params,
    )  # fmt: skip
    validation.check_run(run)
    constraint = to_constraint(params)
    assert constraint is not None
    assert constraint.kind == ALL[name][0] or name == "lark: not_lark"


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in ALL.values()}))
def test_each_is_bounded(kind: str) -> None:
    child = subprocess.run(
        [sys.executable, "-m", "tests.support.follow_hostile_constraints", kind],
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    seen = {name: Seen(*found) for name, found in map(json.loads, child.stdout.splitlines())}
    assert seen.keys() == {name for name, (of, _) in ALL.items() if of == kind}
    assert not {name: found for name, found in seen.items() if not found.is_bounded}
