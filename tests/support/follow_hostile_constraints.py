"""Compiles and follows hostile constraints as an engine does, and prints what that took as JSON.

Run: python -m tests.support.follow_hostile_constraints KIND, with `json_schema`, `regex` or `grammar`, say. The name,
the seconds of CPU time of this process, the longest time for which a step had to wait, the bytes by which this process
grew, the problem if there is one, and the tokens are printed for each."""

import json
import queue
import random
import re
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np
import structlog

from deploy import llama_cpp_wheel
from tests.hostile.scale import IS_LONG
from tests.support import tiny_vocabulary, vocabularies
from tests.support.hostile_constraints import ALL
from tests.support.tiny_vocabulary import constraint
from tokenbus.worker.engine.constraints.compilation import (
    Compilation,
    CompiledConstraint,
    CompileJob,
    CompileStarted,
    ConstraintRefusal,
    Event,
)
from tokenbus.worker.engine.constraints.compiler import ModelTokens
from tokenbus.worker.engine.constraints.grammar import ConstraintError
from tokenbus.worker.engine.constraints.matcher import SequenceMatcher

_MAX_TOKENS = 400 if IS_LONG else 100
_MAX_S = 5.0


class _Engine:
    def __init__(self, tokens: ModelTokens) -> None:
        self.end_token_ids = tokens.end_token_ids
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.compilation = Compilation(lambda: tokens, 4, self.events.put)

    def compile(self, kind: str, source: str) -> SequenceMatcher | ConstraintRefusal:
        self.compilation.submit(CompileJob(1, "a", constraint(kind, source), []))
        while isinstance(event := self.events.get(timeout=60), CompileStarted):
            pass
        assert isinstance(event, CompiledConstraint), event
        return event.result

    def follow(self, kind: str, source: str) -> tuple[float, float, int, str | None, int]:
        cpu, before, tokens, longest_s = time.process_time(), _forget_peak(), 0, 0.0
        found, problem = self.compile(kind, source), None
        if isinstance(found, ConstraintRefusal):
            problem = found.problem.message
        else:
            try:
                tokens, longest_s = self._walk(found)
            except ConstraintError as error:
                problem = str(error)
            found.close()
        return time.process_time() - cpu, longest_s, _peak_bytes() - before, problem, tokens

    def _walk(self, matcher: SequenceMatcher) -> tuple[int, float]:
        chosen, until, longest_s = random.Random(1), time.monotonic() + _MAX_S, 0.0
        for count in range(_MAX_TOKENS):
            matcher.wait(_MAX_S)
            since = time.thread_time()
            token_id = matcher.forced()
            allowed = None if token_id is not None else matcher.allowed()
            longest_s = max(longest_s, time.thread_time() - since)
            if allowed is not None:
                token_id = chosen.choice(np.flatnonzero(allowed).tolist())
            assert token_id is not None
            if token_id in self.end_token_ids or time.monotonic() > until:
                return count, longest_s
            since = time.thread_time()
            matcher.accept(token_id)
            longest_s = max(longest_s, time.thread_time() - since)
        return _MAX_TOKENS, longest_s


def _forget_peak() -> int:
    """Lets the peak of this process begin at what it holds now, which is returned in bytes.

    (`ru_maxrss` would not do: Linux hands it down from the process that started this one.)"""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_bytes()


def _peak_bytes() -> int:
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    # looked for in the cache in which deploy/llama_cpp_wheel.py keeps them
    path = llama_cpp_wheel.kept_folder(llama_cpp.__version__, "vocabularies") / "ggml-vocab-llama-spm.gguf"
    if path.exists():
        with vocabularies.load(path) as (_, tokenizer):
            try_all(_Engine(ModelTokens(tokenizer.token_bytes, tokenizer.end_token_ids, tokenizer.encode)))
    else:
        ends = frozenset({tiny_vocabulary.END, tiny_vocabulary.OTHER_END})
        try_all(_Engine(ModelTokens(tiny_vocabulary.TOKENS, ends, tiny_vocabulary.encode)))


def try_all(engine: _Engine) -> None:
    engine.compile("regex", "a")  # makes the tokenizer, which is no constraint's fault
    for name, (kind, source) in ALL.items():
        if kind == sys.argv[1]:
            print(json.dumps([name, engine.follow(kind, source)]), flush=True)
    engine.compilation.close()


if __name__ == "__main__":
    main()
