"""`tokenbus pull`: fetches a model from the Hub. `tokenbus models --local` lists what is there."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tokenbus.cli.console import arguments, hub_flags
from tokenbus.cli.console.flags import Parser
from tokenbus.protocol.telemetry import logs
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files import model_files, transfer
from tokenbus.worker.models import registry

_ON_TERMINAL_S = 0.2
_IN_LOG_S = 5.0
_START_OF_LINE = "\r\x1b[K"
_ENGINES = ("gguf", "onnx")


def add_flags(parser: Parser) -> None:
    parser.add_argument("model", metavar="NAME", help="org/repo or org/repo:QUANTIZATION on the Hugging Face Hub")
    flag = parser.group("download")
    flag("--engine", arguments.one_of("auto", *_ENGINES), "the engine that is to serve it", "auto")
    flag.add(hub_flags.HUB_CACHE)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Fetches the model; prints the path of its weights. Cached files are not fetched again."""
    if not model_files.is_hub_name(options.model):
        what = "is on this machine already" if Path(options.model).exists() else "is not a name on the Hub"
        return _fail(f"{options.model}: {what}; pass a name such as org/repo or org/repo:Q4_K_M")
    if problem := hub_flags.apply(options):
        return _fail(problem)
    logs.log_errors_only()
    return _reporting(lambda: _pull(options.model, options.engine))


def _pull(model: str, engine: str) -> None:
    from tokenbus.worker.models import fetch  # the Hub's library takes a while to import

    screen = _Screen(model)
    files = fetch.fetch(model, registry.layouts(engine), screen)
    screen.close()
    print(files.weights)


def run_local(options: argparse.Namespace) -> int:
    """Prints the models in the Hub's cache, or removes the one that `options` name."""
    if problem := hub_flags.apply(options):
        return _fail(problem)
    return _remove(options.remove) if options.remove else _list()


def _list() -> int:
    from tokenbus.worker.convert import converted
    from tokenbus.worker.models import hub, registry

    models = hub.list_models(_all_layouts())
    conversions = [hub.LocalModel(path.name, "", (path,)) for path in converted.list_files()]
    rows = [("name", "quantization", "size", "last used", "")]
    for model in (*models, *conversions):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.last_used))
        state = ("in use" if model.is_used else "") if model.is_complete else "incomplete: pull it again"
        rows.append((model.name, model.variant or "-", transfer.size(model.size), used, state))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows if rows[1:] else ():
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    if not rows[1:]:
        print(f"no model is in {registry.hub_folder()}")
    return 0


def _remove(model: str) -> int:
    from tokenbus.worker.convert import converted
    from tokenbus.worker.models import hub

    def remove() -> None:
        is_conversion = model in [path.name for path in converted.list_files()]
        freed = converted.remove(model) if is_conversion else hub.remove(model, _all_layouts())
        print(f"removed {model}: {transfer.size(freed)} are free again")

    return _reporting(remove)


def _all_layouts() -> tuple[model_files.Layout, ...]:
    return tuple(layout for engine in _ENGINES for layout in registry.layouts(engine))


def _reporting(work: Callable[[], None]) -> int:
    try:
        work()
    except ModelError as error:
        return _fail(str(error))
    return 0


def _fail(problem: str) -> int:
    start = _START_OF_LINE if sys.stderr.isatty() else ""
    print(f"{start}tokenbus: {problem}", file=sys.stderr)
    return 1


class _Screen:
    """Shows a download on standard error: on a terminal one line that changes, otherwise a line every few seconds."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._rate = transfer.DownloadRate()
        self._on_terminal = sys.stderr.isatty()
        self._shown_at = float("-inf")
        self._last = (0, 0)

    def __repr__(self) -> str:
        return f"<_Screen of {self._model} {self._last}>"

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now = time.monotonic()
        bytes_per_s = self._rate.update(done_bytes, now)
        self._last = done_bytes, total_bytes
        if now - self._shown_at >= (_ON_TERMINAL_S if self._on_terminal else _IN_LOG_S):
            self._shown_at = now
            self._write(transfer.describe(done_bytes, total_bytes, bytes_per_s))

    def _write(self, line: str) -> None:
        start, end = (_START_OF_LINE, "") if self._on_terminal else ("", "\n")
        print(f"{start}{self._model}: {line}", end=end, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Shows that everything is there."""
        if self._last[1]:
            self._write(f"{transfer.size(self._last[1])}, complete")
        if self._on_terminal:
            print(file=sys.stderr)
