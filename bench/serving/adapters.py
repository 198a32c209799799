"""Four streams with two LoRA adapters, against two bare `llama_decode` calls of two rows each.

`python -m bench.serving.adapters [--model FILE --preset SHAPE]` alternates both in short rounds, so that other load on
the machine slows both alike. The engine runs in its own process and the streams go through its client: besides
llama.cpp, this measures scheduling, sampling and the path from the engine to a frontend."""

import asyncio
import ctypes
import tempfile
import time
from pathlib import Path

from llama_cpp import llama_cpp as llama

from bench import flags
from bench.baselines.bare_llama import PROMPT, BareLlama
from bench.models import benchmark_model, random_adapter
from bench.models.shape import PRESETS
from bench.paired import quartiles
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.contract import engine_output, engine_request
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine_client.client import EngineClient
from tokenbus.worker.engine_client.engine_process import EngineProcess

_STREAMS = 4
_CONTEXT = 2_048


class BareAdapters(BareLlama):
    """A bare loop of two decodes a step, each of two rows and with an adapter of its own."""

    def __init__(self, path: str, threads: int, adapters: list[Path]) -> None:
        super().__init__(path, threads, _CONTEXT)
        self._adapters = [llama.llama_adapter_lora_init(self._model, str(one).encode()) for one in adapters]

    def decode_pairs(self, tokens: int) -> float:
        """Returns the seconds that this many steps take."""
        llama.llama_memory_clear(self._memory, True)
        best: dict[int, list[int]] = {}
        for number in (0, 1):
            streams = (2 * number, 2 * number + 1)
            self._use(number)
            self._fill([(token, at, stream) for stream in streams for at, token in enumerate(PROMPT)], len(PROMPT))
            best[number] = self._step(2)
        began = time.perf_counter()
        for at in range(len(PROMPT), len(PROMPT) + tokens):
            for number in (0, 1):
                self._use(number)
                self._fill([(token, at, 2 * number + row) for row, token in enumerate(best[number])], 1)
                best[number] = self._step(2)
        return time.perf_counter() - began

    def _use(self, number: int) -> None:
        one = (llama.llama_adapter_lora_p_ctypes * 1)(self._adapters[number])
        if llama.llama_set_adapters_lora(self._context, one, 1, (ctypes.c_float * 1)(1.0)) != 0:
            raise RuntimeError("llama_set_adapters_lora failed")


class Streams:
    """Four streams of one engine, two with each adapter."""

    def __init__(self, engine: EngineClient, digests: list[str]) -> None:
        self._engine = engine
        self._digests = digests
        self._number = 0

    async def decode(self, tokens: int) -> float:
        """Returns the tokens per second of all streams, from the first token of the last one to the last token of the
        first one."""
        arrived: list[list[float]] = [[] for _ in range(_STREAMS)]
        ended = asyncio.Semaphore(0)

        def start(stream: int) -> None:
            def take(output: engine_output.Output) -> None:
                arrived[stream] += [time.perf_counter()] * len(output.token_ids)
                if output.finish_reason is not None:
                    ended.release()

            self._number += 1
            request = engine_request.EngineRequest(
                key=f"default:r{self._number}",
                token_ids=list(PROMPT),
                sampling=engine_request.Sampling(max_tokens=tokens + 4, ignore_eos=True),
                cache_prompt=False,
                adapters=(Adapter(self._digests[stream // 2], 1.0),),
            )
            self._engine.generate(request, take)

        for stream in range(_STREAMS):
            start(stream)
        for _ in range(_STREAMS):
            await ended.acquire()
        began, over = max(times[0] for times in arrived), min(times[-1] for times in arrived)
        return sum(began < at <= over for times in arrived for at in times) / (over - began)


async def measure(model: Path, adapters: list[Path], threads: int, rounds: int, tokens: int) -> None:
    settings = EngineSettings(
        model=str(model), engine="gguf", threads=threads, context_length=_CONTEXT // _STREAMS, kv_tokens=_CONTEXT
    )
    process = EngineProcess()
    engine = EngineClient(lambda: process.open(settings), max_waiting=64)
    await engine.start("bench")
    streams = Streams(engine, [await engine.load_adapter(str(path)) for path in adapters])
    bare = BareAdapters(str(model), threads, adapters)
    shares = []
    for number in range(rounds + 1):
        before = _STREAMS * tokens / bare.decode_pairs(tokens)
        ours = await streams.decode(tokens)
        after = _STREAMS * tokens / bare.decode_pairs(tokens)
        if number:  # the first round warms up
            shares.append(2 * ours / (before + after))
            print(f"bare {before:.2f} and {after:.2f}, engine {ours:.2f} tokens/s: {shares[-1]:.2f}", flush=True)
    print(f"engine / bare: {quartiles(shares)} over {rounds} rounds")
    await engine.cleanup()


def main() -> None:
    parser = flags.model_parser(__doc__, threads=1, rounds=8, tokens=24)
    parser.add_argument("--preset", choices=PRESETS, default="0.5b", help="the shape of the model (%(default)s)")
    options = parser.parse_args()
    shapes = random_adapter.shapes_of(PRESETS[options.preset])
    with benchmark_model.model(options.model) as model, tempfile.TemporaryDirectory() as folder:
        adapters = [random_adapter.write(Path(folder) / f"{seed}.gguf", seed, shapes) for seed in (1, 2)]
        asyncio.run(measure(model, adapters, options.threads, options.rounds, options.tokens))


if __name__ == "__main__":
    main()
