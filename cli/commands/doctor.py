"""`tokenbus doctor`: looks at what a system needs, and says what to do about what is missing."""

import argparse
import asyncio
import importlib.metadata
import os
import shutil
import socket
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

from tokenbus.cli import connection_flags
from tokenbus.client import Client
from tokenbus.protocol.bus import connection as nats
from tokenbus.protocol.prompt import prompt
from tokenbus.protocol.telemetry import logs
from tokenbus.protocol.wire import errors, messages
from tokenbus.worker import contract
from tokenbus.worker.engine.models import model_files, registry
from tokenbus.worker.engine.process.settings import EngineSettings
from tokenbus.worker.engine.runner import ModelError
from tokenbus.worker.engine_client.client import EngineClient
from tokenbus.worker.engine_client.engine_process import EngineDiedError, EngineProcess

_CONNECT_TIMEOUT_S = 3.0
_MIN_PAYLOAD = 1 << 20
"""What nats-server takes unless told otherwise: prompts and answers of usual length fit."""
_ENGINES = ("llama-cpp-python", "onnxruntime-gpu", "onnxruntime")


class Finding(NamedTuple):
    """`ok`, `note` (it works, but look at this) or `bad`."""

    mark: str
    what: str
    advice: str = ""


def run(options: argparse.Namespace) -> int:
    """Prints what it finds, a line each; 1 where something is bad."""
    return asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> int:
    logs.log_errors_only()
    num_bad = 0
    async for finding in _all_findings(options):
        num_bad += finding.mark == "bad"
        advice = f"\n          {finding.advice}" if finding.advice else ""
        print(f"{finding.mark:<6}{finding.what}{advice}", flush=True)
    if num_bad:
        print(f"\n{num_bad} to mend", file=sys.stderr)
    return 1 if num_bad else 0


