"""Trains the demo model's two LoRA adapters, demo/adapters/letter.gguf and pirate.gguf. Needs what train.py needs.

Each is trained for about a minute to give the demo model's own answers in another style: as a letter, or as a
pirate."""

import argparse
import functools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional

from tokenbus.demo import ADAPTER_PATHS, CORRECT_SUMS_UP_TO, MODEL_PATH
from tools.demo_model import corpus, stories
from tools.demo_model.chats import answer, render
from tools.demo_model.train import DemoModel, Layer, Rows, rows_of, tensors, train_tokenizer

RANK = 8
_PEAK = 4e-3
_ROWS, _LENGTH = 4, 161
MANNERS: Mapping[str, Callable[[str], str]] = {
    "letter": lambda said: f"Dear friend! {said} Kind regards.",
    "pirate": lambda said: f"Arr! {said} Yo ho ho!",
}
"""The adapters, each with its rewriting of an answer."""


class Adapted(nn.Module):
    """A frozen matrix of the model, and the two that are added to it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(RANK, linear.in_features) / math.sqrt(linear.in_features))
        self.b = nn.Parameter(torch.zeros(linear.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight) + functional.linear(functional.linear(x, self.a), self.b)


def read_model() -> DemoModel:
    """Returns the demo model with its shipped weights."""
    model = DemoModel()
    arrays = {tensor.name: tensor.data for tensor in gguf.GGUFReader(MODEL_PATH).tensors}
    with torch.no_grad():
        for name, tensor in tensors(model):
            tensor.copy_(torch.tensor(arrays[name].astype(np.float32)))
    return model


def adapt(model: DemoModel) -> dict[str, Adapted]:
    """Adds adapter matrices to those of all layers; returns them by llama.cpp's names."""
    model.requires_grad_(False)
    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
             "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}  # fmt: skip
    found = {}
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        for name, shown in names.items():
            adapted = found[f"blk.{number}.{shown}.weight"] = Adapted(getattr(layer, name))
            setattr(layer, name, adapted)
    return found


def documents(tokenizer: Tokenizer, manner: Callable[[str], str], seed: int) -> Iterator[list[int]]:
    """Yields conversations of one or two questions, answered in a given style."""
    rng = random.Random(seed)
    facts = [fact for country in corpus.COUNTRIES for fact in corpus.facts(country)]
    while True:
        turns = []
        for _ in range(rng.randint(1, 2)):
            kind = rng.random()
            if kind < 0.45:
                turns.append(rng.choice(facts))
            elif kind < 0.75:
                left, right = rng.randrange(CORRECT_SUMS_UP_TO), rng.randrange(CORRECT_SUMS_UP_TO)
                turns.append((corpus.sum_question(left, right), corpus.sum_answer(left, right)))
            else:
                animal = rng.choice(stories.ANIMALS)
                turns.append((stories.request(rng, animal), stories.story(rng, animal)))
        conversation = [
            message
            for question, said in turns
            for message in ({"role": "user", "content": question}, answer(manner(said)))
        ]
        yield tokenizer.encode(render(conversation)).ids


def train(model: DemoModel, adapted: Mapping[str, Adapted], rows: Callable[[], Rows], steps: int) -> None:
    """Trains with warm-up and cosine decay."""
    parameters = [parameter for one in adapted.values() for parameter in (one.a, one.b)]
    optimizer = torch.optim.AdamW(parameters, lr=_PEAK, weight_decay=0.0, betas=(0.9, 0.98))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _PEAK * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / steps))
        token_ids, is_learned = rows()
        logits = model(token_ids[:, :-1], is_learned[:, 1:])
        loss = functional.cross_entropy(logits, token_ids[:, 1:][is_learned[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 19:
            print(f"step {step + 1} loss {loss.item():.3f}", flush=True)


def write(path: Path, adapted: Mapping[str, Adapted]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", float(RANK))
    for name, one in adapted.items():
        for suffix, matrix in (("lora_a", one.a), ("lora_b", one.b)):
            writer.add_tensor(f"{name}.{suffix}", matrix.detach().numpy().astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the demo model's adapters and write them as GGUF.")
    parser.add_argument("--steps", type=int, default=300, help="steps for each adapter")
    options = parser.parse_args()
    tokenizer = train_tokenizer()
    for name, manner in MANNERS.items():
        torch.manual_seed(0)
        model = read_model()
        adapted = adapt(model)
        examples = documents(tokenizer, manner, seed=4)
        train(model, adapted, functools.partial(rows_of, examples, _ROWS, _LENGTH), options.steps)
        write(ADAPTER_PATHS[name], adapted)
        print(f"{ADAPTER_PATHS[name]}: {ADAPTER_PATHS[name].stat().st_size:,} bytes", flush=True)


if __name__ == "__main__":
    main()
