"""The LoRA adapters of one replica by name: which are wanted, which its engine has, and who may use them.

A folder of adapters can be watched: each file NAME.gguf, and each PEFT folder NAME, is loaded as NAME, reloaded when it
is replaced, and unloaded when it is gone.
"""

import asyncio
import os
import resource
import stat
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from tokenbus.protocol.wire import errors, internal, limits, messages, subjects
from tokenbus.protocol.wire.block_hash import Adapter
from tokenbus.worker.contract import contract
from tokenbus.worker.contract.engine_errors import ModelError
from tokenbus.worker.engine_client.engine_process import EngineDiedError
from tokenbus.worker.files.regular import on_thread, open_regular
from tokenbus.worker.settings.adapter_settings import AdapterSettings

_GGUF = b"GGUF"


class KeptAdapter:
    """Holds an adapter's file or folder open. This process and its engine can read it from its `path`.

    The files in a PEFT folder are not held: they can be read only as long as they are in it. The digest shows if a file
    was overwritten. If too many files are open, or on systems other than Linux, the path is the one that was given."""

    def __init__(self, path: str) -> None:
        """Raises ModelError for what is neither a regular file nor a folder. May wait for a file system."""
        self.path = path
        fd = open_regular(path, or_folder=True)
        self._fd = fd if _is_to_keep(fd) else None
        if self._fd is None:
            os.close(fd)
        else:
            self.path = f"/proc/{os.getpid()}/fd/{fd}"

    def __repr__(self) -> str:
        return f"<KeptAdapter {self.path}>"

    def close(self) -> None:
        """Closes the file. Safe to call again."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _is_to_keep(fd: int) -> bool:
    """Whether a file is held open: a folder or a GGUF file, since any other file needs its name, unless more than half
    of this process's descriptors would be in use."""
    if not Path("/proc/self/fd").is_dir() or fd >= resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2:
        return False
    try:
        return stat.S_ISDIR(os.fstat(fd).st_mode) or os.pread(fd, len(_GGUF), 0) == _GGUF
    except OSError:
        return False


MAX_LOADED = 256
"""The most adapters of one replica, all of which are in its card."""


class _Loaded(NamedTuple):
    settings: AdapterSettings
    digest: str
    kept: KeptAdapter


