"""Builds and takes apart every subject of the wire; nothing else in the project puts a subject together."""

import re
from typing import NamedTuple

from tokenbus.protocol.wire import limits

DEFAULT_PREFIX = "tokenbus.v1"
DEFAULT_TENANT = "default"
DEFAULT_INBOX_PREFIXES = ("_INBOX",)
TENANT_PLACEHOLDER = "{tenant}"
"""In an inbox prefix: the tenant's name in subject form."""
PROBE_SUFFIX = ":again"
"""On a `gone` subject: the notice answers the chunk that was sent to make sure."""

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_TOKEN = re.compile(r"(?:[A-Za-z0-9_-]|=[0-9A-F]{2})+")
_REQUEST_ID = re.compile(rf"[A-Za-z0-9_-]{{1,{limits.MAX_ID_BYTES}}}")
_ESCAPED = re.compile(r"=([0-9A-F]{2})")
_SUBJECT = re.compile(r"[^\s.*>]+(?:\.[^\s.*>]+)*")


def encode_name(name: str) -> str:
    """`qwen2.5-0.5b` to `qwen2=2E5-0=2E5b`: a name as a single subject token.

    Raises ValueError for a name that is empty, too long, or not Unicode text."""
    length = len(name.encode())
    if not 0 < length <= limits.MAX_NAME_BYTES:
        raise ValueError(f"a name has 1 to {limits.MAX_NAME_BYTES} bytes, this one has {length}")
    return escape(name)


def escape(text: str) -> str:
    """A text of any length in subject form."""
    return "".join(chr(byte) if byte in _PLAIN else f"={byte:02X}" for byte in text.encode())


def decode_name(token: str) -> str:
    """The reverse of `encode_name`. Raises ValueError for what that can't have made."""
    if not _TOKEN.fullmatch(token):
        raise ValueError(f"{token[:150]!r} is not a name in subject form")
    name = _ESCAPED.sub(lambda match: chr(int(match[1], 16)), token).encode("latin-1").decode()
    if encode_name(name) != token:
        raise ValueError(f"{token!r} is not the subject form of {name!r}")
    return name


def request_key(tenant: str, request_id: str) -> str:
    """The one string that names a request inside the system: unique over all tenants."""
    return f"{encode_name(tenant)}:{request_id}"


def is_request_key(key: str) -> bool:
    """Whether `request_key` can have made this of a tenant's name and a request id."""
    tenant, _, request_id = key.partition(":")
    try:
        return bool(_REQUEST_ID.fullmatch(request_id)) and bool(decode_name(tenant))
    except ValueError:
        return False


def key_to_tenant(key: str) -> str:
    """The name of the tenant whose request it is."""
    return decode_name(key.partition(":")[0])


def key_to_request_id(key: str) -> str:
    """The id by which the client knows the request."""
    return key.partition(":")[2]


def epoch_sort_key(epoch: str) -> tuple[int, str]:
    """An epoch `<unix ms>-<random>` in an order in which later lives are larger."""
    born, _, rest = epoch.partition("-")
    return (int(born) if born.isascii() and born.isdigit() and len(born) < 20 else 0, rest)


def is_inbox(reply: str, prefixes: tuple[str, ...], tenant_token: str = DEFAULT_TENANT) -> bool:
    """Whether a reply subject is one that may be published to: an allowed prefix, then at least one more token, and
    short enough to be sent beside a reply subject of our own.

    `{tenant}` in a prefix stands for the subject form of the tenant on whose behalf something was asked.

    A reply subject is not checked against its sender's permissions by the broker, so this is what keeps one client
    from having messages sent to another part of the system."""
    return (
        len(reply.encode()) <= limits.MAX_INBOX_BYTES
        and bool(_SUBJECT.fullmatch(reply))
        and any(reply.startswith(prefix.replace(TENANT_PLACEHOLDER, tenant_token) + ".") for prefix in prefixes)
    )


class ModelAddress(NamedTuple):
    """What the subject of a `generate` or `embed` says."""

    model: str
    tenant: str


class RequestAddress(NamedTuple):
    """What the subject of a `cancel` or `resync` says."""

    tenant: str
    request_id: str

    @property
    def key(self) -> str:
        return request_key(self.tenant, self.request_id)


class WorkerAddress(NamedTuple):
    """What the subject of a card or event message says."""

    model: str
    worker_id: str


def encode_worker(address: WorkerAddress) -> str:
    """A worker as two tokens, for use in a subject."""
    return f"{encode_name(address.model)}.{encode_name(address.worker_id)}"


def decode_worker(tokens: str) -> WorkerAddress:
    """The reverse. Raises ValueError for what that can't have made."""
    model, worker_id = tokens.split(".")
    return WorkerAddress(decode_name(model), decode_name(worker_id))


