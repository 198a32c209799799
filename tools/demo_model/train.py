"""Trains the demo model and writes demo/demo.gguf. Needs torch, tokenizers and gguf: `make demo-model` (decision 0010).

A llama with 0.9 million parameters learns the text of corpus.py in about a quarter of an hour on two cores. The
weights are rounded to values exact in F16 before they are evaluated and exported, so that every engine computes with
the same numbers.
"""

import argparse
import copy
import itertools
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional

from tokenbus.demo import CORRECT_SUMS_UP_TO, MODEL_PATH
from tools.demo_model import chats, corpus, export_gguf
from tools.demo_model.chats import answer

VOCAB, LAYERS, WIDTH, FEED_FORWARD, HEADS, KV_HEADS = 640, 4, 128, 384, 4, 2
HEAD = WIDTH // HEADS
CONTEXT = 2048
ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-5
SIZES = export_gguf.DemoSizes(VOCAB, LAYERS, WIDTH, FEED_FORWARD, HEADS, KV_HEADS, CONTEXT, ROPE_BASE, NORM_EPSILON)
SHORT_ROWS, LONG_ROWS = (8, 321), (2, 1025)


def train_tokenizer() -> Tokenizer:
    """Trains byte-level BPE over single digits. The special tokens of chats come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(chats.PRE_TOKENIZER_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(chats.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.islice(corpus.documents(seed=1), 6_000), trainer)
    assert tokenizer.get_vocab_size() == VOCAB, tokenizer.get_vocab_size()
    return tokenizer


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(WIDTH, eps=NORM_EPSILON)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.v = nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)
        self.ffn_norm = nn.RMSNorm(WIDTH, eps=NORM_EPSILON)
        self.gate = nn.Linear(WIDTH, FEED_FORWARD, bias=False)
        self.up = nn.Linear(WIDTH, FEED_FORWARD, bias=False)
        self.down = nn.Linear(FEED_FORWARD, WIDTH, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        h = self.attn_norm(x)
        q = rotate(self.q(h).view(rows, length, HEADS, HEAD), cos, sin).transpose(1, 2)
        k = rotate(self.k(h).view(rows, length, KV_HEADS, HEAD), cos, sin).transpose(1, 2)
        v = self.v(h).view(rows, length, KV_HEADS, HEAD).transpose(1, 2)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).reshape(rows, length, WIDTH))
        h = self.ffn_norm(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies rotary positions to adjacent pairs, as llama.cpp does for this architecture."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class DemoModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=NORM_EPSILON)
        angles = torch.outer(torch.arange(CONTEXT), ROPE_BASE ** (-torch.arange(0, HEAD, 2) / HEAD))
        self.cos, self.sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, token_ids: torch.Tensor, wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the logits after all tokens, or only where `wanted`."""
        x = self.embedding(token_ids)
        length = token_ids.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:, :length], self.sin[:, :length])
        return functional.linear(self.norm(x if wanted is None else x[wanted]), self.embedding.weight)


class Rows(NamedTuple):
    """Documents in rows of equal length. Each row begins with a document, and anything that does not fit is left out:
    an answer whose tools are not visible would teach nothing."""

    token_ids: torch.Tensor
    is_learned: torch.Tensor
    """Whether a token is a training target. Those of questions, definitions and results are not."""


def rows_of(documents: Iterator[list[int]], rows: int, length: int) -> Rows:
    """Fills `rows` rows of `length` tokens with documents."""
    token_ids = torch.zeros(rows, length, dtype=torch.long)
    is_learned = torch.zeros(rows, length, dtype=torch.bool)
    for row in range(rows):
        at = 0
        while at < length:
            document = next(documents)[: length - at]
            token_ids[row, at : at + len(document)] = torch.tensor(document)
            is_learned[row, at : at + len(document)] = torch.tensor(learned(document))
            at += len(document)
    return Rows(token_ids, is_learned)


