"""`tokenbus doctor`: checks what a system needs, and says how to fix what is missing. `inspect` looks at one model."""

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

from tokenbus.cli.console import arguments, bucket_check, connection_flags, hub_flags, model_names, needs, session
from tokenbus.cli.console.flags import Parser
from tokenbus.cli.console.plain_text import printable
from tokenbus.client.wire.wire_client import WireClient
from tokenbus.protocol import extras
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.bus import ping_probe
from tokenbus.protocol.process.cores import usable_cores
from tokenbus.protocol.telemetry import log_variables
from tokenbus.protocol.wire import errors, messages
from tokenbus.worker.contract import contract
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings
from tokenbus.worker.engine.memory import fit
from tokenbus.worker.engine.memory.fit import MemoryNeed, Room, Rooms, mib
from tokenbus.worker.files import device_memory, model_files, transfer
from tokenbus.worker.models import folders, registry
from tokenbus.worker.on_demand import model_sizes

_CONNECT_TIMEOUT_S = 3.0
_MIN_PAYLOAD = 64 * 1024
"""The smallest max_payload that workers' messages are made for; larger messages are sent in parts."""
_MAX_PORT = 65_535
_DRIVER_TIMEOUT_S = 30.0
_ENGINES = ("llama-cpp-python", "onnxruntime-gpu", "onnxruntime")


class Finding(NamedTuple):
    """One result: its mark is `ok`, `note` (it works, but look at this) or `bad`."""

    mark: str
    what: str
    advice: str = ""


_PORTS = arguments.ArgumentType(
    lambda text: tuple(map(int, filter(None, text.split(",")))),
    *("port numbers with commas between them", "A,B,...", "0 to 65535 each"),
    lambda ports: all(0 <= port <= _MAX_PORT for port in ports),
)


def add_flags(parser: Parser) -> None:
    flag = parser.group("what to check")
    flag("--model -m", arguments.text("MODEL"), "a file or folder", [])
    flag("--memory-budget-mib", arguments.MIB, "compare models with this; 0: with free memory", 0)
    flag("--ports", _PORTS, "ports that should be free", (4222, 8000, 9100))
    flag.add(hub_flags.HUB_CACHE)
    connection_flags.add_flags(parser)
    parser.set_defaults(run=lambda options: asyncio.run(_run(options)))


