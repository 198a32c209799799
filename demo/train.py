"""Trains the demo model and writes demo/demo.gguf. Needs torch, tokenizers and gguf: `make demo-model`.

A llama of 0.9 million parameters learns the text of demo/corpus.py in about a quarter of an hour on two cores.
The weights are rounded to values exact in F16 before they are judged and exported, so that every engine computes
from the same numbers.
"""

import argparse
import itertools
import json
import math
import time
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional

from tokenbus.demo import CORRECT_SUMS_UP_TO, MODEL_PATH, corpus

VOCAB, LAYERS, WIDTH, FEED_FORWARD, HEADS, KV_HEADS = 512, 4, 128, 384, 4, 2
HEAD = WIDTH // HEADS
CONTEXT = 2048
ROPE_BASE = 10_000.0
NORM_EPSILON = 1e-5


def train_tokenizer() -> Tokenizer:
    """Trains byte-level BPE over single digits. The special tokens of chats come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(corpus.PRE_TOKENIZER_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(corpus.SPECIAL_TOKENS),
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
    """Applies rotary positions to neighbouring pairs, as llama.cpp does for this architecture."""
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

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(token_ids)
        length = token_ids.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:, :length], self.sin[:, :length])
        return functional.linear(self.norm(x), self.embedding.weight)


def token_stream(tokenizer: Tokenizer, seed: int, count: int) -> torch.Tensor:
    """Returns `count` token ids of consecutive documents."""
    ids: list[int] = []
    for document in corpus.documents(seed):
        ids.extend(tokenizer.encode(document).ids)
        if len(ids) >= count:
            return torch.tensor(ids[:count])
    raise AssertionError("the corpus is endless")


def mistakes(model: DemoModel, tokenizer: Tokenizer) -> tuple[int, int]:
    """Returns how many of all sums and of all facts are wrong. Every token of an answer must be the likeliest."""
    sums = [
        (corpus.sum_question(a, b), corpus.sum_answer(a, b))
        for a in range(CORRECT_SUMS_UP_TO)
        for b in range(CORRECT_SUMS_UP_TO)
    ]
    known = [pair for country in corpus.COUNTRIES for pair in corpus.facts(country)]
    return wrong_answers(model, tokenizer, sums), wrong_answers(model, tokenizer, known)


@torch.inference_mode()
def wrong_answers(model: DemoModel, tokenizer: Tokenizer, pairs: list[tuple[str, str]]) -> int:
    wrong = 0
    for batch in (pairs[start : start + 250] for start in range(0, len(pairs), 250)):
        prompts = [len(tokenizer.encode(corpus.chat([(q, "")])).ids) - 1 for q, _ in batch]
        rows = [tokenizer.encode(corpus.chat([pair])).ids for pair in batch]
        longest = max(map(len, rows))
        likeliest = model(torch.tensor([row + [0] * (longest - len(row)) for row in rows])).argmax(-1).tolist()
        wrong += sum(
            row[start:] != guess[start - 1 : len(row) - 1]
            for row, guess, start in zip(rows, likeliest, prompts, strict=True)
        )
    return wrong


def train(model: DemoModel, tokenizer: Tokenizer, steps: int, peak: float) -> None:
    """Trains by AdamW with warm-up and cosine decay; every sixth step has rows as long as half the context.

    With long rows only at the end, sums got worse: little of the learning rate was left for the far positions."""
    shapes = [(5, 1024) if step % 6 == 5 else (32, 160) for step in range(steps)]
    data = token_stream(tokenizer, seed=2, count=sum(rows * (length + 1) for rows, length in shapes))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.98)
    )
    position, began = 0, time.monotonic()
    for step, (rows, length) in enumerate(shapes):
        rate = peak * min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = data[position : position + rows * (length + 1)].view(rows, length + 1)
        position += batch.numel()
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 199 or step == steps - 1:
            sums, known = mistakes(model, tokenizer)
            print(
                f"step {step + 1} loss {loss.item():.3f} wrong sums {sums} wrong facts {known} "
                f"{time.monotonic() - began:.0f} s",
                flush=True,
            )


def round_to_f16(model: DemoModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())


def export(model: DemoModel, tokenizer: Tokenizer, path: Path) -> None:
    """Writes weights (matrices F16, norms F32), vocabulary, merges and chat template as one GGUF file."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Tokenbus demo")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(NORM_EPSILON)
    writer.add_rope_dimension_count(HEAD)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_vocab_size(VOCAB)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    add_vocabulary(writer, tokenizer)
    for name, tensor in tensors(model):
        array = tensor.detach().numpy()
        writer.add_tensor(name, array.astype(np.float16) if array.ndim > 1 else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_vocabulary(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    special = len(corpus.SPECIAL_TOKENS)
    model = tokenizer.model
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(corpus.PRE_TOKENIZER)
    writer.add_token_list([text for text, _ in vocabulary])
    writer.add_token_types([gguf.TokenType.CONTROL] * special + [gguf.TokenType.NORMAL] * (len(vocabulary) - special))
    writer.add_token_merges(merges_of(model))
    writer.add_bos_token_id(corpus.SPECIAL_TOKENS.index(corpus.BOS))
    writer.add_eos_token_id(corpus.SPECIAL_TOKENS.index(corpus.END))
    writer.add_add_bos_token(True)
    writer.add_chat_template(corpus.CHAT_TEMPLATE)


def merges_of(model: models.BPE) -> list[str]:
    state = json.loads(model.__getstate__())
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in state["merges"]]


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model and write it as GGUF.")
    parser.add_argument("--steps", type=int, default=3_600)
    parser.add_argument("--peak", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--out", type=Path, default=MODEL_PATH)
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer, model = train_tokenizer(), DemoModel()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    train(model, tokenizer, options.steps, options.peak)
    round_to_f16(model)
    sums, known = mistakes(model, tokenizer)
    print(f"rounded to F16: {sums} wrong sums, {known} wrong facts")
    export(model, tokenizer, options.out)
    print(f"{options.out}: {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
