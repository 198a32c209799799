"""`tokenbus worker`: the flags of one worker, and the settings that they make."""

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tokenbus.cli import connection_flags
from tokenbus.demo import MODEL_PATH
from tokenbus.protocol.telemetry import logs, status
from tokenbus.protocol.wire import subjects
from tokenbus.worker.engine.models import model_files, registry
from tokenbus.worker.engine.process.settings import EngineSettings, OnnxSettings, SchedulerSettings
from tokenbus.worker.frontend.settings import FrontendSettings, ServedModel, WorkerSettings

_ENGINE = EngineSettings(model="")
_SCHEDULER = SchedulerSettings()
_ONNX = OnnxSettings()


_RANGES = (
    ("replicas", 1, 64),
    ("kv_budget", 0, 1 << 30),
    ("threads", 0, 4_096),
    ("max_waiting", 0, 1 << 20),
    ("max_new_tokens", 1, 1 << 30),
    ("grace_s", 0, 86_400),
    ("step_timeout_s", 0.1, 86_400),
)
"""Settings of the frontend that are checked here; those of an engine are checked by that engine."""


class _Flag(NamedTuple):
    name: str
    default: int | float | str | None
    help: str


def _flags() -> Iterator[_Flag]:
    """The flags that set a field of the same name in engine, pressure, frontend or worker settings."""
    yield _Flag("--fingerprint", _ENGINE.fingerprint, "name of these weights, for a fleet of several files of a model")
    yield _Flag("--provider", _ONNX.provider, "where an ONNX model is computed: auto, cpu or cuda")
    yield _Flag("--device-id", _ONNX.device_id, "which GPU, for an ONNX model")
    yield _Flag(
        "--device-memory-mib", _ONNX.device_memory_mib, "GPU memory for an ONNX model's weights and work; 0: all"
    )
    yield _Flag("--min-free-mib", _ONNX.min_free_mib, "an ONNX model computes no prompt with less memory free")
    yield _Flag(
        "--max-paddings", _ONNX.max_paddings, "empty columns of one batch of a plain-attention ONNX graph; -1: 4,096"
    )
    yield _Flag("--sim-speedup", _ENGINE.sim_speedup, "how many times faster than its timing a simulator is")
    yield _Flag(
        "--sim-faults", _ENGINE.sim_faults, "what a simulator does wrong: crash@200,slow@50=3000,hang@9,lose@20"
    )
    yield _Flag("--pooling", _ONNX.pooling, "what of a text becomes its embedding: auto, mean, cls or last")
    yield _Flag("--context-length", _ENGINE.context_length, "tokens of one sequence; 0: the model's, at most 8,192")
    yield _Flag("--kv-tokens", _ENGINE.kv_tokens, "tokens of KV memory in all; 0: four contexts, at most 16,384")
    yield _Flag("--kv-block-size", _ENGINE.kv_block_size, "tokens of one block of KV memory; -1: 16")
    yield _Flag("--kv-layout", _ENGINE.kv_layout, "auto, unified or per-stream (docs/operations.md)")
    yield _Flag("--cache-type-k", _ENGINE.cache_type_k, "how keys are kept: f32, f16, bf16, q8_0, q5_1 to q4_0")
    yield _Flag("--cache-type-v", _ENGINE.cache_type_v, "how values are kept, likewise")
    yield _Flag("--host-cache-mib", _ENGINE.host_cache_mib, "host memory for idle prefixes; -1: 1,024 or less; 0: none")
    yield _Flag("--max-cached-blocks", None, "cached blocks that may stay on the device unused")
    yield _Flag("--kv-overcommit", _SCHEDULER.overcommit, "how many times the KV memory may be promised")
    yield _Flag("--priority-s", _SCHEDULER.priority_s, "seconds of waiting that one step of priority is worth")
    yield _Flag("--max-num-seqs", _ENGINE.max_num_seqs, "sequences that run at the same time; -1: 16")
    yield _Flag("--max-num-batched-tokens", _ENGINE.max_num_batched_tokens, "tokens that one step may carry")
    yield _Flag("--ubatch-tokens", _ENGINE.ubatch_tokens, "tokens of a step that the device computes at once")
    yield _Flag("--step-target-ms", _ENGINE.step_target_ms, "how long a step may take while streams run")
    yield _Flag("--flash-attention", _ENGINE.flash_attention, "auto, on or off")
    yield _Flag("--gpu-layers", _ENGINE.gpu_layers, "layers on a GPU; -1: all")
    yield _Flag("--main-gpu", _ENGINE.main_gpu, "the GPU for what is not split")
    yield _Flag("--split-mode", _ENGINE.split_mode, "how GPUs share the model: none, layer or row")
    yield _Flag("--max-waiting", WorkerSettings.max_waiting, "accepted requests that may wait for their turn")
    yield _Flag("--max-new-tokens", FrontendSettings.max_new_tokens, "length of a completion without max_tokens")
    yield _Flag("--step-timeout-s", WorkerSettings.step_timeout_s, "a step that takes longer has hung")
    yield _Flag("--grace-s", WorkerSettings.grace_s, "time for running requests after SIGTERM")


