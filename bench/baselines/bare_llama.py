"""A decode loop written directly on llama_cpp: `python -m bench.baselines.bare_llama MODEL THREADS CONTEXT UBATCH`.

It reads and writes the lines of `bench.baselines.child`, and decodes greedily, a sequence for each prompt."""

import ctypes
import sys
from collections.abc import Sequence

import numpy as np
from llama_cpp import llama_cpp as llama

from bench.baselines import child

_MAX_STREAMS = 64
_BATCH_TOKENS = 1_024


class BareLlama:
    """One model, one context, one batch, and as little Python as possible."""

    def __init__(self, path: str, threads: int, context: int, ubatch: int = 512) -> None:
        self._silent = llama.llama_log_callback(lambda level, text, data: None)
        llama.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama.llama_backend_init()
        self._model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = context, _BATCH_TOKENS, ubatch
        params.n_seq_max = params.n_outputs_max = _MAX_STREAMS
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified, params.no_perf = True, True
        self._context = llama.llama_init_from_model(self._model, params)
        self._memory = llama.llama_get_memory(self._context)
        self._vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._model))
        self._batch = llama.llama_batch_init(_BATCH_TOKENS, 0, 1)

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, clock: child.Clock) -> None:
        length = len(prompts[0])
        llama.llama_memory_clear(self._memory, True)
        self._fill([(token, at, row) for row, prompt in enumerate(prompts) for at, token in enumerate(prompt)], length)
        best = self._step(len(prompts))
        clock.prompts_are_done()
        for at in range(length, length + tokens - 1):
            self._fill([(token, at, row) for row, token in enumerate(best)], 1)
            best = self._step(len(prompts))

    def _fill(self, entries: list[tuple[int, int, int]], every: int) -> None:
        batch = self._batch
        for place, (token, position, stream) in enumerate(entries):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, stream
            batch.logits[place] = (place + 1) % every == 0
        batch.n_tokens = len(entries)

    def _step(self, streams: int) -> list[int]:
        if llama.llama_decode(self._context, self._batch) != 0:
            raise RuntimeError("llama_decode failed")
        logits = np.ctypeslib.as_array(llama.llama_get_logits(self._context), (streams, self._vocab))
        best: list[int] = logits.argmax(axis=1).tolist()
        return best


def main() -> None:
    child.serve(BareLlama(sys.argv[1], *map(int, sys.argv[2:])).generate)


if __name__ == "__main__":
    main()
