"""onnxruntime-genai as its users call it: `python -m bench.baselines.bare_genai FOLDER THREADS CONTEXT`.

It reads and writes the same lines as `bare_onnx`. Each batch is one Generator, which accepts no rows while it runs."""

import json
import sys
from collections.abc import Sequence

import numpy as np
import onnxruntime_genai as genai

from bench.baselines import child


class BareGenai:
    """One model, with a new generator for each batch."""

    def __init__(self, folder: str, threads: int, context: int) -> None:
        config = genai.Config(folder)
        options = {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = genai.Model(config)
        self._context = context

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, clock: child.Clock) -> None:
        params = genai.GeneratorParams(self._model)
        # No row may end early: an end token is forbidden until the batch has its full length.
        end = len(prompts[0]) + tokens
        params.set_search_options(batch_size=len(prompts), max_length=self._context, min_length=end, do_sample=False)
        generator = genai.Generator(self._model, params)
        generator.append_tokens(np.array(prompts, np.int32))
        generator.generate_next_token()
        clock.prompts_are_done()
        for _ in range(tokens - 1):
            generator.generate_next_token()
        assert [len(generator.get_sequence(row)) for row in range(len(prompts))] == [end] * len(prompts)


def main() -> None:
    folder, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    child.serve(BareGenai(folder, threads, context).generate)


if __name__ == "__main__":
    main()