async def _all_findings(options: argparse.Namespace) -> AsyncIterator[Finding]:
    for finding in (*_machine(), *_ports(options.ports)):
        yield finding
    for model in options.model:
        finding = _model(model)
        yield finding
        if finding.mark == "ok":
            async for tried in _start_engine(model):
                yield tried
    async for finding in _broker(options):
        yield finding


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("ok", f"{cores} cores: give each worker its own, with --threads")
    for name in _ENGINES:
        try:
            yield Finding("ok", f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    if shutil.which("nvidia-smi") or Path("/dev/nvidia0").exists():
        yield Finding(
            "ok", "an NVIDIA driver is here: ONNX models take CUDA by themselves, llama.cpp if it was built so"
        )
    else:
        yield Finding("note", "no NVIDIA driver: everything is computed on the CPU")


def _ports(ports: list[int]) -> Iterator[Finding]:
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                yield Finding("note", f"port {port} is taken ({error.strerror})", "by this system, or another program?")
            else:
                yield Finding("ok", f"port {port} is free")


def _model(model: str) -> Finding:
    """A local file or folder is looked at; a name on the Hub is only read."""
    if model_files.is_hub_name(model):
        return Finding("note", f"{model} is a name on the Hub: a worker will fetch it")
    try:
        found = registry.find(model, lambda _: None)
        if registry.engine_of(model) == "gguf":
            with found.weights.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise ModelError(f"{found.weights}: is no GGUF file; fetch it again")
    except (ModelError, OSError) as error:
        return Finding("bad", f"model {model}", str(error))
    size, beside = found.weights.stat().st_size, ", ".join(found.sidecars) or "nothing"
    return Finding("ok", f"model {found.weights} ({size / 1e6:,.1f} MB), beside it {beside}")


async def _start_engine(model: str) -> AsyncIterator[Finding]:
    """Whether an engine can serve it: one is started, as a worker would start it."""
    process = EngineProcess({logs.LEVEL_VARIABLE: "error"})
    engine = EngineClient(lambda: process.open(EngineSettings(model=model)), max_waiting=0)
    try:
        config = await engine.start("doctor")
    except (contract.EngineStartError, EngineDiedError) as error:
        how = await engine.close()
        yield Finding("bad", f"no engine can serve {model}", how if isinstance(error, EngineDiedError) else str(error))
        return
    await engine.close()
    yield Finding("ok", f"an engine serves it: {config.engine_version}, contexts of {config.context_length} tokens")
    if "generate" in config.features:
        yield await asyncio.to_thread(_chats, config, engine.tokenizer_bundle())


def _chats(config: contract.EngineConfig, packed: bytes | None) -> Finding:
    """Whether conversations can be served."""
    builder = prompt.load_builder(prompt.unpack(packed)) if packed is not None else None
    if builder is not None:
        builder.start()
        builder.close()
    if "chat" in config.features and (builder is None or builder.supports_chat):
        return Finding("ok", "its chat template can be used")
    why = builder.chat_unsupported_reason if builder is not None else "its chat template is missing or malformed"
    return Finding("note", f"messages are refused, prompts served: {why}", "give the model a chat template that works")


async def _broker(options: argparse.Namespace) -> AsyncIterator[Finding]:
    place = nats.redact_url(options.nats)
    try:
        settings = connection_flags.settings_of(options, _CONNECT_TIMEOUT_S)
        bus = await nats.connect(settings, name="tokenbus doctor")
    except (ConnectionError, ValueError) as error:
        yield Finding("bad", f"broker at {place}", str(error))
        return
    yield Finding("ok", f"broker at {place}: {bus!r}")
    for path in settings.world_readable_files:
        yield Finding("note", f"{path} can be read by everybody on this machine", f"it is a secret: chmod 600 {path}")
    if bus.max_payload < _MIN_PAYLOAD:
        advice = "raise max_payload in its configuration: longer prompts are refused with payload_too_large"
        yield Finding("note", f"the broker takes {bus.max_payload:,} bytes in a message", advice)
    else:
        yield Finding("ok", f"the broker takes {bus.max_payload:,} bytes in a message")
    client = await Client.from_connection(bus, tenant=options.tenant, prefix=options.prefix)
    async with client:
        try:
            reply = await client.models()
        except errors.RequestError as error:
            advice = "start `tokenbus router`; with permissions on, pass --tenant and --nats-inbox _INBOX_<tenant>"
            yield Finding("bad", f"no router answers: {error.error.message}", advice)
            return
        for finding in _fleet(reply):
            yield finding


def _fleet(reply: messages.ModelsReply) -> Iterator[Finding]:
    yield Finding("ok", f"a router answers, and takes requests of {reply.limits.max_request_bytes:,} bytes")
    if not reply.models:
        yield Finding("bad", "no worker is known", "start `tokenbus worker --model ...` on the same broker")
    for served in reply.models:
        yield from _served(served)
    for refused in reply.router.refused_cards if reply.router else []:
        advice = "give all workers of one name the same model, or say that it is by --fingerprint"
        yield Finding("bad", f"{refused.worker_id} of {refused.model} is refused: {refused.reason}", advice)


def _served(served: messages.ServedModel) -> Iterator[Finding]:
    states: dict[str, list[str]] = defaultdict(list)
    digests: dict[str | None, list[str]] = defaultdict(list)
    for card in served.workers or []:
        states[card.state].append(card.worker_id)
        digests[card.tokenizer_digest].append(card.worker_id)
        if card.watched is not None and card.watched.events == "silent":
            advice = "may it publish its events? see deploy/nats.conf"
            yield Finding("bad", f"{served.model}: the router does not hear {card.worker_id}", advice)
    shown = ", ".join(f"{len(workers)} {state}" for state, workers in states.items())
    ready = "ready" in states
    yield Finding("ok" if ready else "bad", f"{served.model}: {shown}", "" if ready else "look at the workers' logs")
    if None in digests:
        advice = "routers ask them for every prompt's tokens, which costs a round trip"
        yield Finding("note", f"{served.model}: no tokenizer bundle of {', '.join(digests[None])}", advice)
    if len(digests) > 1:
        told = "; ".join(f"{', '.join(workers)}: {digest or 'none'}" for digest, workers in digests.items())
        yield Finding("note", f"{served.model}: tokenizers in several forms ({told})", "do they make the same tokens?")
