"""SmolLM2 in llama.cpp's own Python binding, without Tokenbus: what answers are compared with."""

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

Messages = list[dict[str, str]]
CONTEXT = 4_096


class Reference:
    """Computes as a worker does by default: with flash attention, keys and values in 16 bits, and steps of up to 512
    tokens unless others are wanted."""

    def __init__(self, path: Path, *, step_tokens: int = 512) -> None:
        self._llama = llama_cpp.Llama(
            str(path), n_ctx=CONTEXT, n_batch=512, n_ubatch=step_tokens, n_threads=1, n_threads_batch=1,
            flash_attn=True, logits_all=True, verbose=False,
        )  # fmt: skip
        metadata: dict[str, str] = self._llama.metadata
        ends = [int(metadata[f"tokenizer.ggml.{name}_token_id"]) for name in ("eos", "bos")]
        eos, bos = (self._llama.detokenize([token], special=True).decode() for token in ends)
        self._formatter = Jinja2ChatFormatter(metadata["tokenizer.chat_template"], eos, bos)
        self.end = int(metadata["tokenizer.ggml.eos_token_id"])

    def ids_of(self, messages: Messages) -> list[int]:
        """Returns the prompt of a chat by the model's template."""
        text = self._formatter(messages=messages).prompt  # type: ignore[arg-type]
        return self._llama.tokenize(text.encode(), add_bos=False, special=True)

    def text_ids(self, text: str) -> list[int]:
        return self._llama.tokenize(text.encode(), add_bos=False, special=False)

    def logprobs(self, ids: list[int]) -> list[float]:
        """Returns the log probability of each token but the first."""
        rows = self._rows(ids)
        return [float(rows[at - 1][ids[at]]) for at in range(1, len(ids))]

    def _rows(self, ids: list[int]) -> Any:
        self._llama.reset()
        self._llama.eval(ids)
        return _log_softmax(self._llama.scores[: len(ids)])

    def greedy(self, ids: list[int], count: int) -> tuple[list[int], list[float]]:
        """Returns the likeliest tokens, up to the end of the answer, and by how much each was likelier than the second
        one, in log probability."""
        self._llama.reset()
        self._llama.eval(ids)
        tokens: list[int] = []
        margins: list[float] = []
        while len(tokens) < count:
            row = self._llama.scores[self._llama.n_tokens - 1]
            second, first = (int(token) for token in np.argsort(row)[-2:])
            tokens.append(first)
            margins.append(float(row[first] - row[second]))
            if first == self.end:
                break
            self._llama.eval([first])
        return tokens, margins

    def regret(self, ids: list[int], tokens: list[int]) -> float:
        """Returns by how much the worst of these tokens, which follow a prompt, was less likely than the likeliest one
        at its place, in log probability. A lost or repeated token, or keys of another text, cost several times 1."""
        rows = self._rows([*ids, *tokens])[len(ids) - 1 : -1]
        return max(float(row.max() - row[token]) for row, token in zip(rows, tokens, strict=True))

    def close(self) -> None:
        self._llama.close()


def _log_softmax(rows: Any) -> Any:
    wide = rows.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
