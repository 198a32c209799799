"""Reads messages that load a model beside others: its name, its files, and its engine's settings."""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from tokenbus.protocol.wire import errors, internal, subjects
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.contract.engine_settings import EngineSettings, check_choices
from tokenbus.worker.files.model_files import Layout, has_hub_form, is_hub_name
from tokenbus.worker.files.regular import on_thread
from tokenbus.worker.models import catalog, registry

_MAX_MODEL_CHARS = 4_096
_MAX_PULLS = 2
"""Each takes a thread of those that measure models too."""
_NOT_LOADABLE = {"model", "files", "engine", "scheduler", "onnx"} | {
    "kv_limit_bytes",
    "kv_pool_bytes",
    "kv_reserved_bytes",
    "host_cache_limit_bytes",
    "memory_share",
    "memory_parts",
    "memory_kept_bytes",
    "keep_cache",
    "keep_cache_mib",
    "follow_links",
}
"""Engine settings that a `load` message can't set by name."""


def refusal(error: Exception) -> errors.Error:
    """Returns what a client is told about a model that can't be loaded."""
    if isinstance(error, errors.RequestError):
        return error.error
    return errors.make_error(errors.Code.INVALID_REQUEST, str(error), param="model")


def name_on_hub(name: str, num_pulls: int) -> str:
    """Returns the name of a model to fetch. Raises RequestError."""
    if len(name) > _MAX_MODEL_CHARS or not has_hub_form(name):
        problem = "model must be a name on the Hub, such as org/repo or org/repo:Q4_K_M"
        raise errors.request_error(errors.Code.INVALID_REQUEST, problem, param="model")
    if num_pulls >= _MAX_PULLS:
        raise errors.request_error(errors.Code.OVERLOADED, f"this worker fetches {num_pulls} models already")
    return name


def fetch(name: str, layouts: Sequence[Layout], progress: Callable[[float], None]) -> None:
    """Fetches a model from the Hub. Raises ModelError."""
    if not is_hub_name(name):
        raise ModelError(f"{name}: is a path on this machine, and no name on the Hub")
    registry.find_as(name, layouts, progress)


def asked_name(model: str, asked: str | None) -> str:
    """Returns the name on the wire that a message gives a model; empty if it gives none. Raises RequestError if the
    model or the name is invalid."""
    if "\0" in model or not 0 < len(model) <= _MAX_MODEL_CHARS:
        problem = f"model must be a file, a directory or a name on the Hub of at most {_MAX_MODEL_CHARS:,} characters"
        raise errors.request_error(errors.Code.INVALID_REQUEST, problem, param="model")
    return "" if asked is None else _checked(asked)


async def default_name(model: str) -> str:
    """Returns the name of a model that was given none. It takes a look at the files, which may be on a mount that does
    not answer. Raises RequestError if there is no such name, and ModelError."""
    return _checked(await on_thread(model, partial(registry.served_name, model), lambda _: None))


def _checked(name: str) -> str:
    try:
        subjects.encode_name(name)
    except ValueError as error:
        problem = f"served_name: {error}"
        raise errors.request_error(errors.Code.INVALID_REQUEST, problem, param="served_name") from error
    return name


def engine_settings(own: EngineSettings, control: internal.Control) -> EngineSettings:
    """Returns the worker's engine settings for another model, changed as a message asks. Raises RequestError."""
    allowed = [name for name in EngineSettings.__struct_fields__ if name not in _NOT_LOADABLE]
    for name in control.settings:
        if name not in allowed:
            raise errors.request_error(
                errors.Code.INVALID_REQUEST,
                f"settings.{name} is not an engine setting; there are {', '.join(allowed)}",
                param=f"settings.{name}",
            )
    fields = msgspec.structs.asdict(own) | control.settings
    fields |= {"model": catalog.located(control.model or ""), "files": {}, "follow_links": False}
    try:
        settings = msgspec.convert(fields, EngineSettings)
        check_choices(settings)
    except ValueError as error:  # msgspec's too
        raise errors.request_error(errors.Code.INVALID_REQUEST, f"settings: {error}", param="settings") from error
    return settings
