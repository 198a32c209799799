"""Shows on what the logits of a token depend: by how much its log probabilities differ from a reference.

Run: .venv/bin/python -m bench.serving.equal_bytes MODEL.gguf [--types q4_0,q8_0] [--threads 1,2]
    [--attention on/f16/f16,on/f16/bf16] [--prices]

It uses llama.cpp alone. The reference computes a text token by token in a fresh context with the same weights, flash
attention and threads. For other ways to compute the same tokens, the table has the largest difference of the log
probability of any token of the vocabulary at any position; 0 means that all logits have the same bytes. `--types`
converts the weights before. The ways:

    threads=1  token by token, on the first number of `--threads`
    layout     token by token, with weights that are not repacked
    2 to 512   the whole text in steps of so many tokens
    copied     token by token, after a copy (`seq_cp`) of the reference's keys and values
    beside 7   the same, with one token of each of seven other sequences in every step
    beside 63  the same, with 63 tokens of another sequence in every step
    moved      token by token, in cells that begin after 300 of another sequence
    reversed   token by token, where later tokens lie in earlier cells

`--attention` takes flash attention (on or off) and the types of keys and values. With `--prices` it measures the CPU
time of a prompt of 1,024 tokens in steps of at most 32 or 63, and with values in BF16, in interleaved pairs with steps
of 512 and values in F16."""

import ctypes
import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_cpp as llama

from bench import flags, paired

ROWS = (2, 4, 8, 32, 63, 64, 512)
_TEXT = Path(__file__).parents[2] / "docs" / "guarantees.md"
_COMPARED = 264
"""The positions that are compared. From the 257th on, llama.cpp's attention has 512 cells, and may divide a row."""
_TAIL = 8
"""The last of them, computed again where keys and values come from the reference."""
_CELLS = 2_048
_OTHERS = 7
_FLASH = {"off": 0, "on": 1}
_CACHE_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "bf16": 30}
_FILE_TYPES = {
    "f32": llama.LLAMA_FTYPE_ALL_F32,
    "f16": llama.LLAMA_FTYPE_MOSTLY_F16,
    "bf16": llama.LLAMA_FTYPE_MOSTLY_BF16,
    "q8_0": llama.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_1": llama.LLAMA_FTYPE_MOSTLY_Q4_1,
    "q4_k_m": llama.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "iq4_nl": llama.LLAMA_FTYPE_MOSTLY_IQ4_NL,
}
_logged: list[bytes] = []
_log_callback = llama.llama_log_callback(lambda level, text, data: _logged.append(text))

Logits = npt.NDArray[np.float32]


class Entry(NamedTuple):
    """A token of a step."""

    token: int
    position: int
    sequence: int = 0


class Model:
    """A loaded model; `repacked` says whether its weights may be laid out for this processor."""

    def __init__(self, path: Path, *, repacked: bool) -> None:
        params = llama.llama_model_default_params()
        params.use_extra_bufts = repacked
        _logged.clear()
        self.handle = llama.llama_model_load_from_file(str(path).encode(), params)
        if not self.handle:
            raise SystemExit(f"llama.cpp can't load {path}")
        self.has_repacked = any(b"CPU_REPACK model buffer" in line for line in _logged)
        self.vocab = llama.llama_model_get_vocab(self.handle)

    def token_ids(self, text: bytes) -> list[int]:
        ids = (llama.llama_token * len(text))()
        count = llama.llama_tokenize(self.vocab, text, len(text), ids, len(text), True, False)
        return list(ids[:count])

    def close(self) -> None:
        llama.llama_model_free(self.handle)


class Attention(NamedTuple):
    """How attention is computed."""

    flash: str = "on"
    keys: str = "f16"
    values: str = "f16"

    def __str__(self) -> str:
        return "/".join(self)


