"""The `tokenbus` command: parses the arguments and hands over to the part that was asked for."""

import argparse
import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from cli import chat, clients, config, doctor, gateway, health, operate, reach, top, up, worker
from cli.bench import options as bench_options
from cli.bench import run as bench
from cli.family import EXIT_REFUSED
from cli.replay import options as replay_options
from cli.replay import run as replay
from cli.wirecheck import run as wirecheck
from protocol import logs, status, subjects
from router import serve as router
from router.allowance import TenantLimits
from router.placement import POLICIES
from router.turns import QueueSettings
from worker import contract
from worker.front import serve
from worker.front.front import ReplacedError


def main() -> None:
    try:
        options = _options(sys.argv[1:])
    except ValueError as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)
    try:
        sys.exit(options.run(options))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _options(arguments: list[str]) -> argparse.Namespace:
    """What the command line says, and, of a server process, its variables and its file. Raises ValueError."""
    parser, commands = _parser()
    if not arguments or arguments[0] not in config.SECTIONS:
        return parser.parse_args(arguments)
    command = commands[arguments[0]]
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", default=os.environ.get(config.FILE_VARIABLE, ""))
    path = finder.parse_known_args(arguments[1:])[0].config
    settings = config.apply(command, arguments[0], config.read(Path(path)) if path else {}, path)
    options = parser.parse_args(arguments)
    config.complete(options, command, settings)
    return options


