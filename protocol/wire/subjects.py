"""Builds and parses every subject of the wire; no other module puts a subject together.

A subject is a sequence of tokens with dots between them (a NATS token, not a model's). Names of models, tenants and
workers may hold any character, so each is encoded as one token: bytes outside `A-Z a-z 0-9 _ -` become `=XX`."""

import functools
import re
from typing import NamedTuple

from tokenbus.protocol.wire import limits

DEFAULT_PREFIX = "tokenbus.v1"
DEFAULT_TENANT = "default"
OPERATOR_TENANT = "operator"
"""The tenant whose viewers see the limits of all, where there are no keys."""
DEFAULT_INBOX_PREFIXES = ("_INBOX",)
TENANT_PLACEHOLDER = "{tenant}"
"""Placeholder in an inbox prefix for the tenant's name as a subject token."""
NO_ROUTER = "="
"""Stands in an `unguarded` subject for all routers: no router has this name as its subject token."""
PROBE_SUFFIX = ":again"
"""Ends the `gone` subject of a chunk that was sent only to see whether the client is still there."""
NUM_MARKS = 16
"""The number of a stream's latest chunks whose notices can be told apart: their `gone` subjects end with a number."""

_OF_MODELS = ("generate", "cache", "embed", "rerank", "tokenize", "detokenize")
"""Operations whose subject names a model, and perhaps a tenant and one of its keys."""
_KV_REPLY_TOKENS = 4
_TENANT_ID_MODEL = 3
_MAX_NAMES = 4_096
"""Names that are remembered with their tokens: a process meets the same few in every message."""
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_TOKEN = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+")
_REQUEST_ID = re.compile(rf"[A-Za-z0-9_-]{{1,{limits.MAX_ID_BYTES}}}")
_ESCAPED = re.compile(r"=([0-9A-F]{2})")
_SUBJECT = re.compile(r"[^\s.*>]+(?:\.[^\s.*>]+)*")


@functools.lru_cache(_MAX_NAMES)
def encode_name(name: str) -> str:
    """Encodes a name as one subject token: `qwen2.5-0.5b` becomes `qwen2=2E5-0=2E5b`.

    Raises ValueError for a name that is empty, too long, or not Unicode text."""
    length = len(name.encode())
    if not 0 < length <= limits.MAX_NAME_BYTES:
        raise ValueError(f"a name must have 1 to {limits.MAX_NAME_BYTES} bytes, this one has {length}")
    return escape(name)


def escape(text: str) -> str:
    """Encodes a string of any length like `encode_name`."""
    return "".join(chr(byte) if byte in _PLAIN else f"={byte:02X}" for byte in text.encode())


@functools.lru_cache(_MAX_NAMES)
def decode_name(token: str) -> str:
    """Reverses `encode_name`. Raises ValueError for a token that it can't have returned."""
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"{token[:150]!r} is not an encoded name")
    name = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), token).encode("latin-1").decode()
    # Each name has one encoded form: `=41` for `A` would be a second subject for the same name.
    if encode_name(name) != token:
        raise ValueError(f"{token!r} is not the encoded form of {name!r}")
    return name


def request_key(tenant: str, request_id: str) -> str:
    """Returns the string that names a request inside the system, unique across tenants."""
    return f"{encode_name(tenant)}:{request_id}"


def is_request_id(text: str) -> bool:
    """Whether this is allowed as a request id: 1 to 128 of `A-Za-z0-9_-`."""
    return bool(_REQUEST_ID.fullmatch(text))


def is_request_key(key: str) -> bool:
    """Whether `request_key` can have returned this."""
    tenant, _, request_id = key.partition(":")
    try:
        return is_request_id(request_id) and bool(decode_name(tenant))
    except ValueError:
        return False


def key_to_tenant(key: str) -> str:
    """Returns the name of the tenant whose request it is."""
    return decode_name(key.partition(":")[0])


def key_to_request_id(key: str) -> str:
    """Returns the id by which the client knows the request."""
    return key.partition(":")[2]


