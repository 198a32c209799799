"""`tokenbus worker`: the flags of one worker, and the settings they make."""

import argparse
import os
import sys
from pathlib import Path

from tokenbus.cli.console import audit_flags, connection_flags, hub_flags, model_names, serve
from tokenbus.cli.console.arguments import (
    COUNT,
    MIB,
    NAME,
    NAMES,
    SECONDS,
    SHARES,
    SWITCH,
    TEXT,
    ArgumentType,
    above,
    one_of,
    real,
    text,
    whole,
)
from tokenbus.cli.console.flags import EXIT_BAD_SETTINGS, Flag, Parser, fields_of
from tokenbus.protocol.process.cores import usable_cores
from tokenbus.protocol.telemetry import logs
from tokenbus.protocol.wire import codec, messages, subjects
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import CHOICES, EngineSettings, OnnxSettings, SchedulerSettings
from tokenbus.worker.files import gguf_metadata
from tokenbus.worker.models import registry
from tokenbus.worker.settings import adapter_settings
from tokenbus.worker.settings.settings import FrontendSettings, ModelToServe, WorkerSettings

_ENGINE = EngineSettings(model="")
_SCHEDULER = SchedulerSettings()
_ONNX = OnnxSettings()

_MAX_MESSAGE_BYTES = 1_024
BUSY_MODELS = 2
"""Number of models on demand that are expected to compute at the same time: each gets its share of the cores."""


def _folder(text: str) -> str:
    """A folder as an absolute path, valid in every process; none if it is empty. Raises ValueError for a file, such as
    a model that follows `--keep-cache` without a folder."""
    if os.path.isfile(text):
        raise ValueError
    return os.path.abspath(os.path.expanduser(text)) if text else ""