def _config(options: argparse.Namespace) -> int:
    """Checks a file, or shows what a process would be given."""
    _, commands = _parser()
    sections = [options.section] if options.section else list(config.SECTIONS)
    try:
        tables = config.read(options.file) if options.file else {}
        found = {name: config.apply(commands[name], name, tables, str(options.file or "")) for name in sections}
    except ValueError as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return EXIT_REFUSED
    if options.do == "show":
        print("\n\n".join(config.show(name, settings) for name, settings in found.items()))
    else:
        print(f"{options.file or 'no file'}: every setting is known and can be")
    return 0


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser, and those of its commands."""
    parser = argparse.ArgumentParser(
        prog="tokenbus", description="LLM inference workers behind a NATS broker.", allow_abbrev=False
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_up(commands.add_parser("up", help="run everything on this machine, in the foreground"))
    _add_worker(commands.add_parser("worker", help="run one worker"))
    _add_router(commands.add_parser("router", help="run one router"))
    _add_gateway(commands.add_parser("gateway", help="run one gateway: the OpenAI-compatible HTTP API"))
    _add_generate(commands.add_parser("generate", help="ask for a completion and stream it"))
    _add_embed(commands.add_parser("embed", help="make embeddings of texts, one line of JSON each"))
    models = commands.add_parser("models", help="list what is being served")
    _add_broker(models)
    models.add_argument("--json", action="store_true", help="print the reply as it came")
    models.set_defaults(run=clients.models)
    _add_chat(commands.add_parser("chat", help="talk with a model"))
    watch = commands.add_parser("top", help="watch the fleet: load, blocks, tokens per second")
    _add_broker(watch)
    watch.add_argument("--every-s", type=_positive, default=1.0, help="seconds from one look to the next (%(default)s)")
    watch.add_argument("--once", action="store_true", help="print one table and end")
    watch.add_argument("--json", action="store_true", help="print the workers as JSON and end")
    watch.set_defaults(run=top.run)
    looked = commands.add_parser("doctor", help="look at broker, models, ports and fleet, and say what to mend")
    _add_broker(looked)
    looked.add_argument("--model", action="append", default=[], metavar="MODEL", help="a file or folder to look at")
    looked.add_argument(
        "--ports",
        type=gateway.port,
        nargs="*",
        default=[4222, 8000, 9100],
        metavar="PORT",
        help="ports that shall be free",
    )
    looked.set_defaults(run=doctor.run)
    probed = commands.add_parser("health", help="say whether the process at a metrics port does its work")
    probed.add_argument("--port", type=gateway.port, default=health.PORT, help="its --metrics-port (%(default)s)")
    probed.add_argument("--live", action="store_true", help="only whether it is alive")
    probed.set_defaults(run=health.run)
    cancel = commands.add_parser("cancel", help="cancel a running request")
    _add_broker(cancel)
    cancel.add_argument("request_id", metavar="ID")
    cancel.set_defaults(run=clients.cancel)
    _add_operator(commands)
    played = commands.add_parser("replay", help="play a trace on a simulated fleet, policies side by side")
    replay_options.add_flags(played)
    played.set_defaults(run=replay.run)
    measured = commands.add_parser("bench", help="put load on a running system and measure it")
    _add_broker(measured)
    bench_options.add_flags(measured)
    measured.set_defaults(run=bench.run)
    _add_wire_check(commands.add_parser("wire-check", help="hold a running system against the wire's rules"))
    for name in config.SECTIONS:
        commands.choices[name].add_argument(
            "--config",
            metavar="FILE",
            help=f"settings in TOML, under the flags' names (variable {config.FILE_VARIABLE})",
        )
    settings = commands.add_parser("config", help="check a file of settings, or show what a process would be given")
    settings.add_argument("do", choices=("check", "show"))
    settings.add_argument("section", choices=config.SECTIONS, nargs="?", help="only of this command")
    settings.add_argument("--file", type=Path, default=os.environ.get(config.FILE_VARIABLE), help="the file")
    settings.set_defaults(run=_config)
    return parser, dict(commands.choices)


def _add_broker(parser: argparse.ArgumentParser) -> None:
    reach.add_flags(parser)
    parser.add_argument("--prefix", default=subjects.DEFAULT_PREFIX, help="prefix of all subjects (%(default)s)")
    parser.add_argument("--tenant", default=subjects.DEFAULT_TENANT, help="on whose behalf (%(default)s)")


def _add_up(parser: argparse.ArgumentParser) -> None:
    worker.add_model(parser)
    parser.add_argument("--workers", type=_at_least(1), default=2, help="worker replicas (%(default)s)")
    parser.add_argument(
        "--port", type=gateway.port, default=4222, help="port of the embedded broker; 0 takes a free one"
    )
    parser.add_argument("--nats", metavar="URL", help="use this broker instead of an embedded one")
    parser.add_argument(
        "--gateway-port",
        type=gateway.port,
        metavar="PORT",
        help="of the HTTP API (8000, or a free one where it is taken)",
    )
    parser.add_argument("--no-gateway", action="store_true", help="leave the HTTP API out")
    parser.add_argument("--json", action="store_true", help="print one line of JSON once it serves")
    parser.set_defaults(run=up.run)


def _add_worker(parser: argparse.ArgumentParser) -> None:
    _add_broker(parser)
    _add_inboxes(parser)
    _add_status(parser)
    worker.add_flags(parser)
    parser.set_defaults(run=_worker)


def _add_status(parser: argparse.ArgumentParser) -> None:
    shown = status.Settings()
    parser.add_argument(
        "--metrics-port",
        type=_ports,
        default=shown.ports,
        metavar="PORT[-PORT]",
        help="show /metrics, /livez and /readyz at the first of these that is free; 0 takes any; none shows nothing",
    )
    parser.add_argument(
        "--metrics-host", default=shown.host, metavar="ADDRESS", help="and at this address (%(default)s)"
    )


def _add_inboxes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--inbox-prefix",
        action="append",
        metavar="PREFIX",
        help="what a client's reply subject may begin with (_INBOX); may be repeated",
    )


def _add_router(parser: argparse.ArgumentParser) -> None:
    _add_broker(parser)
    _add_status(parser)
    _add_inboxes(parser)
    parser.add_argument("--router-id", default="", help="name of this router in logs")
    parser.add_argument("--policy", default=POLICIES[0], help=f"{', '.join(POLICIES)} or your own (%(default)s)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        help="above 0 dearer workers are drawn now and then (%(default)s)",
    )
    parser.add_argument(
        "--tenant-limit",
        type=_limits,
        default=TenantLimits(),
        metavar="OPEN,REQUESTS,TOKENS",
        help="of each tenant: requests at a time, requests and tokens a minute, at this router; 0 is no limit (0,0,0)",
    )
    parser.add_argument(
        "--limit-of",
        type=_limit_of,
        action="append",
        default=[],
        metavar="TENANT=OPEN,REQUESTS,TOKENS",
        help="of one tenant, instead; may be repeated",
    )
    waiting = QueueSettings()
    parser.add_argument(
        "--max-queued-requests",
        type=_at_least(0),
        default=waiting.max_requests,
        help="requests of a model that may wait here while every worker is busy (%(default)s)",
    )
    parser.add_argument(
        "--max-queued-tokens",
        type=_at_least(0),
        default=waiting.max_tokens,
        help="tokens of all of them, prompts and what they may generate (%(default)s)",
    )
    parser.add_argument(
        "--max-request-bytes", type=_at_least(0), default=0, help="largest request; 0: half the broker's"
    )
    parser.set_defaults(run=_router)


def _add_gateway(parser: argparse.ArgumentParser) -> None:
    _add_broker(parser)
    _add_status(parser)
    gateway.add_flags(parser)
    parser.set_defaults(run=_gateway)


def _add_generate(parser: argparse.ArgumentParser) -> None:
    _add_broker(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the text; - reads standard input")
    parser.add_argument("--model", metavar="NAME", required=True, help="the served model")
    parser.add_argument("--raw", action="store_true", help="send the text as it is, without the chat template")
    _add_sampling(parser)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the answer; may be repeated")
    parser.add_argument("--ignore-eos", action="store_true", default=None, help="go on behind the model's end token")
    parser.add_argument("--id", help="the request's id")
    parser.add_argument("--timeout-ms", type=float)
    parser.add_argument("--json", action="store_true", help="print the raw messages, one a line")
    parser.set_defaults(run=clients.generate)


def _add_embed(parser: argparse.ArgumentParser) -> None:
    _add_broker(parser)
    parser.add_argument("--model", metavar="NAME", required=True, help="the model's name on the wire")
    parser.add_argument("--dimensions", type=_at_least(1), help="numbers of each vector; all that the model makes")
    parser.add_argument("--no-normalize", action="store_true", help="leave vectors as long as the model makes them")
    parser.add_argument("--timeout-ms", type=float, help="how long to wait (60,000)")
    parser.add_argument(
        "texts", metavar="TEXT", nargs="+", help="a text; - alone reads one from each line of the input"
    )
    parser.set_defaults(run=clients.embed)


def _add_chat(parser: argparse.ArgumentParser) -> None:
    _add_broker(parser)
    parser.add_argument("--model", metavar="NAME", required=True, help="the served model")
    _add_sampling(parser)
    parser.set_defaults(run=chat.run)


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message before it")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--seed", type=int)


def _add_operator(commands: Any) -> None:
    load = commands.add_parser("load", help="have a running worker load one more model")
    _add_broker(load)
    load.add_argument("worker_id", metavar="WORKER", help="the worker beside which it is loaded")
    load.add_argument("model", metavar="MODEL", help="file, directory or name on the Hub, as that worker finds it")
    load.add_argument("--served-name", metavar="NAME", help="its name on the wire (the file's name)")
    load.add_argument("--replicas", type=_at_least(1), default=1, help="on one copy of the weights (%(default)s)")
    load.add_argument(
        "--set",
        type=operate.setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an engine setting that differs from the worker's own, as context-length=2048; may be repeated",
    )
    load.set_defaults(run=operate.load)
    unload = commands.add_parser("unload", help="have a worker finish its requests and give its memory back")
    _add_broker(unload)
    unload.add_argument("worker_id", metavar="WORKER")
    unload.set_defaults(run=operate.unload)


def _add_wire_check(parser: argparse.ArgumentParser) -> None:
    _add_broker(parser)
    parser.add_argument("--model", metavar="NAME", default="", help="the served model")
    parser.add_argument(
        "--inbox-prefix",
        metavar="PREFIX",
        default=subjects.DEFAULT_INBOX_PREFIXES[0],
        help="what reply subjects begin with (%(default)s)",
    )
    parser.add_argument("--only", metavar="TEXT", default="", help="only the rules whose sentence has this text")
    parser.add_argument("--list", action="store_true", help="list the rules and try none")
    parser.add_argument("--json", action="store_true", help="print one JSON object a rule")
    parser.set_defaults(run=wirecheck.run)


def _worker(options: argparse.Namespace) -> int:
    return _run("worker", serve.serve(worker.settings_of(options)))


def _router(options: argparse.Namespace) -> int:
    settings = router.RouterSettings(
        broker=reach.settings_of(options),
        prefix=options.prefix,
        router_id=options.router_id,
        policy=options.policy,
        temperature=options.temperature,
        queue=QueueSettings(options.max_queued_requests, options.max_queued_tokens),
        inbox_prefixes=tuple(options.inbox_prefix or subjects.DEFAULT_INBOX_PREFIXES),
        max_request_bytes=options.max_request_bytes,
        status_page=status.Settings(options.metrics_host, options.metrics_port),
        tenant_limits=options.tenant_limit,
        own_tenant_limits=dict(options.limit_of),
    )
    return _run("router", router.serve(settings))


def _gateway(options: argparse.Namespace) -> int:
    from gateway import serve  # a fifth of a second that no other command needs

    try:
        settings = gateway.settings_of(options)
    except ValueError as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return _run("gateway", serve.serve(settings))


def _run(process: str, life: Coroutine[Any, Any, None]) -> int:
    """A server process: what stops it is one line that says what to do."""
    logs.configure(process)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(life)
    except (contract.EngineStartError, ReplacedError, ValueError) as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except ConnectionError as error:
        print(f"tokenbus: {error}", file=sys.stderr)
        return 1
    return 0


def _loop_factory() -> Any:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop


def _at_least(low: int) -> Any:
    def parse(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, got {value}")
        return value

    parse.__name__ = "number"
    return parse


def _positive(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 3_600:
        raise argparse.ArgumentTypeError(f"must be 0.05 to 3600 seconds, got {text}")
    return value


def _limits(text: str) -> TenantLimits:
    try:
        concurrency, requests, tokens = text.split(",")
        found = TenantLimits(int(concurrency), float(requests), float(tokens))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be three numbers as 8,600,100000, got {text}") from None
    if not all(0 <= number < float("inf") for number in found):
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return found


def _limit_of(text: str) -> tuple[str, TenantLimits]:
    tenant, _, limits = text.partition("=")
    if not tenant or not limits:
        raise argparse.ArgumentTypeError(f"must be a tenant and its limits as acme=8,600,100000, got {text}")
    return tenant, _limits(limits)


def _ports(text: str) -> range:
    first, _, last = text.partition("-")
    found = range(gateway.port(first), gateway.port(last or first) + 1)
    if not found:
        raise argparse.ArgumentTypeError(f"must be a port, or the first and last of several, got {text}")
    return found


if __name__ == "__main__":
    main()
