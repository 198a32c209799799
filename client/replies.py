"""The replies to requests other than `generate`. A value that may be absent is None."""

import msgspec

from tokenbus.client.answer import TokenUsage
from tokenbus.protocol.wire import messages


class ServedModelInfo(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """A model that is served."""

    name: str
    """The name by which requests ask for it."""
    context_length: int
    """The most tokens that a prompt and its answer may have together."""
    features: list[str] = []
    """Abilities that all its workers have, such as `chat`, `tools`, `reasoning` or `embed`."""
    adapters: list[str] = []
    """LoRA adapters that you may use: `<name>:<adapter>` is a model's name too."""
    loadable: bool = False
    """Whether no worker has it loaded now, so that the first request loads it."""


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The embeddings of all inputs."""

    model: str | None = None
    embeddings: list[list[float]] = msgspec.field(default_factory=list)
    """One vector for each input, in their order."""
    usage: TokenUsage | None = None


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """Documents in the order of their relevance."""

    model: str | None = None
    results: list[messages.RankedDocument] = msgspec.field(default_factory=list)
    """The most relevant document first: its `index` in the request, and its `relevance_score`."""
    usage: TokenUsage | None = None


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens of a prompt."""

    model: str | None = None
    count: int
    """The number of tokens."""
    token_ids: list[int] = msgspec.field(default_factory=list)
    """Their ids, unless only the count was asked for."""
    context_length: int | None = None
    """The most tokens that a prompt and its answer may have together."""
    tokenizer: messages.TokenizerInfo | None = None
    """The properties of the model's tokenizer, with `return_tokenizer`."""
