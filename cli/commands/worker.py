"""`tokenbus worker`: the flags of one worker, and the settings they make."""

import argparse
import os
import sys
from pathlib import Path

from tokenbus.cli.console import arguments, connection_flags, hub_flags, serve
from tokenbus.cli.console.supervisor import EXIT_BAD_SETTINGS
from tokenbus.demo import MODEL_PATH
from tokenbus.protocol.telemetry import logs
from tokenbus.protocol.wire import codec, messages, subjects
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings, OnnxSettings, SchedulerSettings, check_choices
from tokenbus.worker.files import model_files
from tokenbus.worker.models import registry
from tokenbus.worker.settings import adapter_settings
from tokenbus.worker.settings.adapter_settings import AdapterSettings
from tokenbus.worker.settings.settings import FrontendSettings, ModelToServe, WorkerSettings

_ENGINE = EngineSettings(model="")
_SCHEDULER = SchedulerSettings()
_ONNX = OnnxSettings()

_RANGES = (
    ("replicas", 1, 64),
    ("kv_budget", 0, 1 << 30),
    ("memory_budget_mib", 0, 1 << 30),
    ("idle_unload_s", 0, 1 << 30),
    ("threads", 0, 4_096),
    ("memory_share", 0.001, 1),
    ("max_waiting", 0, 1 << 20),
    ("max_prompt_tokens", 0, 1 << 30),
    ("max_new_tokens", 1, 1 << 30),
    ("grace_s", 0, 86_400),
    ("handover_s", 0, 86_400),
    ("step_timeout_s", 0.1, 86_400),
)
"""Allowed ranges of the frontend's settings. The engine checks its own."""

_MAX_MESSAGE_BYTES = 1_024
BUSY_MODELS = 2
"""Number of models on demand that are expected to compute at the same time: each gets its share of the cores."""

_FLAGS: tuple[tuple[str, int | float | str | None, str], ...] = (
    (
        "--fingerprint",
        _ENGINE.fingerprint,
        "name for these weights; must be the same on all workers of a model (a digest of the files)",
    ),
    ("--quantize", _ENGINE.quantize, "type to which a model in safetensors is converted: f16, q8_0, q4_k_m, ... (f16)"),
    ("--provider", _ONNX.provider, "execution provider for ONNX models: auto, cpu or cuda"),
    ("--device-id", _ONNX.device_id, "GPU number for ONNX models"),
    ("--device-memory-mib", _ONNX.device_memory_mib, "GPU memory for an ONNX model; 0: no limit"),
    ("--min-free-mib", _ONNX.min_free_mib, "memory that must be free before an ONNX model prefills a prompt"),
    ("--max-paddings", _ONNX.max_paddings, "padding columns in a batch of an MHA ONNX graph; -1: 4,096"),
    ("--sim-speedup", _ENGINE.sim_speedup, "how many times faster than its timing the simulator runs"),
    ("--sim-faults", _ENGINE.sim_faults, "faults that the simulator plays, e.g. crash@200,slow@50=3000,hang@9,lose@20"),
    ("--pooling", _ENGINE.pooling, "how token vectors become one embedding: auto, mean, cls, last, or none"),
    (
        "--max-embed-tokens",
        _ENGINE.max_embed_tokens,
        "longest input to a generative GGUF's embeddings, in tokens; 0: 2,048",
    ),
    ("--context-length", _ENGINE.context_length, "tokens per sequence; 0: the model's own, if memory allows"),
    ("--kv-tokens", _ENGINE.kv_tokens, "tokens in the whole KV cache; 0: one to four contexts, if memory allows"),
    ("--memory-share", _ENGINE.memory_share, "share of Tokenbus's memory on the machine to plan with"),
    ("--kv-block-size", _ENGINE.kv_block_size, "tokens per KV block; -1: 16"),
    ("--cache-type-k", _ENGINE.cache_type_k, "type of cached keys: f32, f16, bf16, q8_0, q5_1 to q4_0"),
    ("--cache-type-v", _ENGINE.cache_type_v, "type of cached values, from the same list"),
    ("--host-cache-mib", _ENGINE.host_cache_mib, "host memory for offloaded prefixes; -1: up to 1,024; 0: none"),
    (
        "--min-prefix-tokens",
        _SCHEDULER.min_prefix_tokens,
        "tokens of the shortest cached prefix; 0: any; -1: any, or 128 if a cached prefix takes much memory",
    ),
    (
        "--expected-tokens",
        _SCHEDULER.expected_tokens,
        "tokens an answer is expected to use; 0: learned from recent ones",
    ),
    ("--priority-s", _SCHEDULER.priority_s, "seconds of waiting that one step of priority is worth"),
    ("--kept-share", _SCHEDULER.kept_share, "share of cached prefixes that each tenant may keep by its hints"),
    ("--max-kept-s", _SCHEDULER.max_kept_s, "longest time for which it may keep an unused prefix"),
    ("--max-num-seqs", _ENGINE.max_num_seqs, "sequences that run at the same time; -1: 16"),
    ("--max-num-batched-tokens", _ENGINE.max_num_batched_tokens, "tokens per step"),
    ("--ubatch-tokens", _ENGINE.ubatch_tokens, "tokens of a step that the device computes at once"),
    ("--step-target-ms", _ENGINE.step_target_ms, "longest time that a step should take while streams run"),
    ("--flash-attention", _ENGINE.flash_attention, "auto, on or off"),
    ("--gpu-layers", _ENGINE.gpu_layers, "layers on the GPU; -1: all that fit"),
    ("--main-gpu", _ENGINE.main_gpu, "GPU that holds what is not split among GPUs"),
    ("--split-mode", _ENGINE.split_mode, "how GPUs share the model: none, layer, row or tensor"),
    ("--max-waiting", WorkerSettings.max_waiting, "accepted requests that may wait for the engine"),
    ("--max-prompt-tokens", FrontendSettings.max_prompt_tokens, "longest prompt in tokens; 0: the context"),
    ("--max-new-tokens", FrontendSettings.max_new_tokens, "length of a completion without max_tokens"),
    (
        "--reasoning-budget-message",
        FrontendSettings.reasoning_budget_message,
        "text that ends reasoning whose budget is spent (none)",
    ),
    ("--step-timeout-s", WorkerSettings.step_timeout_s, "time after which a step counts as hung"),
    ("--grace-s", WorkerSettings.grace_s, "seconds that running requests may take to finish here after SIGTERM"),
    ("--handover-s", WorkerSettings.handover_s, "seconds that routers then have to take them to other workers"),
)
"""Flag, default and help text of the settings that an engine, a frontend or a worker has under the same name."""

