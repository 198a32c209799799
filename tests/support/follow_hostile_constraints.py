"""Compiles and follows hostile constraints, each in a process of its own, and prints what that took as JSON.

Run: python -m tests.support.follow_hostile_constraints KIND, with `json_schema`, `regex` or `grammar`, say."""

import json
import os
import random
import resource
import sys
import time
from pathlib import Path

import llama_cpp
import numpy as np

from deploy import llama_cpp_wheel
from tests.hostile.scale import IS_LONG
from tests.support import tiny_vocabulary, vocabularies
from tests.support.hostile_constraints import ALL
from tests.support.tiny_vocabulary import constraint
from tokenbus.worker.engine.constraints.compiler import ConstraintCompiler
from tokenbus.worker.engine.constraints.grammar import ConstraintError

_MAX_TOKENS = 400 if IS_LONG else 100
_MAX_S = 5.0


def follow(compiler: ConstraintCompiler, kind: str, source: str) -> tuple[float, float, int, str | None, int]:
    began, grown = time.thread_time(), -_resident_bytes()
    longest_s, compile_s, count, problem = 0.0, None, 0, None
    chosen = random.Random(1)
    try:
        matcher = compiler.compile(constraint(kind, source))
        compile_s = time.thread_time() - began
        while count < _MAX_TOKENS and time.thread_time() < began + _MAX_S:
            since = time.thread_time()
            token_id = matcher.forced()
            if token_id is None:
                token_id = chosen.choice(np.flatnonzero(matcher.allowed()).tolist())
            longest_s = max(longest_s, time.thread_time() - since)
            since = time.thread_time()
            matcher.accept(token_id)
            longest_s = max(longest_s, time.thread_time() - since)
            count += 1
            if token_id in compiler.end_token_ids:
                break
    except ConstraintError as error:
        problem = str(error)
    if compile_s is None:
        compile_s = time.thread_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return compile_s, longest_s, grown + peak, problem, count


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    # looked for in the cache in which deploy/llama_cpp_wheel.py keeps them
    path = llama_cpp_wheel.kept_folder(llama_cpp.__version__, "vocabularies") / "ggml-vocab-llama-spm.gguf"
    if path.exists():
        with vocabularies.load(path) as (_, tokenizer):
            try_all(ConstraintCompiler(tokenizer.token_bytes, tokenizer.end_token_ids, tokenizer.encode))
    else:
        try_all(tiny_vocabulary.compiler())


def try_all(compiler: ConstraintCompiler) -> None:
    compiler.compile(constraint("regex", "a"))  # makes the tokenizer, which is no constraint's fault
    for name, (kind, source) in ALL.items():
        if kind != sys.argv[1]:
            continue
        child = os.fork()  # so that none pays for the memory of those before it
        if not child:
            print(json.dumps([name, follow(compiler, kind, source)]), flush=True)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert status == 0, (name, status)


if __name__ == "__main__":
    main()
