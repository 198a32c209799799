"""Watches a folder of LoRA adapters: each file NAME.gguf, and each PEFT folder NAME, is loaded as NAME, reloaded when
it is replaced, and unloaded when it is gone."""

import asyncio
from pathlib import Path
from typing import NamedTuple

import structlog

from tokenbus.protocol.wire import errors
from tokenbus.worker.adapters.adapters import Adapters
from tokenbus.worker.settings.adapter_settings import AdapterSettings

_INTERVAL_S = 1.0
_SUFFIX = ".gguf"
_PEFT_WEIGHTS = "adapter_model.safetensors"


class Stamp(NamedTuple):
    """The properties of an adapter's file that distinguish its versions."""

    path: Path
    """The file, or the PEFT folder that holds it."""
    modified_ns: int
    size: int
    inode: int


class AdapterFolder:
    """The adapters of one replica that come from a folder; only `tenants` may use them, or all if None."""

    def __init__(self, path: Path, tenants: tuple[str, ...] | None, adapters: Adapters) -> None:
        self._path = path
        self._tenants = tenants
        self._adapters = adapters
        self._seen: dict[str, Stamp] = {}
        """The files found by the last scan."""
        self._tried: dict[str, Stamp] = {}
        """The files that were loaded or refused, so that none is tried twice."""
        self._own: dict[str, AdapterSettings] = {}
        """The adapters loaded from here, by name. An operator may have unloaded or replaced them since."""
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<AdapterFolder {self._path}, {len(self._own)} loaded>"

    async def run(self) -> None:
        """Watches until cancelled."""
        while True:
            try:
                await self.look()
            except Exception:  # outermost frame of a scan: a folder must not end a worker; the next scan tries again
                self._log.exception("folder_not_read", path=str(self._path))
            await asyncio.sleep(_INTERVAL_S)

    async def look(self) -> None:
        """Brings the adapters up to date with the folder. A file is loaded once two scans in a row find it unchanged,
        since it may still be being written."""
        files = await asyncio.to_thread(_stamps, self._path)
        for name in [name for name in self._tried if name not in files]:
            del self._tried[name]
            if (settings := self._own.pop(name, None)) is not None:
                await self._adapters.unload(name, settings)
        for name, stamp in files.items():
            if self._tried.get(name) != stamp == self._seen.get(name):
                await self._load(name, stamp)
        self._seen = files

    async def _load(self, name: str, stamp: Stamp) -> None:
        settings = AdapterSettings(name, str(stamp.path), self._tenants)
        try:
            settings.check()
            await self._adapters.load_own(settings, self._own.get(name))
        except ValueError as error:
            self._log.error("adapter_failed", adapter=name, error=str(error))
        except errors.RequestError as error:
            if error.error.retryable:  # there is currently no engine
                return
            self._log.error("adapter_failed", adapter=name, error=error.error.message)
        else:
            self._own[name] = settings
        self._tried[name] = stamp


def _stamps(folder: Path) -> dict[str, Stamp]:
    """Returns the adapters of a folder by name, without the extension; none if it can't be read."""
    found = {}
    try:
        for path in sorted(folder.iterdir()):
            weights = path / _PEFT_WEIGHTS if path.is_dir() else path
            if weights.is_file() and (path.is_dir() or path.suffix == _SUFFIX):
                status = weights.stat()
                name = path.name.removesuffix(_SUFFIX)
                found[name] = Stamp(path, status.st_mtime_ns, status.st_size, status.st_ino)
    except OSError:  # a file may vanish while the folder is read: the next scan will tell
        return found
    return found