_MODEL_HELP = (
    "a GGUF or ONNX file, a directory with one or with safetensors, org/repo[:quant] on the Hugging Face Hub, or demo"
)
_NAME_HELP = "name that clients request (the file's name)"


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `tokenbus up` that describe its workers."""
    _add_model_flags(parser)
    _add_on_demand_flags(parser)
    _add_engine_flags(parser)


def _add_model_flags(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    parser.add_argument(
        "--model", metavar="MODEL", required=required, action="append", help=_MODEL_HELP + "; may be repeated"
    )
    parser.add_argument(
        "--served-name", metavar="NAME", action="append", default=[], help=_NAME_HELP + ", one for each --model"
    )
    hub_flags.add_flag(parser)


def start_problem(options: argparse.Namespace) -> tuple[str, int]:
    """Returns why nothing can be started with these options, and the exit status; an empty text if nothing is known to
    be wrong. Also sets the folder for models from the Hub."""
    if problem := hub_flags.apply(options):
        return problem, EXIT_BAD_SETTINGS
    return _models_problem(options), 1


def _add_on_demand_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory-budget-mib",
        type=int,
        default=0,
        metavar="MIB",
        help="load models when requests name them, and unload others so that all together take no more than this",
    )
    parser.add_argument(
        "--idle-unload-s",
        type=float,
        default=0.0,
        metavar="S",
        help="load models when requests name them, and unload those that have had no request for this long; 0: never",
    )
    parser.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="NAME",
        help="a model, by its served name, that is loaded from the start and never unloaded; may be repeated",
    )


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        default=_ENGINE.engine,
        help="gguf, onnx, or sim, a simulator whose --model is a timing; auto decides by the files (auto)",
    )
    parser.add_argument("--threads", type=int, default=0, help="CPU threads per worker; 0: an equal share of the cores")
    parser.add_argument(
        "--keep-cache",
        nargs="?",
        type=_folder,
        const=_state_folder(),
        default="",
        metavar="DIR",
        help="keep cached prefixes across restarts, in files in DIR that only this user can read "
        f"(without DIR: {_state_folder()}); they contain users' text",
    )
    parser.add_argument(
        "--keep-cache-mib",
        type=arguments.whole(1),
        default=_ENGINE.keep_cache_mib,
        metavar="MIB",
        help="size of all files there; the longest unused go first (%(default)s)",
    )
    parser.add_argument(
        "--lora",
        type=_adapter,
        action="append",
        default=[],
        metavar="NAME=PATH[@TENANT,...]",
        help="LoRA adapter of the model, a GGUF or for ONNX also a PEFT folder, for all tenants or for these; may be "
        "repeated",
    )
    parser.add_argument(
        "--lora-dir",
        default="",
        metavar="DIR[@TENANT,...]",
        help="folder whose adapters, NAME.gguf or PEFT folders, are loaded and unloaded as they appear and disappear",
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    connection_flags.add_client_flags(parser)
    serve.add_status_flags(parser)
    serve.add_request_flags(parser)
    _add_model_flags(parser, required=True)
    parser.add_argument("--vllm-metrics", action="store_true", help="also export metrics under vLLM's names")
    parser.add_argument("--replicas", type=int, default=1, help="replicas of each model, sharing its weights (1)")
    _add_on_demand_flags(parser)
    parser.add_argument("--kv-budget", type=int, default=0, metavar="MIB", help="KV memory of all models; 0: no limit")
    _add_engine_flags(parser)
    parser.add_argument(
        "--role",
        choices=tuple(messages.WorkerRole),
        default=FrontendSettings.role.value,
        help="both, prefill (computes prompts for others) or decode (leaves long prompts to those) (%(default)s)",
    )
    parser.add_argument("--worker-id", default="", help="stable name of this worker; replicas add -1, -2, ...")
    for name, default, text in _FLAGS:
        shown = "" if default in (None, "") else f" ({default})"
        kind = int if default is None else type(default)
        parser.add_argument(name, type=kind, default=default, help=text + shown)
    parser.add_argument(
        "--devices",
        type=arguments.names,
        action="append",
        default=[],
        dest="device_groups",
        metavar="A,B,...",
        help="devices that share the model, such as CUDA0,CUDA1 or cuda:0, or none (GGUF) or cpu (ONNX) for the CPU "
        "alone; given once, or once for each of --replicas (the engine's choice)",
    )
    parser.add_argument(
        "--tensor-split", type=arguments.shares, default=(), metavar="A,B,...", help="share of the model for each GPU"
    )
    parser.set_defaults(run=run)


def _folder(text: str) -> str:
    """A folder as an absolute path, valid in every process; none if it is empty."""
    return os.path.abspath(os.path.expanduser(text)) if text else ""


def _state_folder() -> str:
    """Returns the folder for files that outlive a restart."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return os.path.join(_folder(state), "tokenbus", "cache")