def add_inspect_flags(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, an ONNX folder, or a name on the Hub")
    parser.group("model").add(hub_flags.HUB_CACHE)
    parser.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    if problem := hub_flags.apply(options):
        print(f"tokenbus: {problem}", file=sys.stderr)
        return 1
    from tokenbus.cli.console import inspection  # needs what a worker needs, and `doctor` may run without it

    session.log_errors_only()
    return inspection.show(model_names.located(options.model))


async def _run(options: argparse.Namespace) -> int:
    """Prints one finding per line, those that are bad last; returns 1 if there are any. Raises MissingExtraError for a
    model without an installed worker."""
    if options.model:
        extras.require("worker-core", "doctor --model")
    session.log_errors_only()
    bad = []
    async for finding in _all_findings(options):
        if finding.mark == "bad":
            bad.append(finding)
        else:
            _print(finding)
    for finding in bad:
        _print(finding)
    if bad:
        print(f"\n{len(bad)} to fix", file=sys.stderr)
    return 1 if bad else 0


def _print(finding: Finding) -> None:
    advice = f"\n          {finding.advice}" if finding.advice else ""
    print(printable(f"{finding.mark:<6}{finding.what}{advice}", lines=True), flush=True)


async def _all_findings(options: argparse.Namespace) -> AsyncIterator[Finding]:
    for finding in (*_machine(), *_servers(), *_ports(options.ports), *_hub_cache(options)):
        yield finding
    models = [model_names.located(model) for model in options.model]
    if models:
        for finding in check_memory(models, options.memory_budget_mib << 20, _host_room()):
            yield finding
    for model in models:
        finding = check_model(model)
        yield finding
        if finding.mark == "ok":
            async for tried in check_engine(model):
                yield tried
    async for finding in check_broker(options):
        yield finding


def _machine() -> Iterator[Finding]:
    cores = usable_cores()
    yield Finding("ok", f"{cores} cores: divide them among workers with --threads")
    if (taken := taken_cores(os.getloadavg()[0], os.cpu_count() or 1)) is not None:
        yield taken
    if lacks_sse42(Path("/proc/cpuinfo")):
        yield Finding("bad", "the processor lacks SSE4.2, which numpy needs since 2.4", "pip install 'numpy<2.4'")
    for name in _ENGINES:
        try:
            yield Finding("ok", f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if importlib.util.find_spec("llama_cpp") is not None:
        yield gguf_devices()
    if not (shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists()):
        yield Finding("note", "no NVIDIA driver: ONNX models run on the CPU")


def gguf_devices() -> Finding:
    """Reports the GPUs that llama.cpp finds, from a process of its own: a driver may crash or hang."""
    command = [sys.executable, "-m", "tokenbus.worker.engine.gguf.backend"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=_DRIVER_TIMEOUT_S, check=True)
        names: dict[str, str] = json.loads(found.stdout.splitlines()[-1])  # drivers may print lines of their own
    except (subprocess.SubprocessError, OSError, ValueError, IndexError) as error:
        return Finding("bad", "looking for GPUs ends llama.cpp or takes too long", str(error))
    if not names:
        advice = "with a GPU, its driver and a llama.cpp that is built for it are needed (docs/operations.md)"
        return Finding("note", "llama.cpp finds no GPU: GGUF models run on the CPU", advice)
    shown = ", ".join(f"{name} ({words})" for name, words in names.items())
    return Finding("ok", f"GGUF models use {shown}: choose among them with --devices")


def taken_cores(load: float, cores: int) -> Finding | None:
    """Reports a machine whose cores other processes want. `load` is how many processes have wanted one lately."""
    if load <= cores:
        return None
    advice = "models are slow meanwhile; workers that are among them need fewer --threads"
    return Finding("note", f"{load:.1f} processes want the {cores} cores of this machine", advice)


def lacks_sse42(cpuinfo: Path) -> bool:
    """Returns whether an x86 processor lacks these instructions, without which routers and workers end at once. False
    if the system doesn't say."""
    try:
        flags = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    except OSError:
        return False
    return flags is not None and "sse4_2" not in flags.group(1).split()


def _servers() -> Iterator[Finding]:
    """Reports the servers that this installation can't start."""
    for server in ("router", "gateway", "worker"):
        if system := needs.lacking_system(server):
            yield Finding("note", f"tokenbus {server} does not run on {system}", needs.elsewhere())
        elif not needs.are_met(server):
            advice = f"pip install {extras.install(needs.EXTRAS[server])}"
            yield Finding("note", f"tokenbus {server} can't run here: its packages are not installed", advice)


def _hub_cache(options: argparse.Namespace) -> Iterator[Finding]:
    """Checks where models from the Hub are kept, and the free space there."""
    if not needs.are_met("pull"):
        return
    if problem := hub_flags.apply(options):
        yield Finding("bad", problem)
        return
    folder = folders.hub_folder()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        advice = "pass --hub-cache, or set HF_HOME to a folder that this user may write to"
        yield Finding("note", f"models from the Hub can't be kept in {folder}", advice)
    else:
        yield Finding("ok", f"models from the Hub are kept in {folder}, where {transfer.size(free)} are free")


def _ports(ports: list[int]) -> Iterator[Finding]:
    for port in ports:
        with socket.socket() as probe:
            # Connections in TIME_WAIT don't keep a server from binding either.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                yield Finding(
                    "note", f"port {port} is taken ({error.strerror})", "is it this system or another program?"
                )
            else:
                yield Finding("ok", f"port {port} is free")


def check_memory(models: list[str], budget_bytes: int, host: Room) -> Iterator[Finding]:
    """Reports the memory of each model on this machine when loaded, and whether they fit together.

    Without a budget a worker chooses sizes that fit in the host's memory; GPUs are not checked."""
    limit, limited = (host.free_bytes, "free") if not budget_bytes else (budget_bytes, "allowed by the budget")
    total = 0
    for model in models:
        if model_files.is_hub_name(model):
            continue
        try:
            need = _need_of(model, budget_bytes, host)
        except ModelError as error:
            yield Finding("bad", str(error))
            continue
        except OSError:
            continue  # `check_model` reports what is wrong with it
        total += need.total_bytes
        what = (
            f"{model} takes {need} for contexts of {need.context_length:,} tokens, {need.kv_tokens:,} in all; "
            f"{mib(limit)} of {mib(host.total_bytes)} are {limited}"
        )
        if not budget_bytes:
            what += f", of which {mib(fit.reserve_bytes(host.total_bytes))} stay in reserve"
        fits = need.total_bytes <= limit
        yield Finding("ok" if fits else "bad", what, "" if fits else "lower --kv-tokens or --context-length")
    if len(models) > 1 and total:
        together = f"all of them take {mib(total)} together"
        advice = "together they get shares; with --memory-budget-mib a worker loads them in turn"
        yield Finding("ok", together) if total <= limit else Finding("note", f"{together}, more than there is", advice)


def _need_of(model: str, budget_bytes: int, host: Room) -> MemoryNeed:
    """Raises ModelError if it does not fit, and OSError if it can't be read."""
    settings = EngineSettings(model=model)
    if budget_bytes:
        settings = EngineSettings(model=model, host_cache_mib=0)
        return model_sizes.choose_sizes(model_sizes.read_facts(settings, lambda _: None), settings, budget_bytes)
    try:
        facts = model_sizes.read_facts(settings, lambda _: None)
    except ModelError as error:
        raise OSError(str(error)) from error
    return fit.fit(facts, settings, Rooms(host))


def _host_room() -> Room:
    """Returns the memory that a worker would find now."""
    from tokenbus.worker.engine.memory import claims  # only Unix has the locks that it uses

    mine = claims.MemoryClaims(claims.runtime_directory())
    with mine.planning():
        return mine.host_room(device_memory.host_limits(), "", 1.0)


def check_model(model: str) -> Finding:
    """Checks a local file or folder. Nothing is downloaded for a name on the Hub."""
    if model_files.is_hub_name(model):
        return Finding("note", f"{model} is on the Hugging Face Hub: a worker will download it")
    try:
        registry.check(model)
        found = registry.find(model, lambda _: None)
    except ModelError as error:
        return Finding("bad", f"model {model}", str(error))
    except OSError as error:
        return Finding("bad", f"model {model}", str(error.strerror))
    size, sidecars = found.weights.stat().st_size, ", ".join(found.sidecars) or "none"
    return Finding("ok", f"model {found.weights} ({size / 1e6:,.1f} MB), files beside it: {sidecars}")


async def check_engine(model: str) -> AsyncIterator[Finding]:
    """Checks whether a model can be served, by starting an engine the way a worker does."""
    from tokenbus.worker.engine_client.client import EngineClient
    from tokenbus.worker.engine_client.engine_process import EngineDiedError, EngineProcess

    process = EngineProcess({log_variables.LEVEL_VARIABLE: "error"})
    engine = EngineClient(lambda: process.open(EngineSettings(model=model)), max_waiting=0)
    try:
        config = await engine.start("doctor")
    except (ModelError, EngineDiedError) as error:
        exit_reason = await engine.close()  # llama.cpp may end the process, and only its output says why
        text = exit_reason if isinstance(error, EngineDiedError) else str(error)
        yield Finding("bad", f"no engine can serve {model}", text)
        return
    await engine.close()
    for finding in check_config(config):
        yield finding
    if "generate" in config.features:
        yield await asyncio.to_thread(_check_chat, config, engine.tokenizer_bundle())


def check_config(config: contract.EngineConfig) -> Iterator[Finding]:
    """Reports what a model's engine does and does not do."""
    yield Finding("ok", f"an engine can serve it: {config.engine_version}, context of {config.context_length} tokens")
    if config.memory is not None:
        parts = ", ".join(f"{part.replace('_', ' ')} {mib(size)}" for part, size in config.memory.parts().items())
        total, tokens = mib(config.memory.planned_bytes), config.kv_tokens
        yield Finding("ok", f"it plans to take {total} ({parts}), with KV memory for {tokens:,} tokens")
    if config.slow_weights:
        yield Finding("note", config.slow_weights)
    if config.embeddings is not None:
        yield Finding("ok", f"it makes embeddings: {config.embeddings}")
    if config.kv_lane_bytes:
        lane = mib(config.kv_lane_bytes)
        yield Finding("ok", f"it can share --kv-budget with others as they need it, in lanes of {lane}")
    for ability, reason in config.missing.items():
        yield Finding("note", f"it has no {ability.replace('_', ' ')}: {reason}")


def _check_chat(config: contract.EngineConfig, packed: bytes | None) -> Finding:
    """Checks whether the model can serve chat messages."""
    from tokenbus.protocol.prompt import prompt, tokenizer_bundle  # both need what a worker needs

    builder = prompt.load_builder(tokenizer_bundle.unpack(packed)) if packed is not None else None
    if builder is not None:
        builder.start()
        builder.close()
    if "chat" in config.features and (builder is None or builder.supports_chat):
        return Finding("ok", "its chat template works")
    reason = builder.chat_unsupported_reason if builder is not None else "its chat template is missing or malformed"
    return Finding(
        "note", f"only prompts are served, messages are refused: {reason}", "give the model a working chat template"
    )


async def check_broker(options: argparse.Namespace) -> AsyncIterator[Finding]:
    url = nats.redact_url(options.nats)
    try:
        settings = connection_flags.settings_of(options, _CONNECT_TIMEOUT_S)
        bus = await nats.connect(settings, name="tokenbus doctor")
    except (ConnectionError, ValueError) as error:
        yield Finding("bad", f"the broker at {url} can't be used", str(error))
        return
    yield Finding("ok", f"the broker at {url} answers")
    for path in settings.world_readable_files:
        yield Finding("note", f"everyone on this machine can read the secret {path}", f"chmod 600 {path}")
    if bus.max_payload < _MIN_PAYLOAD:
        advice = "raise max_payload in its configuration to 64 KiB or more, or routers miss events of workers"
        yield Finding("note", f"the broker takes messages of up to {bus.max_payload:,} bytes", advice)
    else:
        yield Finding("ok", f"the broker takes messages of up to {bus.max_payload:,} bytes")
    yield _pings(await ping_probe.ping_interval_s(settings))
    for found in await bucket_check.check_buckets(bus, options.prefix):
        yield Finding(*found)
    client = await WireClient.from_connection(bus, tenant=options.tenant, prefix=options.prefix)
    async with client:
        try:
            reply = await client.models()
        except errors.RequestError as error:
            advice = "start `tokenbus router`; with permissions on, pass --tenant and --nats-inbox _INBOX_<tenant>"
            yield Finding("bad", f"no router answers: {session.with_hint(options, error.error).message}", advice)
            return
        for finding in check_fleet(reply):
            yield finding


def _pings(interval_s: float | None) -> Finding:
    if interval_s is not None and interval_s <= ping_probe.LIMIT_S:
        return Finding("ok", "the broker drops frozen connections within seconds")
    seen = "more than a few seconds" if interval_s is None else f"{interval_s:.1f} s"
    advice = 'set ping_interval: "1s" and ping_max: 2 in its configuration, or a frozen router keeps getting requests'
    return Finding("note", f"the broker pings its connections only every {seen}", advice)


def check_fleet(reply: messages.ModelsReply) -> Iterator[Finding]:
    most = reply.limits.max_upload_bytes or reply.limits.max_request_bytes
    yield Finding("ok", f"a router answers; it takes requests of up to {most:,} bytes")
    if not reply.models:
        yield Finding("bad", "the router knows no worker", "start `tokenbus worker --model ...` on the same broker")
    for served in reply.models:
        yield from _served(served)
    for refused in reply.router.refused_cards if reply.router else []:
        advice = "serve the same weights under one name, or pass the same --fingerprint for different files"
        yield Finding("bad", f"{refused.worker_id} of {refused.model} is refused: {refused.reason}", advice)


def _embeddings_of(served: messages.ServedModel) -> Iterator[Finding]:
    """Finds workers whose embeddings of a text differ from the others'."""
    poolings: dict[str, list[str]] = defaultdict(list)
    for card in served.workers or []:
        if card.embeddings is not None:
            poolings[card.embeddings.pooling].append(card.worker_id)
    if len(poolings) > 1:
        groups = "; ".join(f"{', '.join(workers)}: {pooling}" for pooling, workers in poolings.items())
        advice = "equal texts get different vectors: give all workers of the model the same --pooling"
        yield Finding("bad", f"{served.model}: workers pool embeddings in different ways ({groups})", advice)


def _served(served: messages.ServedModel) -> Iterator[Finding]:
    states: dict[str, list[str]] = defaultdict(list)
    digests: dict[str | None, list[str]] = defaultdict(list)
    for card in served.workers or []:
        states[card.shown_state].append(card.worker_id)
        if not card.loadable:  # what is not loaded has no tokenizer
            digests[card.tokenizer_digest].append(card.worker_id)
        if card.watched is not None and card.watched.events == "silent":
            advice = "check whether it may publish its events, see deploy/nats.conf"
            yield Finding("bad", f"{served.model}: the router gets no events from {card.worker_id}", advice)
    counts = ", ".join(f"{len(workers)} {state}" for state, workers in states.items())
    ready = "ready" in states or "loadable" in states
    yield Finding("ok" if ready else "bad", f"{served.model}: {counts}", "" if ready else "see the workers' logs")
    if None in digests:
        advice = "routers must ask these workers to tokenize every prompt, which costs a round trip"
        yield Finding("note", f"{served.model}: no tokenizer bundle from {', '.join(digests[None])}", advice)
    yield from _embeddings_of(served)
    if len(digests) > 1:
        groups = "; ".join(f"{', '.join(workers)}: {digest or 'none'}" for digest, workers in digests.items())
        yield Finding(
            "note",
            f"{served.model}: workers have different tokenizers ({groups})",
            "check that they produce the same tokens",
        )