def _state_folder() -> str:
    """Returns the folder for files that outlive a restart."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return os.path.join(_folder(state), "tokenbus", "cache")


_AUTO = whole(-1)
_ADAPTER = ArgumentType(adapter_settings.parse, "", "NAME=PATH[@TENANT,...]")
_MESSAGE = TEXT._replace(
    allowed=f"at most {_MAX_MESSAGE_BYTES:,} bytes", contains=lambda text: len(text.encode()) <= _MAX_MESSAGE_BYTES
)


def add_flags(parser: Parser, *, is_required: bool = True) -> None:
    """Adds all flags. `is_required` is whether a model must be named."""
    add_own_flags(parser, is_required=is_required)
    vllm = Flag("--vllm-metrics", SWITCH, "also export metrics under vLLM's names")
    serve.add_flags(parser, vllm, serve.SLOW_WAIT)
    parser.set_defaults(run=run)


def add_own_flags(parser: Parser, *, is_required: bool = True) -> None:
    """Adds the flags that a worker has and other servers have not."""
    _add_model_flags(parser, is_required=is_required)
    _add_memory_flags(parser)
    _add_scheduling_flags(parser)
    _add_device_flags(parser)
    audit_flags.add_flags(parser)
    flag = parser.group("stopping", WorkerSettings)
    flag("--grace-s", SECONDS, "time that running requests may take to finish here after SIGTERM", reloads=True)
    flag("--handover-s", SECONDS, "time that routers then have to take them to other workers", reloads=True)


def _add_model_flags(parser: Parser, *, is_required: bool) -> None:
    flag = parser.group("model", WorkerSettings, FrontendSettings, _ENGINE)
    model = (
        "a GGUF or ONNX file, a folder with one or with safetensors, org/repo[:quant] on the Hugging Face Hub, one of "
        "`tokenbus models fetch`, demo"
    )
    flag("--model -m --model-path", text("MODEL"), model, [], unset="demo", required=is_required)
    name = "name that clients request, one for each --model"
    flag("--served-name -a --served-model-name", NAME, name, [], unset="the file's name")
    flag.add(hub_flags.HUB_CACHE)
    flag("--engine", one_of("auto", "gguf", "onnx", "sim"), "sim is a simulator whose --model is a timing")
    flag("--fingerprint", NAME, "name for these weights, the same on all workers of a model", unset="a digest")
    flag(
        "--quantize",
        text("TYPE"),
        "type to which safetensors are converted: q8_0, q4_k_m, ...",
        unset="f16, or bf16 if that is faster",
    )
    flag("--pooling", _choice("pooling"), "how token vectors become one embedding")
    flag("--max-embed-tokens", COUNT, "longest input to a generative GGUF's embeddings, in tokens; 0: 2,048")
    role = "prefill computes prompts for others, decode leaves long prompts to those"
    flag("--role --disaggregation-mode", one_of(*messages.WorkerRole), role)
    flag("--worker-id", NAME, "stable name of this worker; replicas add -1, -2, ...", unset="host and process id")
    flag("--site", NAME, "place where it runs; routers of the same site prefer it", unset="no place")
    flag("--replicas", whole(1, 64), "replicas of each model, sharing its weights", 1)
    flag = parser.group("LoRA adapters")
    flag("--lora --lora-modules", _ADAPTER, "an adapter, GGUF or PEFT folder (ONNX), for all tenants or for these", [])
    flag("--lora-dir", text("DIR[@TENANT,...]"), "folder whose adapters come and go as its files do", "")
    flag = parser.group("clients and links", FrontendSettings)
    flag(
        "--gone-after-s", SECONDS, "how long a stream is held whose client has no subscription, before it is cancelled"
    )
    flag("--link-patience-s", SECONDS, "the same while a link between brokers may be down")
    flag = parser.group("models on demand", WorkerSettings)
    flag("--memory-budget-mib", MIB, "load models when they are requested, within this memory for all; 0: off", 0)
    flag("--idle-unload-s", real(0, metavar="SECONDS"), "unload models that are not requested for this long; 0: off")
    flag("--pin", NAME, "a model, by its served name, that is loaded from the start and never unloaded", [])


def _add_memory_flags(parser: Parser) -> None:
    flag = parser.group("memory and cache", _ENGINE, _SCHEDULER)
    flag("--context-length -c --ctx-size --max-model-len", COUNT, "tokens per sequence; 0: the model's own, if it fits")
    flag("--kv-tokens --max-total-tokens", COUNT, "tokens in the whole KV cache; 0: one to four contexts, if they fit")
    flag("--kv-budget", MIB, "KV memory of all models; 0: no limit", 0)
    flag("--memory-share --gpu-memory-utilization", real(0.001, 1), "share of the machine's memory to plan with")
    flag("--kv-block-size --block-size --page-size", _AUTO, "tokens per KV block; -1: 16")
    flag("--cache-type-k -ctk", _choice("cache_type_k"), "type of cached keys")
    flag("--cache-type-v -ctv", _choice("cache_type_v"), "type of cached values; q types need flash attention")
    host = "host memory for offloaded prefixes; -1: up to 1,024; 0: none"
    flag("--host-cache-mib -cram --cache-ram", whole(-1, metavar="MIB"), host)
    keep = "keep cached prefixes, which are users' text, across restarts; without DIR: in ~/.local/state/tokenbus/cache"
    flag("--keep-cache", ArgumentType(_folder, "a folder", "DIR"), keep, const=_state_folder())
    flag("--keep-cache-mib", whole(1, metavar="MIB"), "size of all files there; the longest unused go first")
    least = "tokens of the shortest cached prefix; 0: any; -1: any, or 128 if a prefix takes much memory"
    flag("--min-prefix-tokens", _AUTO, least)
    flag("--kept-share", real(0, 1), "share of cached prefixes that each tenant may keep by its hints")
    flag("--max-kept-s", real(0, metavar="SECONDS"), "longest time for which it may keep an unused prefix")


def _add_scheduling_flags(parser: Parser) -> None:
    flag = parser.group("scheduling and limits", _ENGINE, _SCHEDULER, WorkerSettings, FrontendSettings)
    flag("--max-num-seqs -np --parallel --max-running-requests", _AUTO, "sequences that run at once; -1: 16")
    flag("--max-num-batched-tokens -b --batch-size", whole(2), "tokens per step")
    flag("--step-target-ms", real(0, metavar="MS"), "longest time that a step should take while streams run")
    flag("--expected-tokens", COUNT, "tokens an answer is expected to use; 0: learned from recent ones")
    flag("--no-speculative-prefill", SWITCH, "compute nothing of next turns while the engine is idle")
    flag("--priority-s", real(0, 3_600, "SECONDS"), "waiting time that one step of priority is worth")
    flag("--max-waiting", whole(0, 1 << 20), "accepted requests that may wait for the engine", reloads=True)
    flag("--max-prompt-tokens", COUNT, "longest prompt in tokens; 0: the context", reloads=True)
    flag("--max-new-tokens -n --predict --n-predict", whole(1), "length without a request's max_tokens", reloads=True)
    flag("--reasoning-budget-message", _MESSAGE, "text that ends reasoning whose budget is spent", reloads=True)
    flag.add(serve.INBOX_PREFIXES)


def _add_device_flags(parser: Parser) -> None:
    flag = parser.group("device", _ENGINE, WorkerSettings)
    flag("--threads -t", whole(0, 4_096), "CPU threads per worker; 0: an equal share of the cores")
    flag("--gpu-layers -ngl --n-gpu-layers", _AUTO, "layers on the GPU; -1: all that fit")
    flag("--flash-attention -fa --flash-attn", _choice("flash_attention"), "whether to use it", const="on")
    flag("--ubatch-tokens -ub --ubatch-size", whole(1), "tokens of a step that the device computes at once")
    flag("--main-gpu -mg", COUNT, "GPU that holds what is not split among GPUs")
    flag("--split-mode -sm", _choice("split_mode"), "how GPUs share the model")
    flag("--tensor-split -ts", SHARES, "share of the model for each GPU", unset="by their free memory")
    devices = "devices that share the model, e.g. CUDA0,CUDA1 or cuda:0, none (GGUF) or cpu (ONNX); once or per replica"
    flag("--devices -dev --device", NAMES, devices, [], unset="the engine's choice")
    flag("--step-timeout-s", real(0.1, 86_400, "SECONDS"), "time after which a step counts as hung")
    flag = parser.group("ONNX models", _ONNX)
    flag("--provider", one_of("auto", "cpu", "cuda"), "where onnxruntime computes")
    flag("--device-id", COUNT, "GPU number")
    flag("--device-memory-mib", MIB, "GPU memory besides the KV cache; 0: no limit")
    flag("--min-free-mib", MIB, "memory that must be free before a prompt is computed; 0: any")
    flag("--max-paddings", _AUTO, "padding columns in a batch of an MHA graph; -1: 4,096")
    flag = parser.group("simulator", _ENGINE)
    flag("--sim-speedup", above(0), "how many times faster than its timing it runs")
    flag("--sim-faults", TEXT, "faults that it plays, e.g. crash@200,slow@50=3000,hang@9,lose@20,load@10000")


def _choice(name: str) -> ArgumentType:
    return one_of(*CHOICES[name])


def start_problem(options: argparse.Namespace) -> tuple[str, int]:
    """Returns why nothing can be started with these options, and the exit status; an empty text if nothing is known to
    be wrong. Also sets the folder for models from the Hub."""
    if problem := hub_flags.apply(options):
        return problem, EXIT_BAD_SETTINGS
    return _models_problem(options), 1


def settings_of(options: argparse.Namespace) -> WorkerSettings:
    """Returns the settings that parsed flags describe. Raises ValueError."""
    if len(options.served_name) > len(options.model):
        raise ValueError(f"--served-name was given {len(options.served_name)} times for {len(options.model)} --model")
    if (options.lora or options.lora_dir) and len(options.model) > 1:
        raise ValueError("--lora and --lora-dir need a single --model: load the others' adapters with tokenbus load")
    if options.keep_cache and not options.host_cache_mib:
        raise ValueError("--keep-cache keeps what --host-cache-mib allows: leave that at -1, or pass more than 0")
    if len(options.devices) not in (0, 1, options.replicas):
        raise ValueError(
            f"--devices was given {len(options.devices)} times: give it once, or once for each of the "
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
        kv_budget_bytes=options.kv_budget << 20,
        memory_budget_bytes=options.memory_budget_mib << 20,
        broker=connection_flags.settings_of(options),
        audit_settings=audit_flags.settings_of(options),
        status_page=serve.status_settings(options),
        log=logs.LogSettings(options.log_level or "", options.log_format or ""),
        frontend=FrontendSettings(
            inbox_prefixes=tuple(options.inbox_prefix or subjects.DEFAULT_INBOX_PREFIXES),
            debug=_is_debug(),
            **fields_of(FrontendSettings, options) | {"role": messages.WorkerRole(options.role)},
        ),
        **fields_of(WorkerSettings, options),
    )


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
    groups, engine = options.devices or [()], _engine_of(options, model, on_demand=on_demand)
    replicas = options.replicas if len(groups) == 1 else 1
    return [(codec.replace(engine, devices=group), replicas) for group in groups]


def _engine_of(options: argparse.Namespace, model: str, *, on_demand: bool) -> EngineSettings:
    own = fields_of(EngineSettings, options) | {"debug": _is_debug(), "model": model_names.located(model)}
    del own["devices"]  # one group of them is for each replica
    if on_demand and options.host_cache_mib < 0 and not options.keep_cache:
        own["host_cache_mib"] = 0  # cached copies end with the model
    owners = min(BUSY_MODELS, len(options.model)) if on_demand else options.replicas * len(options.model)
    own["threads"] = options.threads or max(1, usable_cores() // owners)
    scheduler = SchedulerSettings(**fields_of(SchedulerSettings, options))
    return EngineSettings(**own, scheduler=scheduler, onnx=OnnxSettings(**fields_of(OnnxSettings, options)))


def _models_problem(options: argparse.Namespace) -> str:
    """Returns why one of the models, or of their adapters, can't be served on this machine. Raises OSError for a file
    that can't be read."""
    try:
        for model in options.model:
            registry.check(model_names.located(model), options.engine)
        for adapter in options.lora:
            _check_adapter(f"--lora {adapter.name}", Path(adapter.path))
    except ModelError as error:
        return str(error)
    folder, _ = adapter_settings.split_tenants(options.lora_dir)
    if folder and not Path(folder).is_dir():
        return f"--lora-dir: {folder} is not a folder"
    return ""


def _check_adapter(what: str, path: Path) -> None:
    """Raises ModelError if there is no such adapter, or if its file has another format."""
    if not path.exists():
        raise ModelError(f"{what}: {path}: there is no such file or folder")
    if path.suffix == ".gguf":
        gguf_metadata.check(path)


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