def _adapter(text: str) -> AdapterSettings:
    """An adapter, such as `style=style.gguf@acme`."""
    try:
        return adapter_settings.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def settings_of(options: argparse.Namespace) -> WorkerSettings:
    """Returns the settings that parsed flags describe. Raises ValueError."""
    if len(options.served_name) > len(options.model):
        raise ValueError(f"--served-name was given {len(options.served_name)} times for {len(options.model)} --model")
    for name, low, high in _RANGES:
        value = getattr(options, name)
        if not low <= value <= high:
            raise ValueError(f"--{name.replace('_', '-')} must be {low:.10g} to {high:.10g}, got {value:.10g}")
    if (options.lora or options.lora_dir) and len(options.model) > 1:
        raise ValueError("--lora and --lora-dir need a single --model: load the others' adapters with tokenbus load")
    if options.keep_cache and not options.host_cache_mib:
        raise ValueError("--keep-cache keeps what --host-cache-mib allows: leave that at -1, or pass more than 0")
    if len(options.device_groups) not in (0, 1, options.replicas):
        raise ValueError(
            f"--devices was given {len(options.device_groups)} times: give it once, or once for each of the "
            f"{options.replicas} replicas"
        )
    names = names_of(options)
    on_demand = _on_demand_of(options, names)
    return WorkerSettings(
        models=tuple(
            ModelToServe(name, engine, replicas, tuple(options.lora), name in on_demand, options.lora_dir)
            for name, model in zip(names, options.model, strict=True)
            for engine, replicas in _engines_of(options, model, on_demand=name in on_demand)
        ),
        hub_cache=options.hub_cache,
        kv_budget_bytes=options.kv_budget << 20,
        memory_budget_bytes=options.memory_budget_mib << 20,
        idle_unload_s=options.idle_unload_s,
        broker=connection_flags.settings_of(options),
        prefix=options.prefix,
        worker_id=options.worker_id,
        status_page=serve.status_settings(options),
        log=logs.LogSettings(options.log_level or "", options.log_format or ""),
        otlp_traces_endpoint=options.otlp_traces_endpoint,
        vllm_metrics=options.vllm_metrics,
        frontend=FrontendSettings(
            inbox_prefixes=tuple(options.inbox_prefix or subjects.DEFAULT_INBOX_PREFIXES),
            max_prompt_tokens=options.max_prompt_tokens,
            max_new_tokens=options.max_new_tokens,
            reasoning_budget_message=_checked_message(options.reasoning_budget_message),
            role=messages.WorkerRole(options.role),
            slow_wait_s=options.slow_wait_s,
            debug=_is_debug(),
        ),
        max_waiting=options.max_waiting,
        grace_s=options.grace_s,
        handover_s=options.handover_s,
        step_timeout_s=options.step_timeout_s,
    )