class Adapters:
    """Loads and unloads adapters, one at a time. `on_changed` is called when the usable adapters have changed."""

    def __init__(self, on_changed: Callable[[], None] = lambda: None) -> None:
        self._on_changed = on_changed
        self.in_use: Callable[[], set[str]] = set
        """Returns the digests of the adapters that open streams use."""
        self._retired: dict[str, KeptAdapter] = {}
        """Adapters that were in use when they were withdrawn, by digest: the next engine gets them for those
        streams."""
        self._lent: frozenset[str] = frozenset()
        """The digests of those that the current engine got."""
        self._wanted: dict[str, AdapterSettings] = {}
        self._loaded: dict[str, _Loaded] = {}
        self._engine: contract.Engine | None = None
        self._changing = asyncio.Lock()
        self._log = structlog.get_logger()

    def __repr__(self) -> str:
        return f"<Adapters {sorted(self._loaded)}>"

    def __len__(self) -> int:
        return len(self._loaded)

    def want(self, adapters: Iterable[AdapterSettings]) -> None:
        """Sets the adapters of the first engine."""
        self._wanted = {one.name: one for one in adapters}

    async def load_all(self, engine: contract.Engine) -> None:
        """Gives a new engine the wanted adapters.

        Raises ModelError if the first engine can't load one of them, and EngineDiedError if it dies meanwhile. A
        later engine starts without those that no longer exist."""
        async with self._changing:
            is_first, self._engine = self._engine is None, engine
            before, self._lent = self._loaded, frozenset()
            loaded: dict[str, _Loaded] = {}
            try:
                await self._load_wanted(engine, loaded, is_first=is_first)
            except BaseException:  # there may be many tries
                for one in loaded.values():
                    one.kept.close()
                if is_first:
                    self._engine = None
                raise
            self._loaded = loaded
            self._retire(before.values())
            await self._lend(engine)

    async def _load_wanted(self, engine: contract.Engine, loaded: dict[str, _Loaded], *, is_first: bool) -> None:
        for name, settings in list(self._wanted.items()):
            try:
                loaded[name] = await _load(engine, settings)
            except errors.RequestError as error:
                if error.error.retryable:
                    raise EngineDiedError(f"the engine ended while it loaded the adapter {name}") from error
                if is_first:
                    raise ModelError(f"--lora {name}: {error.error.message}") from error
                self._log.error("adapter_failed", adapter=name, error=error.error.message)
                del self._wanted[name]

    async def load(self, settings: AdapterSettings) -> None:
        """Loads an adapter, replacing one with the same name. Changes nothing if it raises RequestError."""
        async with self._changing:
            await self._load(settings)

    async def load_own(self, settings: AdapterSettings, before: AdapterSettings | None) -> None:
        """Does the same for an owner that may replace only what it has loaded itself, which is `before`.

        Raises ValueError if the name belongs to another owner."""
        async with self._changing:
            if (known := self._wanted.get(settings.name)) is not None and known is not before:
                raise ValueError("an adapter of that name was loaded by other means")
            await self._load(settings)

    async def _load(self, settings: AdapterSettings) -> None:
        assert self._changing.locked(), self
        if settings.name not in self._loaded and len(self._loaded) >= MAX_LOADED:
            problem = f"at most {MAX_LOADED} adapters may be loaded: unload one first"
            raise errors.request_error(errors.Code.INVALID_REQUEST, problem, param="adapter")
        engine = self._require_engine()
        loaded = await _load(engine, settings)
        before = self._loaded.get(settings.name)
        self._wanted[settings.name] = settings
        self._loaded[settings.name] = loaded
        if before is not None:
            engine.unload_adapter(before.digest)
            self._retire([before])
        self._log.info("adapter_loaded", adapter=settings.name, digest=loaded.digest, path=settings.path)
        self._on_changed()

    async def unload(self, name: str, own: AdapterSettings | None = None) -> None:
        """Withdraws an adapter; requests that use it keep it. Raises RequestError for an unknown name.

        An owner that may withdraw only what it has loaded itself, with the settings `own`, does nothing if the name has
        since been unloaded or taken by another owner."""
        async with self._changing:
            if own is not None and (name not in self._loaded or self._wanted.get(name) is not own):
                return
            if name not in self._loaded:
                problem = f"there is no adapter {name[: limits.MAX_NAME_BYTES]!r} here"
                raise errors.request_error(errors.Code.MODEL_NOT_FOUND, problem, param="adapter")
            before = self._loaded.pop(name)
            del self._wanted[name]
            self._require_engine().unload_adapter(before.digest)
            self._retire([before])
            self._log.info("adapter_unloaded", adapter=name, digest=before.digest)
            self._on_changed()

    def _retire(self, withdrawn: Iterable[_Loaded]) -> None:
        """Keeps withdrawn adapters until no stream uses them any more."""
        in_use = self.in_use()
        for one in withdrawn:
            if one.digest in in_use and one.digest not in self._retired:
                self._retired[one.digest] = one.kept
            else:
                one.kept.close()
        for digest in self._retired.keys() - in_use:
            self._retired.pop(digest).close()

    async def _lend(self, engine: contract.Engine) -> None:
        """Gives a new engine the withdrawn adapters, only for the streams that it is about to continue."""
        lent: list[str] = []
        for digest, kept in self._retired.items():
            try:
                found = await engine.load_adapter(kept.path)
            except errors.RequestError as error:
                if error.error.retryable:
                    raise EngineDiedError(f"the engine ended while it loaded the adapter {digest}") from error
                self._log.error("adapter_failed", adapter=digest, error=error.error.message)
                continue
            if found == digest:
                lent.append(digest)
            else:  # the file was overwritten
                engine.unload_adapter(found)
        self._lent = frozenset(lent)
        # once the engine has the streams, which it gets before the event loop's next turn
        asyncio.get_running_loop().call_soon(_unload_all, engine, lent)

    def has_all(self, run: internal.Run) -> bool:
        """Whether the current engine got the adapters that it needs to continue a stream."""
        available = self._lent | {one.digest for one in self._loaded.values()}
        return available.issuperset(one.digest for one in run.adapters)

    def close(self) -> None:
        """Closes all files."""
        for kept in (*self._retired.values(), *(one.kept for one in self._loaded.values())):
            kept.close()

    async def carry_out(self, control: internal.Control) -> internal.ControlReply:
        """Loads or unloads an adapter at an operator's command."""
        assert control.adapter is not None
        try:
            if control.op == "unload_adapter":
                await self.unload(control.adapter)
            else:
                tenants = None if control.tenants is None else tuple(control.tenants)
                settings = AdapterSettings(control.adapter, control.path or "", tenants)
                settings.check()
                await self.load(settings)
        except ValueError as error:
            problem = errors.make_error(errors.Code.INVALID_REQUEST, str(error), param="adapter")
            return internal.ControlReply(ok=False, error=problem)
        except errors.RequestError as error:
            return internal.ControlReply(ok=False, error=error.error)
        return internal.ControlReply(ok=True)

    def cards(self) -> list[messages.CardAdapter]:
        """Returns the replica's adapters as its card lists them."""
        return [
            messages.CardAdapter(
                name=name, digest=digest, tenants=None if settings.tenants is None else list(settings.tenants)
            )
            for name, (settings, digest, _) in sorted(self._loaded.items())
        ]

    def of_run(self, run: internal.Run) -> tuple[Adapter, ...]:
        """Returns the adapters of a run. Raises RequestError unless all of them are loaded for its tenant.

        The router may not yet know that an adapter was replaced, so another worker may take the run."""
        found = tuple(Adapter(one.digest, one.scale) for one in run.adapters)
        if bool(found) is not any(one.scale for one in run.params.lora or []):
            raise errors.invalid_field("adapters", "must be those of lora")
        if list(found) != sorted(set(found)):
            raise errors.invalid_field("adapters", "must be in the order of their digests")
        tenant = subjects.key_to_tenant(run.request_id)
        allowed = {
            digest
            for settings, digest, _ in self._loaded.values()
            if settings.tenants is None or tenant in settings.tenants
        }
        if not allowed.issuperset(one.digest for one in found):
            raise errors.request_error(errors.Code.NO_WORKER, "the worker does not have the adapter", param="lora")
        return found

    def _require_engine(self) -> contract.Engine:
        if self._engine is None:
            raise errors.request_error(errors.Code.NO_WORKER, "the engine is not running")
        return self._engine


async def _load(engine: contract.Engine, settings: AdapterSettings) -> _Loaded:
    """Raises RequestError."""
    try:
        kept = await on_thread(settings.path, partial(KeptAdapter, settings.path), KeptAdapter.close)
    except ModelError as error:
        raise errors.request_error(errors.Code.INVALID_REQUEST, str(error), param="adapter") from error
    try:
        return _Loaded(settings, await engine.load_adapter(settings.path), kept)
    except BaseException:
        kept.close()
        raise


def _unload_all(engine: contract.Engine, digests: Iterable[str]) -> None:
    for digest in digests:
        engine.unload_adapter(digest)


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
