"""The part of the models that one router serves, by patterns of their names (`--models`). Pure.

A router that serves a part subscribes to the subjects of its models only. It learns their names, and those of the
others, from the workers' cards, which are few and which all routers hear."""

import fnmatch
import hashlib
from collections.abc import Iterator

from tokenbus.protocol.wire import messages

MAX_NAMES = 4_096
"""The most names of models, and of models with adapters, that a router subscribes to one by one."""
_WILD = frozenset("*?[")


class ModelPart:
    """The models of one router: all without patterns."""

    def __init__(self, patterns: tuple[str, ...] = ()) -> None:
        self._patterns = patterns
        self._names: set[str] = set()
        self.others: dict[str, None] = {}
        """The models that other routers are to serve, by their workers' cards."""

    def __repr__(self) -> str:
        return f"<ModelPart {' '.join(self._patterns) or '*'}>"

    @property
    def is_whole(self) -> bool:
        """Whether the router serves all models."""
        return not self._patterns

    @property
    def queue(self) -> str:
        """A queue group of the routers with the same patterns."""
        if self.is_whole:
            return "router"
        return "router-" + hashlib.sha256("\0".join(sorted(self._patterns)).encode()).hexdigest()[:12]

    def has(self, model: str) -> bool:
        """Whether the router serves a model."""
        return self.is_whole or any(fnmatch.fnmatchcase(model, pattern) for pattern in self._patterns)

    def first_names(self) -> Iterator[str]:
        """Yields the names that are known before any card: the patterns that are names."""
        for pattern in self._patterns:
            if not _WILD.intersection(pattern):
                self._names.add(pattern)
                yield pattern

    def new_names(self, card: messages.Card) -> Iterator[str]:
        """Yields the names under which requests may ask for a card's model or its adapters, and that are new."""
        if self.is_whole:
            return
        for name in (card.model, *(f"{card.model}:{adapter.name}" for adapter in card.adapters)):
            if name not in self._names and len(self._names) < MAX_NAMES:
                self._names.add(name)
                yield name

    def note_other(self, card: messages.Card) -> None:
        """Notes a model that this router does not serve."""
        if card.model not in self.others and len(self.others) < MAX_NAMES:
            self.others[card.model] = None