def epoch_sort_key(epoch: str) -> tuple[int, str]:
    """Returns a key by which epochs (`<unix ms>-<random>`) sort from old to new."""
    born, _, rest = epoch.partition("-")
    # Epochs come from other processes: anything that is not a number sorts before all numbers.
    return (int(born) if born.isascii() and born.isdigit() and len(born) < 20 else 0, rest)


def is_inbox(reply: str, prefixes: tuple[str, ...], tenant_token: str = DEFAULT_TENANT) -> bool:
    """Whether a reply subject may be published to: it has an allowed prefix and at least one more token, and is short
    enough to be sent together with a reply subject of our own.

    `{tenant}` in a prefix stands for `tenant_token`, the encoded name of the tenant who sent the request. The broker
    doesn't check reply subjects against their sender's permissions, so this check is what keeps a client from
    directing messages to other parts of the system."""
    return (
        len(reply.encode()) <= limits.MAX_INBOX_BYTES
        and reply.startswith(_inboxes_of(prefixes, tenant_token))
        and bool(_SUBJECT.fullmatch(reply))
    )


@functools.lru_cache(_MAX_NAMES)
def _inboxes_of(prefixes: tuple[str, ...], tenant_token: str) -> tuple[str, ...]:
    """Returns how a tenant's inboxes may begin."""
    return tuple(prefix.replace(TENANT_PLACEHOLDER, tenant_token) + "." for prefix in prefixes)


class ModelAddress(NamedTuple):
    """The names in a subject that asks something of a model, such as `generate`."""

    model: str
    tenant: str
    key_id: str = ""
    """The id of the API key; empty for a client without one. The broker lets a client name its own key only."""


class RequestAddress(NamedTuple):
    """The names in a `cancel` or `resync` subject; no model if the subject has none."""

    tenant: str
    request_id: str
    model: str | None = None

    @property
    def key(self) -> str:
        return request_key(self.tenant, self.request_id)


class WorkerAddress(NamedTuple):
    """The names in a `card` or `events` subject."""

    model: str
    worker_id: str


def encode_worker(address: WorkerAddress) -> str:
    """Encodes a worker's address as two subject tokens."""
    return f"{encode_name(address.model)}.{encode_name(address.worker_id)}"


@functools.lru_cache(_MAX_NAMES)
def decode_worker(tokens: str) -> WorkerAddress:
    """Reverses `encode_worker`. Raises ValueError for tokens that it can't have returned."""
    model, worker_id = tokens.split(".")
    return WorkerAddress(decode_name(model), decode_name(worker_id))