def _checked_message(text: str) -> str:
    """Raises ValueError for a message that would take too many tokens."""
    if len(text.encode()) > _MAX_MESSAGE_BYTES:
        raise ValueError(f"--reasoning-budget-message must have at most {_MAX_MESSAGE_BYTES} bytes")
    return text


def names_of(options: argparse.Namespace) -> list[str]:
    """Returns the served names of all models."""
    given: list[str] = options.served_name
    return given + [registry.served_name(model) for model in options.model[len(given) :]]


def _on_demand_of(options: argparse.Namespace, names: list[str]) -> set[str]:
    """Returns the models that are loaded on demand. Raises ValueError."""
    unknown = [name for name in options.pin if name not in names]
    if unknown:
        raise ValueError(f"--pin {unknown[0]}: is not served here; there are {', '.join(names)}")
    if not options.memory_budget_mib and not options.idle_unload_s:
        if options.pin:
            raise ValueError("--pin needs --memory-budget-mib or --idle-unload-s: without them nothing is unloaded")
        return set()
    if len(set(names)) < len(names):
        raise ValueError(f"models that are loaded on demand need names of their own, got {', '.join(names)}")
    if options.replicas > 1 or options.kv_budget:
        raise ValueError("--replicas and --kv-budget are not for models on demand: use --memory-budget-mib alone")
    return set(names) - set(options.pin)


def _is_debug() -> bool:
    return os.environ.get("TOKENBUS_DEBUG", "") not in ("", "0")


def _engines_of(options: argparse.Namespace, model: str, *, on_demand: bool) -> list[tuple[EngineSettings, int]]:
    """Returns a model's distinct engines, each with the number of its replicas."""
    groups, engine = options.device_groups or [()], _engine_of(options, model, on_demand=on_demand)
    replicas = options.replicas if len(groups) == 1 else 1
    return [(codec.replace(engine, devices=group), replicas) for group in groups]


def _engine_of(options: argparse.Namespace, model: str, *, on_demand: bool) -> EngineSettings:
    own = {name: getattr(options, name) for name in EngineSettings.__struct_fields__ if hasattr(options, name)}
    own["debug"] = _is_debug()
    own["model"] = _located(model)
    if on_demand and options.host_cache_mib < 0 and not options.keep_cache:
        own["host_cache_mib"] = 0  # cached copies end with the model
    owners = min(BUSY_MODELS, len(options.model)) if on_demand else options.replicas * len(options.model)
    own["threads"] = options.threads or max(1, len(os.sched_getaffinity(0)) // owners)
    scheduler = SchedulerSettings(**{name: getattr(options, name) for name in SchedulerSettings.__struct_fields__})
    onnx = OnnxSettings(**{name: getattr(options, name) for name in OnnxSettings.__struct_fields__ if name in options})
    engine = EngineSettings(**own, scheduler=scheduler, onnx=onnx)
    check_choices(engine)
    return engine


def _located(model: str) -> str:
    """Returns a model's name on the Hub, or its path. `demo` is the model that comes with Tokenbus, unless a file of
    that name exists."""
    if model_files.is_hub_name(model):
        return model
    path = Path(model)
    return str(MODEL_PATH if model == "demo" and not path.exists() else path)


def _models_problem(options: argparse.Namespace) -> str:
    """Returns why one of the models can't be served on this machine."""
    try:
        for model in options.model:
            registry.check(_located(model), options.engine)
    except (ModelError, OSError) as error:
        return str(error)
    return ""


def run(options: argparse.Namespace) -> int:
    problem, status = start_problem(options)
    if problem:
        print(f"tokenbus: {problem}", file=sys.stderr)
        return status
    from tokenbus.worker import serve as worker  # every server parses these flags; only a worker needs this
    from tokenbus.worker.replica.frontend import ReplacedError

    try:
        return serve.run("worker", options, settings_of, worker.serve)
    except ReplacedError as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS
