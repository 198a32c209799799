"""Models that compute no numbers after one token, and adapters with which a model computes none at all."""

import functools
import tempfile
from pathlib import Path

import gguf
import msgspec
import numpy as np

from tests.support import adapters
from tests.support.engines import DEMO
from tests.support.models import random_model, random_stateful
from tests.support.models.shape import Shape
from tokenbus.worker.contract.engine_settings import EngineSettings

POISON = 301
"""The token after which nothing is a number: its embedding is infinite."""


@functools.cache
def gguf_model(kind: str) -> EngineSettings:
    """Returns settings for a small random model, `llama` or one of `random_stateful.KINDS`, with which a token's logits
    hardly depend on the batch that it is computed in."""
    path = Path(tempfile.mkdtemp(prefix="tokenbus-poisoned-")) / f"{kind}.gguf"
    if kind == "llama":
        random_model.write(path, Shape(4, 128, 384, 4, 2, 512, 2_048, tied=False), "f32")
    else:
        random_stateful.write(path, kind, random_stateful.TINY, tied=False)
    poison(path)
    return msgspec.structs.replace(DEMO, model=str(path), flash_attention="off", cache_type_k="f32", cache_type_v="f32")


def poison(path: Path) -> None:
    """Makes the embedding of POISON infinite in a GGUF file whose embedding is of 32 bits and not its output matrix."""
    (embedding,) = (one for one in gguf.GGUFReader(path, "r+").tensors if one.name == "token_embd.weight")
    embedding.data[POISON] = np.inf


def write_overflowing(path: Path, size: float = 3_000) -> Path:
    """Writes an adapter for the demo model whose numbers are finite and so large that what is computed with them is
    not: `size` in every twentieth place. With 3,000, that is so for keys and values of 16 bits."""
    writer, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(1)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    for name, (outputs, inputs) in adapters.DEMO_SHAPES.items():
        for suffix, sizes in (("lora_a", (4, inputs)), ("lora_b", (outputs, 4))):
            signs = np.sign(rng.normal(size=sizes))
            writer.add_tensor(f"{name}.{suffix}", np.where(rng.random(sizes) < 0.05, size * signs, 0).astype("<f4"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