def learned(document: list[int]) -> list[bool]:
    """Returns which tokens of a document are training targets: what the model writes itself, and texts without roles.

    The start of reasoning belongs to the prompt, so that only the template's switch turns it on."""
    roles = {chats.SPECIAL_TOKENS.index(one) for one in (chats.SYSTEM, chats.USER, chats.TOOL)}
    end, think = (chats.SPECIAL_TOKENS.index(one) for one in (chats.END, chats.THINK))
    found, is_given = [], False
    for before, token in zip([end, *document], document, strict=False):
        is_given = is_given or token in roles
        found.append(not is_given and think not in (before, token))
        is_given = is_given and token != end
    return found


def encoded_documents(tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    """Yields the token ids of documents endlessly."""
    documents = corpus.documents(seed)
    while batch := list(itertools.islice(documents, 500)):
        yield from (one.ids for one in tokenizer.encode_batch(batch))


def mistakes(model: DemoModel, tokenizer: Tokenizer) -> dict[str, int]:
    """Returns the number of wrong answers, by kind. Every token of an answer must be the most likely one."""
    numbers = range(CORRECT_SUMS_UP_TO)
    sums = [(a, b) for a in numbers for b in numbers]
    known = [(country, *fact) for country in corpus.COUNTRIES for fact in corpus.facts(country)]
    answers = {
        "sums": [_asked(corpus.sum_question(a, b), corpus.sum_answer(a, b)) for a, b in sums],
        "facts": [_asked(question, said) for _, question, said in known],
        "reasoned sums": [
            _asked(corpus.sum_question(a, b), corpus.sum_answer(a, b), corpus.sum_reasoning(a, b)) for a, b in sums[::5]
        ],
        "reasoned facts": [_asked(question, said, corpus.fact_reasoning(one)) for one, question, said in known],
        "tools": corpus.determined_answers(seed=3, chats=250),
    }
    return {kind: wrong_answers(model, tokenizer, pairs) for kind, pairs in answers.items()}


def _asked(question: str, said: str, reasoning: str | None = None) -> tuple[str, str]:
    """Returns the prompt of a question, and the answer expected from the model."""
    messages = [{"role": "user", "content": question}]
    prompt = chats.render(messages, thinks=reasoning is not None)
    return prompt, chats.render([*messages, answer(said, reasoning)]).removeprefix(prompt)


@torch.inference_mode()
def wrong_answers(model: DemoModel, tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> int:
    wrong = 0
    pairs = sorted(pairs, key=lambda pair: sum(map(len, pair)))
    for batch in (pairs[start : start + 50] for start in range(0, len(pairs), 50)):
        prompts = [len(tokenizer.encode(prompt).ids) for prompt, _ in batch]
        rows = [tokenizer.encode(prompt + said).ids for prompt, said in batch]
        longest = max(map(len, rows))
        likeliest = model(torch.tensor([row + [0] * (longest - len(row)) for row in rows])).argmax(-1).tolist()
        wrong += sum(
            row[start:] != guess[start - 1 : len(row) - 1]
            for row, guess, start in zip(rows, likeliest, prompts, strict=True)
        )
    return wrong


def train(model: DemoModel, tokenizer: Tokenizer, steps: int, peak: float, seed: int) -> Iterator[str]:
    """Trains with warm-up and cosine decay; periodically yields a line of progress.

    Every sixth step has long rows. With long rows only at the end, sums got worse: little of the learning rate was left
    for the far positions. The layers' matrices are trained with Muon, which needs fewer steps than AdamW. Two threads
    each compute the gradients of half a batch; operations this small gain nothing from threads themselves."""
    documents = encoded_documents(tokenizer, seed)
    matrices = [p for p in model.layers.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if all(p is not one for one in matrices)]
    optimizers = (
        torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, weight_decay=0.0, betas=(0.9, 0.98)),
    )
    began = time.monotonic()
    with ThreadPoolExecutor(2, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for step in range(steps):
            rate = peak * min(1.0, (step + 1) / 60) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
            rows = rows_of(documents, *(LONG_ROWS if step % 6 == 5 else SHORT_ROWS))
            loss = compute_gradients(model, rows, pool)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
            if step % 20 == 19:
                print(f"step {step + 1} loss {loss:.3f} {time.monotonic() - began:.0f} s", flush=True)
            if step % 300 == 299 or step == steps - 1:
                yield f"step {step + 1} wrong {mistakes(model, tokenizer)}"


def compute_gradients(model: DemoModel, rows: Rows, pool: ThreadPoolExecutor) -> float:
    """Sets the gradients of all parameters; returns the loss."""
    parameters = list(model.parameters())
    count = rows.is_learned[:, 1:].sum()

    def half(token_ids: torch.Tensor, is_learned: torch.Tensor) -> tuple[float, tuple[torch.Tensor, ...]]:
        logits = model(token_ids[:, :-1], is_learned[:, 1:])
        loss = functional.cross_entropy(logits, token_ids[:, 1:][is_learned[:, 1:]], reduction="sum") / count
        return loss.item(), torch.autograd.grad(loss, parameters)

    (one, left), (other, right) = pool.map(half, rows.token_ids.chunk(2), rows.is_learned.chunk(2))
    for parameter, a, b in zip(parameters, left, right, strict=True):
        parameter.grad = a + b
    return one + other


@torch.no_grad()
def rounded(model: DemoModel) -> DemoModel:
    """Returns a copy whose weights are exact in F16."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.copy_(parameter.half().float())
    return copied


def tensors(model: DemoModel) -> list[tuple[str, torch.Tensor]]:
    """Returns every weight under llama.cpp's name for it. The embedding is also the output projection."""
    named = [("token_embd.weight", model.embedding.weight), ("output_norm.weight", model.norm.weight)]
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        parts = {
            "attn_norm": layer.attn_norm, "attn_q": layer.q, "attn_k": layer.k, "attn_v": layer.v,
            "attn_output": layer.o, "ffn_norm": layer.ffn_norm, "ffn_gate": layer.gate,
            "ffn_up": layer.up, "ffn_down": layer.down,
        }  # fmt: skip
        named += [(f"blk.{number}.{part}.weight", module.weight) for part, module in parts.items()]
    return named


@torch.no_grad()
def begin_with(model: DemoModel, tokenizer: Tokenizer, path: Path) -> None:
    """Initialises the weights from an earlier model. Tokens that it did not know start as the mean of their parts."""
    reader = gguf.GGUFReader(path)
    arrays = {tensor.name: torch.tensor(tensor.data.astype(np.float32)) for tensor in reader.tensors}
    for name, tensor in tensors(model)[1:]:
        tensor.copy_(arrays[name])
    known = {text: number for number, text in enumerate(reader.fields["tokenizer.ggml.tokens"].contents())}
    for text, number in tokenizer.get_vocab().items():
        parts = [text] if text in known else list(text) if number >= len(chats.SPECIAL_TOKENS) else []
        if parts:
            model.embedding.weight[number] = arrays["token_embd.weight"][[known[part] for part in parts]].mean(0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model and write it as GGUF.")
    parser.add_argument("--steps", type=int, default=3_600)
    parser.add_argument("--peak", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=2, help="of the training data")
    parser.add_argument("--begin", type=Path, help="an earlier model to continue from")
    parser.add_argument("--out", type=Path, default=MODEL_PATH)
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer, model = train_tokenizer(), DemoModel()
    if options.begin is not None:
        begin_with(model, tokenizer, options.begin)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    for line in train(model, tokenizer, options.steps, options.peak, options.seed):
        arrays = {name: tensor.detach().numpy() for name, tensor in tensors(rounded(model))}
        export_gguf.write(options.out, SIZES, tokenizer, arrays)
        print(line, flush=True)
    print(f"rounded to F16: wrong {mistakes(rounded(model), tokenizer)}")
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