class Context:
    """A context with one KV memory for all sequences, as workers have."""

    def __init__(self, model: Model, threads: int, attention: Attention, ubatch: int = 512) -> None:
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = _CELLS, 512, ubatch
        params.n_seq_max, params.n_outputs_max = _OTHERS + 2, 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = _FLASH[attention.flash]
        params.type_k, params.type_v = _CACHE_TYPES[attention.keys], _CACHE_TYPES[attention.values]
        params.kv_unified, params.no_perf = True, True
        self.handle = llama.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise SystemExit(f"llama.cpp makes no context with {attention}")
        self.memory = llama.llama_get_memory(self.handle)
        self._width = llama.llama_vocab_n_tokens(model.vocab)
        self._batch = llama.llama_batch_init(512, 0, 1)

    def step(self, entries: list[Entry], *, rows: bool = True) -> Logits:
        """Computes entries together; returns the logits of those of sequence 0."""
        batch = self._batch
        for place, (token, position, sequence) in enumerate(entries):
            batch.token[place], batch.pos[place] = token, position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
            batch.logits[place] = rows and sequence == 0
        batch.n_tokens = len(entries)
        if llama.llama_decode(self.handle, batch) != 0:
            raise RuntimeError("llama_decode failed")
        count = sum(one.sequence == 0 for one in entries) if rows else 0
        if not count:
            return np.empty((0, self._width), np.float32)
        return np.ctypeslib.as_array(llama.llama_get_logits(self.handle), (count, self._width)).copy()

    def save(self) -> bytes:
        size = llama.llama_state_seq_get_size(self.handle, 0)
        saved = (ctypes.c_uint8 * size)()
        llama.llama_state_seq_get_data(self.handle, saved, size, 0)
        return bytes(saved)

    def restore(self, saved: bytes, sequence: int = 0) -> None:
        data = (ctypes.c_uint8 * len(saved)).from_buffer_copy(saved)
        if not llama.llama_state_seq_set_data(self.handle, data, len(saved), sequence):
            raise RuntimeError("the keys and values were not restored")

    def close(self) -> None:
        llama.llama_batch_free(self._batch)
        llama.llama_free(self.handle)


@contextmanager
def opened(model: Model, threads: int, attention: Attention) -> Iterator[Context]:
    context = Context(model, threads, attention)
    try:
        yield context
    finally:
        context.close()


class Reference(NamedTuple):
    """The logits of a text computed token by token, and its keys and values before the tail."""

    token_ids: list[int]
    logits: Logits
    saved: bytes

    def difference(self, logits: Logits, first: int = 0) -> float:
        """Returns the largest difference of log probabilities; `first` is the position of the first row."""
        own = self.logits[first : first + len(logits)]
        logits = logits[: len(own)]
        if own.tobytes() == logits.tobytes():
            return 0.0
        return max(float(np.abs(_scores(one) - _scores(other)).max()) for one, other in zip(own, logits, strict=True))

    def tail(self) -> list[Entry]:
        return [Entry(self.token_ids[place], place) for place in range(_COMPARED - _TAIL, _COMPARED)]


def _scores(row: Logits) -> npt.NDArray[np.float64]:
    row = row.astype(np.float64) - row.max()
    scores: npt.NDArray[np.float64] = row - np.log(np.exp(row).sum())
    return scores


def refer(model: Model, token_ids: list[int], threads: int, attention: Attention) -> Reference:
    rows, saved = [], b""
    with opened(model, threads, attention) as context:
        for place in range(_COMPARED):
            if place == _COMPARED - _TAIL:
                saved = context.save()
            rows.append(context.step([Entry(token_ids[place], place)]))
    return Reference(token_ids, np.concatenate(rows), saved)


def _in_steps(reference: Reference, context: Context, size: int) -> float:
    ids = reference.token_ids
    starts = range(0, _COMPARED, size)  # the last step may go beyond what is compared
    rows = [context.step([Entry(ids[at], at) for at in range(start, start + size)]) for start in starts]
    return reference.difference(np.concatenate(rows))


def _by_token(reference: Reference, context: Context) -> float:
    rows = [context.step([one]) for one in reference.tail()]
    return reference.difference(np.concatenate(rows), _COMPARED - _TAIL)


def _copied(reference: Reference, context: Context) -> float:
    context.restore(reference.saved, 1)
    llama.llama_memory_seq_cp(context.memory, 1, 0, -1, -1)
    return _by_token(reference, context)


def _beside(reference: Reference, context: Context, sequences: int, rows: int) -> float:
    context.restore(reference.saved)
    found = []
    for step, one in enumerate(reference.tail()):
        others = [
            Entry(reference.token_ids[(7 * number + at) % 500], at, number)
            for number in range(1, sequences + 1)
            for at in range(step * rows, (step + 1) * rows)
        ]
        found.append(context.step([*others, one]))
    return reference.difference(np.concatenate(found), _COMPARED - _TAIL)


def _moved(reference: Reference, context: Context) -> float:
    context.step([Entry(reference.token_ids[at], at, 1) for at in range(300)], rows=False)
    context.restore(reference.saved)
    return _by_token(reference, context)


def _reversed(reference: Reference, context: Context) -> float:
    context.step([Entry(reference.token_ids[at], at, 1) for at in range(_TAIL)], rows=False)
    context.restore(reference.saved)
    llama.llama_memory_seq_rm(context.memory, 1, -1, -1)
    return _by_token(reference, context)


