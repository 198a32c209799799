"""A generation loop written directly on onnxruntime: `python -m bench.baselines.bare_onnx FOLDER THREADS CONTEXT`.

It reads and writes the lines of `bench.baselines.child`, and generates greedily in one batch. It works for graphs with
GroupQueryAttention: past and present share one buffer that is written in place, and everything is bound."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime

from bench.baselines import child

Array = np.ndarray[Any, np.dtype[Any]]


class _Bound(NamedTuple):
    """A binding for batches of one size, with cache and logits bound already."""

    binding: Any
    cache: list[Array]
    logits: Array


class BareOnnx:
    """One session, one cache, and as little Python as possible."""

    def __init__(self, folder: Path, threads: int, context: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        providers = ["CPUExecutionProvider"]
        self._session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=providers)
        self._context = context
        self._past = [value for value in self._session.get_inputs() if value.name.startswith("past")]
        self._vocab = self._session.get_outputs()[0].shape[-1]
        self._of_size: dict[int, _Bound] = {}

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, clock: child.Clock) -> None:
        bound = self._bound(len(prompts))
        ids = np.array(prompts, np.int64)
        logits = np.empty((*ids.shape, self._vocab), np.float32)
        best = self._step(bound.binding, ids, ids.shape[1], logits)
        clock.prompts_are_done()
        for total in range(ids.shape[1] + 1, ids.shape[1] + tokens):
            best = self._step(bound.binding, best, total, bound.logits)

    def _step(self, binding: Any, ids: Array, total: int, logits: Array) -> Array:
        """Returns the next token of each row, shape (rows, 1)."""
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_cpu_input("attention_mask", np.ones((len(ids), total), np.int64))
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(binding)
        best: Array = logits[:, -1].argmax(axis=1)[:, None]
        return best

    def _bound(self, rows: int) -> _Bound:
        if rows not in self._of_size:
            binding, cache = self._session.io_binding(), []
            for past in self._past:
                array = np.zeros((rows, past.shape[1], self._context, past.shape[3]), np.float32)
                place = ("cpu", 0, np.float32, array.shape, array.ctypes.data)
                binding.bind_input(past.name, *place)
                binding.bind_output(past.name.replace("past_key_values", "present"), *place)
                cache.append(array)
            self._of_size[rows] = _Bound(binding, cache, np.empty((rows, 1, self._vocab), np.float32))
        return self._of_size[rows]


def main() -> None:
    folder, threads, context = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    child.serve(BareOnnx(folder, threads, context).generate)


if __name__ == "__main__":
    main()