class Subjects:
    """All subjects under one prefix. Arguments are names; the results hold their subject forms."""

    def __init__(self, prefix: str = DEFAULT_PREFIX) -> None:
        if not _SUBJECT.fullmatch(prefix):
            raise ValueError(f"the subject prefix {prefix!r} is not a plain subject")
        self.prefix = prefix
        self.discover = f"{prefix}.discover"
        self.models = (f"{prefix}.models", f"{prefix}.models.*")
        self.all_cards = f"{prefix}.card.*.*"
        self.all_events = f"{prefix}.events.*.*"
        self.all_generates = (f"{prefix}.generate.*", f"{prefix}.generate.*.*")
        self.all_embeds = (f"{prefix}.embed.*", f"{prefix}.embed.*.*")
        self.all_resyncs = (f"{prefix}.resync.*", f"{prefix}.resync.*.*")
        self.all_cancels = (f"{prefix}.cancel.*", f"{prefix}.cancel.*.*")

    def __repr__(self) -> str:
        return f"<Subjects {self.prefix}>"

    def generate(self, model: str, tenant: str = DEFAULT_TENANT) -> str:
        return self._with_tenant("generate", model, tenant)

    def embed(self, model: str, tenant: str = DEFAULT_TENANT) -> str:
        return self._with_tenant("embed", model, tenant)

    def models_for(self, tenant: str = DEFAULT_TENANT) -> str:
        return self.models[0] if tenant == DEFAULT_TENANT else f"{self.models[0]}.{encode_name(tenant)}"

    def cancel(self, request_id: str, tenant: str = DEFAULT_TENANT) -> str:
        return self._of_request("cancel", request_id, tenant)

    def resync(self, request_id: str, tenant: str = DEFAULT_TENANT) -> str:
        return self._of_request("resync", request_id, tenant)

    def handover(self, model: str) -> str:
        return f"{self.prefix}.handover.{encode_name(model)}"

    def worker(self, model: str, worker_id: str, service: str) -> str:
        """One service of one worker: `run`, `control`, `snapshot`, `tokenizer` or `tokenize`."""
        return f"{self.prefix}.worker.{encode_name(model)}.{encode_name(worker_id)}.{service}"

    def gone(self, model: str, worker_id: str, key: str) -> str:
        return self.worker(model, worker_id, f"gone.{key}")

    def parse_gone(self, subject: str) -> tuple[str, bool]:
        """The request's key of a `gone` subject, and whether it is the probe's."""
        key = subject.rpartition(".")[2]
        return key.removesuffix(PROBE_SUFFIX), key.endswith(PROBE_SUFFIX)

    def card(self, model: str, worker_id: str) -> str:
        return f"{self.prefix}.card.{encode_name(model)}.{encode_name(worker_id)}"

    def events(self, model: str, worker_id: str) -> str:
        return f"{self.prefix}.events.{encode_name(model)}.{encode_name(worker_id)}"

    def parse_model(self, subject: str) -> ModelAddress:
        """Model and tenant of a `generate` or `embed` subject. Raises ValueError for a name in no subject form."""
        tokens = self._tail(subject)
        return ModelAddress(decode_name(tokens[1]), _tenant(tokens[2:]))

    def parse_models(self, subject: str) -> str:
        """The tenant who asks for the models. Raises ValueError for a name in no subject form."""
        return _tenant(self._tail(subject)[1:])

    def parse_request(self, subject: str) -> RequestAddress:
        """Tenant and request id of a `cancel` or `resync` subject. Raises ValueError likewise, and for no id."""
        *tenant, request_id = self._tail(subject)[1:]
        if not _REQUEST_ID.fullmatch(request_id):
            raise ValueError(f"{request_id[:150]!r} is no request id")
        return RequestAddress(_tenant(tenant), request_id)

    def tenant_token(self, subject: str) -> str:
        """On whose behalf a client's message was published, in subject form; nothing is checked."""
        verb, *rest = self._tail(subject)
        if verb in ("cancel", "resync"):
            rest = rest[:-1]
        elif verb in ("generate", "embed"):
            rest = rest[1:]
        return rest[0] if rest else DEFAULT_TENANT

    def parse_worker(self, subject: str) -> WorkerAddress:
        """Model and worker of a `card` or `events` subject. Raises ValueError likewise."""
        return decode_worker(".".join(self._tail(subject)[1:]))

    def _with_tenant(self, verb: str, model: str, tenant: str) -> str:
        subject = f"{self.prefix}.{verb}.{encode_name(model)}"
        return subject if tenant == DEFAULT_TENANT else f"{subject}.{encode_name(tenant)}"

    def _of_request(self, verb: str, request_id: str, tenant: str) -> str:
        between = "" if tenant == DEFAULT_TENANT else encode_name(tenant) + "."
        return f"{self.prefix}.{verb}.{between}{encode_name(request_id)}"

    def _tail(self, subject: str) -> list[str]:
        assert subject.startswith(self.prefix + "."), subject
        return subject[len(self.prefix) + 1 :].split(".")


def _tenant(tokens: list[str]) -> str:
    return decode_name(tokens[0]) if tokens else DEFAULT_TENANT