WAYS: dict[str, Callable[[Reference, Context], float]] = {
    **{str(size): functools.partial(_in_steps, size=size) for size in ROWS},
    "copied": _copied,
    f"beside {_OTHERS}": functools.partial(_beside, sequences=_OTHERS, rows=1),
    "beside 63": functools.partial(_beside, sequences=1, rows=63),
    "moved": _moved,
    "reversed": _reversed,
}


def _line(*cells: object) -> None:
    first, *others = cells
    print(f"  {first:<20}" + "".join(f"{one!s:>10}" for one in others), flush=True)


def _number(difference: float) -> str:
    return f"{difference:.2g}" if difference else "0"


def compare(path: Path, name: str, threads: list[int], attentions: list[Attention]) -> None:
    """Prints the lines of one file: with its weights as they are, and repacked if llama.cpp does that with any."""
    plain: dict[tuple[Attention, int], Reference] = {}
    for repacked in (False, True):
        model = Model(path, repacked=repacked)
        if repacked and not model.has_repacked:
            model.close()
            continue
        token_ids = model.token_ids(_TEXT.read_bytes())[:512]
        for attention in attentions:
            first: Reference | None = None
            for count in threads:
                reference = refer(model, token_ids, count, attention)
                first = first or reference
                cells = [_number(first.difference(reference.logits))]
                cells.append(_number(plain.setdefault((attention, count), reference).difference(reference.logits)))
                for way in WAYS.values():
                    with opened(model, count, attention) as context:
                        cells.append(_number(way(reference, context)))
                _line(f"{name}{', repacked' if repacked else ''}", attention, count, *cells)
        model.close()


def price(path: Path, name: str, threads: int, pairs: int) -> None:
    """Prints what a prompt costs in short steps, and without tiles of flash attention in long ones."""
    model = Model(path, repacked=True)
    token_ids = model.token_ids(_TEXT.read_bytes())[:1_024]
    usual = Context(model, threads, Attention())
    others = {f"steps of {size}": Context(model, threads, Attention(), size) for size in (32, 63)}
    others["values in BF16"] = Context(model, threads, Attention(values="bf16"))

    def compute(context: Context) -> None:
        llama.llama_memory_clear(context.memory, False)
        for start in (0, 512):
            context.step([Entry(token_ids[at], at, 1) for at in range(start, start + 512)], rows=False)

    for what, context in others.items():
        seconds, slower, ratio = paired.compare(
            functools.partial(compute, usual), functools.partial(compute, context), pairs
        )
        print(
            f"  {name:<8}{what:<18}{512 / seconds:5.0f} to {512 / slower:5.0f} tokens a CPU second, time {ratio}",
            flush=True,
        )
        context.close()
    usual.close()
    model.close()


@contextmanager
def converted(path: Path, name: str) -> Iterator[Path]:
    """Yields a file with the weights of another one in another type."""
    with tempfile.TemporaryDirectory(prefix="tokenbus-bench-") as folder:
        made = Path(folder) / f"{name}.gguf"
        params = llama.llama_model_quantize_default_params()
        params.ftype, params.allow_requantize, params.nthread = _FILE_TYPES[name], True, 1
        if llama.llama_model_quantize(str(path).encode(), str(made).encode(), params):
            raise SystemExit(f"llama.cpp can't convert {path} to {name}")
        yield made


def main() -> None:
    parser = flags.parser(__doc__, pairs=5)
    parser.add_argument("model", metavar="MODEL.gguf", type=Path)
    parser.add_argument("--types", default="", help=f"convert to these before: {', '.join(_FILE_TYPES)}")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument(
        "--attention", default="on/f16/f16,on/f16/bf16,off/f16/f16", help="flash attention, types of keys and values"
    )
    parser.add_argument("--prices", action="store_true")
    options = parser.parse_args()
    names = [one for one in options.types.split(",") if one]
    if unknown := set(names) - _FILE_TYPES.keys():
        parser.error(f"no type {min(unknown)}; there are {', '.join(_FILE_TYPES)}")
    attentions = [Attention(*one.split("/")) for one in options.attention.split(",")]
    threads = [int(one) for one in options.threads.split(",")]
    llama.llama_log_set(_log_callback, ctypes.c_void_p(0))
    llama.llama_backend_init()
    if not options.prices:
        _line("weights", "attention", "threads", "threads=1", "layout", *WAYS)
    for name in names or [options.model.stem]:
        with converted(options.model, name) if names else nullcontext(options.model) as path:
            if options.prices:
                price(path, name, threads[0], options.pairs)
            else:
                compare(path, name, threads, attentions)


if __name__ == "__main__":
    main()
