"""Other names for models, each for one model or, by weight, for several, and the default model."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tokenbus.protocol.wire import subjects


class AliasTarget(NamedTuple):
    """A model behind an alias and its share of the alias's requests."""

    model: str
    weight: float


class Aliases:
    """The aliases of a gateway."""

    def __init__(self, settings: Iterable[str] = (), default: str = "") -> None:
        """`settings` are `alias=model` or `alias=model:weight,other:weight`; `default` is a model or an alias. Raises
        ValueError for anything else."""
        self._targets: Mapping[str, list[AliasTarget]] = dict(_parse(one) for one in settings)
        if default:
            _check_name(default, f"default model {default!r}")
        self.default = default
        """The model for requests that name none; empty if such requests are refused."""

    def __repr__(self) -> str:
        return f"<Aliases {sorted(self._targets)}>"

    def resolve(self, name: str, key: str) -> str:
        """Returns the model behind a name, which is the name itself if it is not an alias.

        The same key, such as a conversation's session, always gets the same model."""
        targets = self._targets.get(name)
        if targets is None:
            return name
        digest = hashlib.blake2b(key.encode(), digest_size=8, key=name.encode()[:64]).digest()
        at = int.from_bytes(digest) / 2**64 * sum(target.weight for target in targets)
        for target in targets:
            at -= target.weight
            if at < 0:
                return target.model
        return targets[-1].model

    def served(self, context_lengths: Mapping[str, int]) -> dict[str, str]:
        """Returns the aliases whose models are all served, each with its model that has the shortest context.

        `context_lengths` has the served models by name. Models with a weight of 0 do not count."""
        found = {}
        for alias, targets in self._targets.items():
            names = [target.model for target in targets if target.weight]
            if alias not in context_lengths and context_lengths.keys() >= set(names):
                found[alias] = min(names, key=context_lengths.__getitem__)
        return found


def _parse(setting: str) -> tuple[str, list[AliasTarget]]:
    alias, _, models = setting.strip().partition("=")
    targets = [_target(one.strip(), setting) for one in models.split(",")]
    for name in (alias, *(target.model for target in targets)):
        _check_name(name, f"alias {setting!r}")
    if not any(target.weight for target in targets):
        raise ValueError(f"alias {setting!r}: at least one weight must be above 0")
    return alias, targets


def _check_name(name: str, setting: str) -> None:
    try:
        subjects.encode_name(name)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error


def _target(text: str, setting: str) -> AliasTarget:
    # A model's name may itself contain colons (`org/model:Q4`): only a number after the last one is a weight.
    model, colon, weight = text.rpartition(":")
    try:
        share = float(weight) if colon else 1.0
    except ValueError:
        return AliasTarget(text, 1.0)
    if not 0 <= share <= 1e6:
        raise ValueError(f"alias {setting!r}: weights must be 0 to 1000000, got {weight}")
    return AliasTarget(model if colon else text, share)