class Subjects:
    """All subjects under one prefix. Arguments are plain names; the results hold them encoded."""

    def __init__(self, prefix: str = DEFAULT_PREFIX) -> None:
        if not _SUBJECT.fullmatch(prefix):
            raise ValueError(f"the subject prefix {prefix!r} is not a valid subject")
        self.prefix = prefix
        self.discover = f"{prefix}.discover"
        self.models = (f"{prefix}.models", f"{prefix}.models.*")
        self.models_of_keys = f"{prefix}.models.*.*"
        self.fleet = (f"{prefix}.fleet", f"{prefix}.fleet.*")
        self.fleet_of_keys = f"{prefix}.fleet.*.*"
        self.trace = (f"{prefix}.trace", f"{prefix}.trace.*")
        self.trace_of_keys = f"{prefix}.trace.*.*"
        self.all_cards = f"{prefix}.card.*.*"
        self.all_events = f"{prefix}.events.*.*"
        self.all_seals = f"{prefix}.events.*.*.seal"
        self.all_beats = f"{prefix}.beat.*.*"
        self.all_resyncs = (f"{prefix}.resync.*", f"{prefix}.resync.*.*", f"{prefix}.resync.*.*.*")
        self.all_guards = (f"{prefix}.guard.*", f"{prefix}.guard.*.*")
        self.all_cancels = (f"{prefix}.cancel.*", f"{prefix}.cancel.*.*", f"{prefix}.cancel.*.*.*")
        self.all_routers = f"{prefix}.routers.*"
        self.without_model = (*self.all_cancels[:2], *self.all_resyncs[:2])
        """Cancels and resyncs that no worker receives because they do not name their model."""
        self._received = re.compile(rf"{re.escape(prefix)}\.worker\.[^.]+\.[^.]+\.received\.[^.]+").fullmatch

    def __repr__(self) -> str:
        return f"<Subjects {self.prefix}>"

    def all_of(self, operation: str) -> tuple[str, str]:
        """Returns the subjects of all requests that ask something of a model, such as `generate`: without a tenant,
        and with one."""
        return f"{self.prefix}.{operation}.*", f"{self.prefix}.{operation}.*.*"

    def of_model(self, operation: str, model: str) -> tuple[str, str]:
        """Returns those of `all_of` that name one model."""
        return f"{self.prefix}.{operation}.{encode_name(model)}", f"{self.prefix}.{operation}.{encode_name(model)}.*"

    def of_keys(self, operation: str, model: str | None = None) -> str:
        """Returns the subject of the requests that name a key, for one model or for all."""
        return f"{self.prefix}.{operation}.{'*' if model is None else encode_name(model)}.*.*"

    def events_of(self, model: str) -> tuple[str, str]:
        """Returns the subjects of the events and the seals of a model's workers."""
        return f"{self.prefix}.events.{encode_name(model)}.*", f"{self.prefix}.events.{encode_name(model)}.*.seal"

    def listing(self, model: str | None) -> str:
        """Returns the subject on which routers ask one that serves a model for what it serves; for any without one."""
        return f"{self.prefix}.listing.{'*' if model is None else encode_name(model)}"

    def guards_of(self, model: str) -> tuple[str, str]:
        """Returns the subjects on which routers are asked to guard requests of a model."""
        return f"{self.prefix}.guard.{encode_name(model)}", f"{self.prefix}.guard.{encode_name(model)}.*"

    def generate(self, model: str, tenant: str = DEFAULT_TENANT, key_id: str = "") -> str:
        return self._of_model("generate", model, tenant, key_id)

    def embed(self, model: str, tenant: str = DEFAULT_TENANT, key_id: str = "") -> str:
        return self._of_model("embed", model, tenant, key_id)

    def tokenize(self, model: str, tenant: str = DEFAULT_TENANT, key_id: str = "") -> str:
        return self._of_model("tokenize", model, tenant, key_id)

    def detokenize(self, model: str, tenant: str = DEFAULT_TENANT, key_id: str = "") -> str:
        return self._of_model("detokenize", model, tenant, key_id)

    def cache(self, model: str, tenant: str = DEFAULT_TENANT, key_id: str = "") -> str:
        return self._of_model("cache", model, tenant, key_id)

    def rerank(self, model: str, tenant: str = DEFAULT_TENANT, key_id: str = "") -> str:
        return self._of_model("rerank", model, tenant, key_id)

    def models_for(self, tenant: str = DEFAULT_TENANT, key_id: str = "") -> str:
        return f"{self.models[0]}{_client(tenant, key_id)}"

    def fleet_for(self, tenant: str = DEFAULT_TENANT, key_id: str = "") -> str:
        return f"{self.fleet[0]}{_client(tenant, key_id)}"

    def trace_for(self, tenant: str = DEFAULT_TENANT, key_id: str = "") -> str:
        return f"{self.trace[0]}{_client(tenant, key_id)}"

    def cancel(self, request_id: str, tenant: str = DEFAULT_TENANT, model: str | None = None) -> str:
        return self._of_request("cancel", request_id, tenant, model)

    def resync(self, request_id: str, tenant: str = DEFAULT_TENANT, model: str | None = None) -> str:
        return self._of_request("resync", request_id, tenant, model)

    def cancels_of(self, model: str) -> str:
        return f"{self.prefix}.cancel.*.*.{encode_name(model)}"

    def resyncs_of(self, model: str) -> str:
        return f"{self.prefix}.resync.*.*.{encode_name(model)}"

    def with_model(self, subject: str, address: RequestAddress, model: str) -> str:
        """Returns the subject that also names the model, for the `cancel` or `resync` subject of an address."""
        return self._of_request(self._tail(subject)[0], address.request_id, address.tenant, model)

    def worker(self, model: str, worker_id: str, service: str) -> str:
        """Returns the subject of one service of a worker, such as `run`, `control` or `snapshot`."""
        return f"{self.prefix}.worker.{encode_worker(WorkerAddress(model, worker_id))}.{service}"

    def gone(self, model: str, worker_id: str, key: str) -> str:
        return self.worker(model, worker_id, f"gone.{key}")

    def parse_gone(self, subject: str) -> tuple[str, int | None]:
        """Returns the request key in the `gone` subject of a chunk, and the chunk's mark; None for a probe. Raises
        ValueError for a subject that no chunk has."""
        key, _, mark = subject.rpartition(".")[2].rpartition(":")
        return key, None if f":{mark}" == PROBE_SUFFIX else int(mark) % NUM_MARKS

    def card(self, model: str, worker_id: str) -> str:
        return f"{self.prefix}.card.{encode_worker(WorkerAddress(model, worker_id))}"

    def events(self, model: str, worker_id: str) -> str:
        return f"{self.prefix}.events.{encode_worker(WorkerAddress(model, worker_id))}"

    def seal(self, model: str, worker_id: str) -> str:
        return f"{self.events(model, worker_id)}.seal"

    def beat(self, model: str, process: str) -> str:
        return f"{self.prefix}.beat.{encode_name(model)}.{encode_name(process)}"

    def beats_of(self, model: str) -> str:
        return f"{self.prefix}.beat.{encode_name(model)}.*"

    def guard(self, model: str, worker_id: str | None = None) -> str:
        """Returns the subject on which a router is asked to guard a request of a model, by a worker or by another
        router."""
        subject = f"{self.prefix}.guard.{encode_name(model)}"
        return subject if worker_id is None else f"{subject}.{encode_name(worker_id)}"

    def parse_guard(self, subject: str) -> tuple[str, str | None]:
        """Returns the model and the worker in a `guard` subject; no worker if a router asks. Raises ValueError for a
        name that is not encoded properly."""
        model, *worker_id = map(decode_name, self._tail(subject)[1:])
        return model, worker_id[0] if worker_id else None

    def router(self, router_id: str) -> str:
        """Returns the subject on which workers ask one particular router."""
        return f"{self.prefix}.router.{escape(router_id)}"

    def alive(self, model: str, worker_id: str, process_run: str) -> str:
        """Returns the subject that a worker's process hears over the connection that it publishes on: while it is
        connected it has a subscriber, of whom the broker can tell."""
        return self.worker(model, worker_id, f"alive.{process_run}")

    def given_up(self, model: str, worker_id: str, epoch: str) -> str:
        """Returns the subject that a router hears once it has given up an epoch of a worker."""
        # a router id has no colon once it is escaped
        names = (encode_name(model), encode_name(worker_id), escape(epoch))
        return f"{self.prefix}.router.{':'.join(('given_up', *names))}"

    def router_beat(self, router_id: str) -> str:
        """Returns the subject on which a router makes itself known to the others."""
        return f"{self.prefix}.routers.{escape(router_id)}"

    def unguarded(self, model: str, worker_id: str, router_id: str) -> str:
        """Returns the reply subject of a worker's checks of one guardian."""
        return self.worker(model, worker_id, f"unguarded.{escape(router_id)}")

    def unheard(self, model: str, worker_id: str) -> str:
        """Returns the reply subject of a worker's events: there the broker reports that no router hears them."""
        return self.worker(model, worker_id, f"unguarded.{NO_ROUTER}")

    def is_unguarded(self, subject: str, router_id: str) -> bool:
        """Whether `unguarded` can have returned this for the router."""
        tokens = subject.removeprefix(f"{self.prefix}.worker.").split(".")
        return subject.startswith(f"{self.prefix}.worker.") and tokens[2:] == ["unguarded", escape(router_id)]

    def parse_unguarded(self, subject: str) -> WorkerAddress:
        """Returns the worker that asks, given the reply subject of its check. Raises ValueError for a name that is not
        encoded properly."""
        return decode_worker(".".join(self._tail(subject)[1:3]))

    def upload(self, receiver: str, tenant_token: str, upload_id: str) -> str:
        """Returns the subject for the parts of a tenant's large message; `*` stands for all tenants or uploads."""
        return f"{self.prefix}.upload.{tenant_token}.{receiver}.{upload_id}"

    def router_upload(self, router_id: str, upload_id: str) -> str:
        """Returns the subject for the parts of a large message from a worker, or another router, to a router."""
        return f"{self.router(router_id)}.upload.{upload_id}"

    def received(self, model: str, worker_id: str, number: str) -> str:
        """Returns the reply subject of a part that a worker sends."""
        return self.worker(model, worker_id, f"received.{number}")

    def is_received(self, subject: str) -> bool:
        """Whether `received` can have returned this for any worker."""
        return bool(self._received(subject))

    def is_kv_reply(self, subject: str, model: str) -> bool:
        """Whether this is a reply subject for workers of a model that ask for KV blocks."""
        tokens = subject.removeprefix(f"{self.prefix}.worker.{encode_name(model)}.").split(".")
        return (
            subject.startswith(f"{self.prefix}.worker.")
            and len(tokens) == _KV_REPLY_TOKENS
            and tokens[1] == "kv"
            and tokens[2] in ("reply", "received")
        )

    def parse_model(self, subject: str) -> ModelAddress:
        """Parses a subject that asks something of a model. Raises ValueError for a malformed name."""
        _, model, *client = self._tail(subject)
        return ModelAddress(decode_name(model), _tenant(client[:1]), decode_name(client[1]) if client[1:] else "")

    def parse_models(self, subject: str) -> tuple[str, str]:
        """Returns the tenant and the key's id in a `models`, `fleet` or `trace` subject. Raises ValueError for a
        malformed name."""
        client = self._tail(subject)[1:]
        return _tenant(client[:1]), decode_name(client[1]) if client[1:] else ""

    def parse_request(self, subject: str) -> RequestAddress:
        """Parses a `cancel` or `resync` subject. Raises ValueError for a malformed tenant, request id or model."""
        tokens = self._tail(subject)[1:]
        model = decode_name(tokens.pop()) if len(tokens) == _TENANT_ID_MODEL else None
        *tenant, request_id = tokens
        if len(tenant) > 1 or not is_request_id(request_id):
            raise ValueError(f"{'.'.join(tokens)[:150]!r} is not a request id")
        return RequestAddress(_tenant(tenant), request_id, model)

    def tenant_token(self, subject: str) -> str:
        """Returns the encoded name of the tenant who published a client's message, unchecked."""
        verb, *rest = self._tail(subject)
        if verb in ("cancel", "resync"):
            rest = rest[:1] if len(rest) > 1 else []
        elif verb in _OF_MODELS:
            rest = rest[1:]
        elif verb == "upload":
            rest = rest[:1]
        return rest[0] if rest else DEFAULT_TENANT

    def parse_worker(self, subject: str) -> WorkerAddress:
        """Parses a `card`, `events` or seal subject. Raises ValueError for a name that is not encoded properly."""
        return decode_worker(".".join(self._tail(subject)[1:3]))

    def parse_beat(self, subject: str) -> tuple[str, str]:
        """Returns the model and the process in a `beat` subject. Raises ValueError for a name that is not encoded
        properly."""
        return decode_worker(".".join(self._tail(subject)[1:]))

    def _of_model(self, verb: str, model: str, tenant: str, key_id: str) -> str:
        return f"{self.prefix}.{verb}.{encode_name(model)}{_client(tenant, key_id)}"

    def _of_request(self, verb: str, request_id: str, tenant: str, model: str | None) -> str:
        if model is not None:
            return f"{self.prefix}.{verb}.{encode_name(tenant)}.{encode_name(request_id)}.{encode_name(model)}"
        between = "" if tenant == DEFAULT_TENANT else encode_name(tenant) + "."
        return f"{self.prefix}.{verb}.{between}{encode_name(request_id)}"

    def _tail(self, subject: str) -> list[str]:
        assert subject.startswith(self.prefix + "."), subject
        return subject[len(self.prefix) + 1 :].split(".")


def _client(tenant: str, key_id: str) -> str:
    """Returns the end of a subject that says who asks."""
    if key_id:
        return f".{encode_name(tenant)}.{encode_name(key_id)}"
    return "" if tenant == DEFAULT_TENANT else f".{encode_name(tenant)}"


def _tenant(tokens: list[str]) -> str:
    return decode_name(tokens[0]) if tokens else DEFAULT_TENANT