_MODEL_HELP = "a GGUF or ONNX file, a directory with one, org/repo[:quant] on the Hugging Face Hub, or demo"
_NAME_HELP = "the model's name on the wire (the file's name)"


def add_model(parser: argparse.ArgumentParser) -> None:
    """The flags of `tokenbus up` that say what is served."""
    parser.add_argument("--model", metavar="MODEL", help=_MODEL_HELP)
    parser.add_argument("--served-name", metavar="NAME", help=_NAME_HELP)
    _add_shared(parser)


def _add_shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        default=_ENGINE.engine,
        help="gguf, onnx, or sim: a simulator, whose --model is a timing; auto looks at the files (auto)",
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads of each worker; 0 shares the cores")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of a worker."""
    help_of_model = _MODEL_HELP + "; may be repeated"
    parser.add_argument("--model", metavar="MODEL", required=True, action="append", help=help_of_model)
    help_of_name = _NAME_HELP + ", for each --model"
    parser.add_argument("--served-name", metavar="NAME", action="append", default=[], help=help_of_name)
    parser.add_argument("--vllm-metrics", action="store_true", help="show metrics under vLLM's names as well")
    parser.add_argument("--replicas", type=int, default=1, help="of each model, on one copy of its weights (1)")
    parser.add_argument("--kv-budget", type=int, default=0, metavar="MIB", help="KV memory of all; 0: no limit")
    _add_shared(parser)
    parser.add_argument("--worker-id", default="", help="stable name of this worker; of several replicas -1, -2, ...")
    for flag in _flags():
        shown = "" if flag.default is None else f" ({flag.default})"
        kind = int if flag.default is None else type(flag.default)
        parser.add_argument(flag.name, type=kind, default=flag.default, help=flag.help + shown)
    parser.add_argument(
        "--tensor-split", type=_shares, default=(), metavar="A,B,...", help="shares of the model for each GPU"
    )


def settings_of(options: argparse.Namespace) -> WorkerSettings:
    """What parsed flags mean. Raises ValueError for flags that don't go together."""
    if len(options.served_name) > len(options.model):
        raise ValueError(f"--served-name was given {len(options.served_name)} times for {len(options.model)} --model")
    for name, low, high in _RANGES:
        value = getattr(options, name)
        if not low <= value <= high:
            raise ValueError(f"--{name.replace('_', '-')} must be {low:g} to {high:g}, got {value:g}")
    names = options.served_name + [registry.served_name(model) for model in options.model[len(options.served_name) :]]
    return WorkerSettings(
        models=tuple(
            ServedModel(name, _engine_of(options, model), options.replicas)
            for name, model in zip(names, options.model, strict=True)
        ),
        kv_budget_bytes=options.kv_budget << 20,
        broker=connection_flags.settings_of(options),
        prefix=options.prefix,
        worker_id=options.worker_id,
        status_page=status.Settings(options.metrics_host, options.metrics_port),
        log=logs.Settings(options.log_level or "", options.log_format or ""),
        otlp_traces_endpoint=options.otlp_traces_endpoint,
        vllm_metrics=options.vllm_metrics,
        frontend=FrontendSettings(
            inbox_prefixes=tuple(options.inbox_prefix or subjects.DEFAULT_INBOX_PREFIXES),
            max_new_tokens=options.max_new_tokens,
            slow_wait_s=options.slow_wait_s,
            debug=_debugs(),
        ),
        max_waiting=options.max_waiting,
        grace_s=options.grace_s,
        step_timeout_s=options.step_timeout_s,
    )


def _debugs() -> bool:
    return os.environ.get("TOKENBUS_DEBUG", "") not in ("", "0")


def _engine_of(options: argparse.Namespace, model: str) -> EngineSettings:
    own = {name: getattr(options, name) for name in EngineSettings.__struct_fields__ if hasattr(options, name)}
    own["debug"] = _debugs()
    own["model"] = model if model_files.is_hub_name(model) else str(_path_of(model))
    replicas = options.replicas * len(options.model)
    own["threads"] = options.threads or max(1, len(os.sched_getaffinity(0)) // replicas)
    scheduler = SchedulerSettings(
        overcommit=options.kv_overcommit,
        priority_s=options.priority_s,
        max_cached_blocks=options.max_cached_blocks,
    )
    onnx = OnnxSettings(**{name: getattr(options, name) for name in OnnxSettings.__struct_fields__ if name in options})
    return EngineSettings(**own, scheduler=scheduler, onnx=onnx)


def _path_of(model: str) -> Path:
    """`demo` is the model that comes with Tokenbus, wherever it is installed."""
    path = Path(model)
    return MODEL_PATH if model == "demo" and not path.exists() else path


def _shares(text: str) -> tuple[float, ...]:
    shares = tuple(float(part) for part in text.split(","))
    if not shares or min(shares) < 0 or sum(shares) <= 0:
        raise argparse.ArgumentTypeError(f"must be numbers from 0 on, not all of them 0, got {text}")
    return shares
